"""Attention over a sequence whose tokens lie on several ranks."""

from rlightning_groups.sequence.ulysses import ulysses_attention

__all__ = ["ulysses_attention"]
