"""Attention by all-to-all: from a part of the tokens and all heads to all tokens and a part of the heads.

After Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models" (arXiv:2309.14509).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlightning_groups.collectives import all_to_all
from rlightning_groups.context import get_world_size
from rlightning_groups.errors import ShapeError
from rlightning_groups.modes import ParallelMode


class Attention(Protocol):
    """What computes attention over whole sequences, with the signature of torch's own."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        """Attend; shapes (batch, heads, sequence, head_dim)."""


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mode: str = ParallelMode.SEQUENCE_PARALLEL,
    attention: Attention = scaled_dot_product_attention,
) -> Tensor:
    """Attention over the whole sequence, each rank holding consecutive tokens of it.

    Forward: two all-to-alls around a local attention over all tokens and a share of the heads. Backward: the
    reverse all-to-alls; gradients are exact.

    Args:
        q: queries, (batch, heads, local sequence, head_dim); local rank 0 holds the first tokens.
        k: keys, the same shape.
        v: values, the same shape.
        causal: whether a token sees only itself and what is before it.
        mode: whose group shares the sequence.
        attention: computes attention over whole sequences.

    Returns:
        A tensor like ``q``.

    Raises:
        ShapeError: the heads do not divide over the group; the message says which counts would.
        ModeError: this rank has no group of the mode.
    """
    size = get_world_size(mode)
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes) or len(set(shapes)) != 1:
        raise ShapeError(
            f"q, k and v must be of one shape (batch, heads, local sequence, head_dim), got {shapes}"
        )
    heads = q.shape[1]
    if heads % size:
        raise ShapeError(
            f"{heads} heads do not divide over the {size} ranks of {mode}; use a multiple of {size} heads, "
            f"or a group whose size divides {heads}"
        )
    if size == 1:
        return attention(q, k, v, is_causal=causal)
    # One all-to-all carries all three: fewer, larger messages.
    packed = all_to_all(torch.stack([q, k, v]), 2, 3, mode)
    return all_to_all(attention(*packed.unbind(), is_causal=causal), 2, 1, mode)
