"""Attention and loss over a sequence whose tokens lie on several ranks."""

from rlightning_groups.sequence.hybrid import hybrid_attention, register_hybrid_groups
from rlightning_groups.sequence.loss import TokenMean, token_mean
from rlightning_groups.sequence.ring import ring_attention
from rlightning_groups.sequence.shard import SequenceShard, shard_sequence, unshard_sequence
from rlightning_groups.sequence.ulysses import ulysses_attention

__all__ = [
    "SequenceShard",
    "TokenMean",
    "hybrid_attention",
    "register_hybrid_groups",
    "ring_attention",
    "shard_sequence",
    "token_mean",
    "ulysses_attention",
    "unshard_sequence",
]
