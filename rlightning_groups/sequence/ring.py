"""Attention by blocks of keys and values that travel around the ring of ranks.

After Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (arXiv:2310.01889).
Blocks are merged by their running maximum and sum, the log-sum-exp, as in Dao et al., "FlashAttention: Fast
and Memory-Efficient Exact Attention with IO-Awareness" (arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rlightning_groups.collectives import enter
from rlightning_groups.context import get_ranks_in_group
from rlightning_groups.modes import ParallelMode
from rlightning_groups.sequence._blocks import Attended, BlockMath, Gradients, pack, unpack
from rlightning_groups.sequence._heads import check_tensors, own_valid
from rlightning_groups.sequence.layout import SequenceLayout
from rlightning_groups.sequence.shard import SequenceShard

__all__ = ["ring_attention"]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    shard: SequenceShard | None = None,
    mode: str = ParallelMode.SEQUENCE_PARALLEL,
) -> Tensor:
    """Attention over the whole sequence, each rank seeing the others' keys in turn.

    Exact. No rank ever holds more keys than its own and two blocks under way. Forward: blocks of keys and
    values travel around the ring, each rank's queries attending to one while the next arrives. Backward: they
    travel again with their gradients, and attention is recomputed block by block. Whatever a mask hides as a
    whole is skipped; with ``causal``, cut the sequence in zigzag, or the last rank has most to do.

    Scores and gradients are summed in float32 where the tensors are of lower precision. There is no second
    derivative, and ``torch.compile`` leaves the call to eager code: point-to-point messages break its graph.

    Args:
        q: queries, (batch, heads, local sequence, head_dim); any number of heads.
        k: keys, the same shape, or with fewer heads that divide the queries'.
        v: values, as the keys; their head_dim may be another.
        causal: whether a token sees only itself and what is before it.
        shard: how the sequence was cut: its padding, its order, its documents. ``None``: rank 0 holds the
            first tokens, and there is no padding.
        mode: whose group shares the sequence.

    Returns:
        A tensor like ``q`` with the head_dim of ``v``; zeros, with zero gradients, for padding and for tokens
        that see none.

    Raises:
        ShapeError: shapes or dtypes that do not fit together, or a shard of other tokens.
        ModeError: this rank has no group of the mode.
    """
    layout = check_tensors("ring_attention", q, k, v, shard, mode)
    holders = [[rank] for rank in range(layout.size)]
    return attend_around("ring_attention", q, k, v, own_valid(shard), causal, layout, holders, mode)


def attend_around(
    call: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    causal: bool,
    layout: SequenceLayout,
    holders: Sequence[Sequence[int]],
    mode: str,
    name: str | None = None,
) -> Tensor:
    """Ring attention where a rank of the ring holds the tokens of several ranks of the sequence.

    Args:
        call: who asks, for messages.
        q: queries, (batch, heads, tokens, head_dim).
        k: keys.
        v: values.
        valid: which of these tokens are real, (1 or batch, tokens); ``None`` where the layout says it all.
        causal: whether a token sees only itself and what is before it.
        layout: how the sequence lies over its ranks.
        holders: by rank of the ring, whose tokens it holds, in order.
        mode: whose group is the ring.
        name: which one.
    """
    rest: dict[str, Any] = {"k": list(k.shape), "v": list(v.shape), "ragged": valid is not None}
    group = enter(call, q, mode, name, causal=causal, layout=layout, **rest)
    ring = _Ring(group, group.rank(), tuple(get_ranks_in_group(mode, name)))
    spans = [layout.spans(ranks) for ranks in holders]
    blocks = BlockMath.of(q, k, causal, layout.cu_seqlens, spans, ring.rank)
    result: Tensor = _apply(q, k, v, valid, ring, blocks)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _apply(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, ring: _Ring, blocks: BlockMath) -> Tensor:
    result: Tensor = _RingAttention.apply(q, k, v, valid, ring, blocks)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class _Ring:
    """A group, and this rank's place in it."""

    group: ProcessGroup
    rank: int
    ranks: tuple[int, ...]

    def source(self, step: int) -> int:
        """Whose block is here after some steps."""
        return (self.rank - step) % len(self.ranks)

    def pass_on(self, tensors: Sequence[Tensor]) -> _Passing:
        """Start to send tensors to the next rank, and to receive the previous one's."""
        received = [torch.empty_like(x) for x in tensors]
        after, before = self.source(-1), self.source(1)
        sends = [dist.P2POp(dist.isend, x, self.ranks[after], self.group) for x in tensors]
        receives = [dist.P2POp(dist.irecv, x, self.ranks[before], self.group) for x in received]
        return _Passing(list(tensors), received, dist.batch_isend_irecv(sends + receives))


@dataclass
class _Passing:
    """Tensors under way; ``sent`` must live until they have arrived."""

    sent: list[Tensor]
    received: list[Tensor]
    works: list[Any]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, ring: _Ring, blocks: BlockMath
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # the backward must find the same scores
            attended = Attended(q, v, blocks)
            for keys, values, theirs, source in _visits(k, v, valid, ring):
                attended.add(keys, values, valid, theirs, source)
            out, lse = attended.finish()
        ctx.ring, ctx.blocks = ring, blocks
        ctx.save_for_backward(q, k, v, valid, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, valid, out, lse = ctx.saved_tensors
        ring, blocks = ctx.ring, ctx.blocks
        with torch.autocast(q.device.type, enabled=False):
            gradients = Gradients(q, out, lse, grad, blocks)
            arriving: _Passing | None = None
            for keys, values, theirs, source in _visits(k, v, valid, ring):
                mine = gradients.of_block(keys, values, valid, theirs, source)
                if arriving is not None:
                    mine += arriving.wait()[0]
                # It arrives while the next block's gradients are computed.
                arriving = ring.pass_on([mine]) if len(ring.ranks) > 1 else None
            if arriving is not None:  # the last step of the round brings each block's gradient home
                mine = arriving.wait()[0]
            dk, dv = unpack(mine, k, v)
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _visits(
    k: Tensor, v: Tensor, valid: Tensor | None, ring: _Ring
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, int]]:
    """Every rank's keys, values, valid tokens and number, one's own first, the next under way meanwhile."""
    block = [pack(k, v), *([] if valid is None else [valid.to(torch.uint8).contiguous()])]
    for step in range(len(ring.ranks)):
        last = step == len(ring.ranks) - 1
        arriving = None if last else ring.pass_on(block)
        keys, values = unpack(block[0], k, v)
        yield keys, values, None if valid is None else block[1], ring.source(step)
        if arriving is not None:
            block = arriving.wait()
