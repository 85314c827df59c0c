"""Attention by all-to-all: from a part of the tokens and all heads to all tokens and a part of the heads.

After Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models" (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlightning_groups.modes import ParallelMode
from rlightning_groups.sequence._heads import (
    check_heads,
    check_tensors,
    gather_heads,
    gather_valid,
    own_valid,
    scatter_heads,
)
from rlightning_groups.sequence.layout import SequenceLayout
from rlightning_groups.sequence.shard import SequenceShard, by_rank, in_order

__all__ = ["Attention", "ulysses_attention"]

Attention = Callable[..., Tensor]
"""Attention over whole sequences: ``attention(query, key, value, is_causal=...)``, shapes (batch, heads,
sequence, head_dim) with equally many heads, and ``attn_mask=`` (bool, true where visible) for ragged rows."""


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    shard: SequenceShard | None = None,
    mode: str = ParallelMode.SEQUENCE_PARALLEL,
    attention: Attention = scaled_dot_product_attention,
) -> Tensor:
    """Attention over the whole sequence, each rank holding a part of its tokens.

    Forward: two all-to-alls around a local attention over all tokens and a share of the heads. Backward: the
    reverse all-to-alls; gradients are exact. ``torch.compile(fullgraph=True)`` traces it.

    Args:
        q: queries, (batch, heads, local sequence, head_dim).
        k: keys, the same shape, or with fewer heads that divide the queries'. Where they do not divide over
            the ranks they are repeated, and their gradients summed.
        v: values, as the keys; their head_dim may be another.
        causal: whether a token sees only itself and what is before it.
        shard: how the sequence was cut: its padding, its order, its documents. ``None``: rank 0 holds the
            first tokens, and there is no padding.
        mode: whose group shares the sequence.
        attention: computes attention over whole sequences; called once per document. Other calls than torch's
            own get key and value heads repeated to the number of query heads.

    Returns:
        A tensor like ``q`` with the head_dim of ``v``; zeros, with zero gradients, for padding and for tokens
        that see none.

    Raises:
        ShapeError: shapes or dtypes that do not fit together, heads that do not divide over the ranks (the
            message says which counts would), or a shard of other tokens.
        ModeError: this rank has no group of the mode.
    """
    layout = check_tensors("ulysses_attention", q, k, v, shard, mode)
    check_heads("ulysses_attention", q.shape[1], layout.size, f"the {layout.size} ranks of {mode}")
    valid = gather_valid(own_valid(shard), mode)
    out = _attend(*scatter_heads(q, k, v, mode), causal, valid, layout, attention)
    return gather_heads(out, mode)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    valid: Tensor | None,
    layout: SequenceLayout,
    attention: Attention,
) -> Tensor:
    """Attention over tokens that lie by rank; (batch, own heads, padded sequence, head_dim)."""
    q, k, v = (in_order(x, 2, layout) for x in (q, k, v))
    if valid is not None:
        valid = in_order(valid, 1, layout)
    # Documents one by one need no mask, so that any attention will do and none is computed in vain.
    bounds = layout.cu_seqlens or (0, layout.length)
    outs = [
        _attend_document(
            q[:, :, start:end],
            k[:, :, start:end],
            v[:, :, start:end],
            causal,
            None if valid is None else valid[:, start:end],
            attention,
        )
        for start, end in pairwise(bounds)
        if end > start
    ]
    if layout.padded_length > layout.length:
        batch, heads = q.shape[:2]
        outs.append(v.new_zeros(batch, heads, layout.padded_length - layout.length, v.shape[3]))
    return by_rank(torch.cat(outs, 2) if len(outs) > 1 else outs[0], 2, layout)


def _attend_document(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, valid: Tensor | None, attention: Attention
) -> Tensor:
    arguments: dict[str, object] = {"is_causal": causal}
    if q.shape[1] != k.shape[1]:
        if attention is scaled_dot_product_attention:
            arguments["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if valid is None:
        return attention(q, k, v, **arguments)
    visible = valid[:, None, :, None] & valid[:, None, None, :]
    if causal:
        visible = visible & torch.ones_like(visible[:1, :1]).tril()
    blind = ~visible.any(-1, keepdim=True)
    # A row that sees nothing would be 0 / 0 in some kernels: let it see everything, and drop the result.
    arguments.update(is_causal=False, attn_mask=visible | blind)
    return attention(q, k, v, **arguments).masked_fill(blind, 0)
