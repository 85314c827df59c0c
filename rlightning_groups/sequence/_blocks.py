"""Attention of some queries to one block of keys after another, tile by tile, and its gradients.

Shapes: b batch, h query heads, m key heads, g = h / m query heads to each key head, l local tokens, d
head_dim. Tensors of queries are kept as (b, m, g, l, d); in products the g heads are rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlightning_groups.sequence.layout import Span, TilePair, tile_pairs
from rlightning_groups.sequence.shard import document_of

_SCORES_ON_CPU, _SCORES = 2**20, 2**26  # numbers in a tile's scores, at most: a CPU's caches are small
_SMALLEST_TILE = 128  # below, starting operations costs more than the operations


@dataclass(frozen=True)
class BlockMath:
    """What one call of attention computes; the same in forward and backward.

    Attributes:
        causal: whether a token sees only itself and what is before it.
        cu_seqlens: where documents begin.
        queries: which tokens the queries are.
        keys: which tokens each block's keys are, by ring rank.
        groups: number of key heads.
        tile: tokens along a tile's side, at most.
    """

    causal: bool
    cu_seqlens: tuple[int, ...] | None
    queries: Sequence[Span]
    keys: Sequence[Sequence[Span]]
    groups: int
    tile: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        causal: bool,
        cu_seqlens: tuple[int, ...] | None,
        spans: Sequence[Sequence[Span]],
        rank: int,
    ) -> BlockMath:
        """For queries and the first block of keys.

        Args:
            q: queries, (b, h, l, d).
            k: keys, (b, m, l, d).
            causal: whether a token sees only itself and what is before it.
            cu_seqlens: where documents begin.
            spans: which tokens each ring rank holds.
            rank: this one's place in the ring.
        """
        budget = _SCORES_ON_CPU if q.device.type == "cpu" else _SCORES
        tile = 1 << int(math.log2(max(1, budget // (q.shape[0] * q.shape[1])))) // 2
        return cls(causal, cu_seqlens, spans[rank], spans, k.shape[1], max(_SMALLEST_TILE, tile))

    def tiles(self, source: int) -> Iterator[TilePair]:
        """The tiles of the queries and a rank's keys in which anything is visible."""
        return tile_pairs(self.queries, self.keys[source], self.tile, self.causal, self.cu_seqlens)

    def grouped(self, x: Tensor) -> Tensor:
        """A tensor of queries, (b, h, l, d), as (b, m, g, l, d)."""
        return x.view(x.shape[0], self.groups, -1, *x.shape[2:])

    def hidden(
        self, pair: TilePair, valid: Tensor | None, theirs: Tensor | None, like: Tensor
    ) -> Tensor | None:
        """What is hidden in a tile, to be broadcast to (b, m, g, queries, keys); ``None`` is nothing.

        Args:
            pair: the tile.
            valid: which queries are real, (1 or b, l).
            theirs: which keys are real.
            like: a tensor on the right device.
        """
        hidden: Tensor | None = None
        if pair.causal or pair.documents:
            rows, columns = (
                torch.arange(span.start, span.start + span.length, device=like.device)
                for span in (pair.queries, pair.keys)
            )
            if pair.causal:
                hidden = columns > rows[:, None]
            if pair.documents and self.cu_seqlens is not None:
                other = document_of(rows, self.cu_seqlens)[:, None] != document_of(columns, self.cu_seqlens)
                hidden = other if hidden is None else hidden | other
        if valid is not None and theirs is not None:
            own, other = take(valid, pair.queries, 1), take(theirs, pair.keys, 1)
            unreal = ~(own[:, :, None] & other[:, None, :].bool())[:, None, None]
            hidden = unreal if hidden is None else hidden | unreal
        return hidden

    def scores(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
        """Scaled products of a tile, (b, m, g, queries, keys); hidden ones are minus infinity."""
        products = rows(q) @ k.transpose(-1, -2)
        scores = products.view(*q.shape[:3], q.shape[3], k.shape[2]).mul_(q.shape[-1] ** -0.5)
        return scores if hidden is None else scores.masked_fill_(hidden, -math.inf)


class Attended:
    """What the queries have gathered so far: a running maximum, and sums relative to it.

    Args:
        q: queries, (b, h, l, d).
        v: values, (b, m, l, d).
        blocks: what is computed.
    """

    def __init__(self, q: Tensor, v: Tensor, blocks: BlockMath) -> None:
        self.blocks = blocks
        self.dtype, self.out_dtype = precise(q), v.dtype
        self.q = blocks.grouped(q)
        shape = self.q.shape[:4]
        self.most = q.new_full((*shape, 1), -math.inf, dtype=self.dtype)
        self.total = q.new_zeros((*shape, 1), dtype=self.dtype)
        self.sum = q.new_zeros((*shape, v.shape[3]), dtype=self.dtype)

    def add(self, k: Tensor, v: Tensor, valid: Tensor | None, theirs: Tensor | None, source: int) -> None:
        """Attend to a block.

        Args:
            k: its keys.
            v: its values.
            valid: which queries are real.
            theirs: which of the block's keys are real.
            source: whose block it is.
        """
        for pair in self.blocks.tiles(source):
            q = take(self.q, pair.queries, 3).to(self.dtype)
            keys, values = (take(x, pair.keys, 2).to(self.dtype) for x in (k, v))
            scores = self.blocks.scores(q, keys, self.blocks.hidden(pair, valid, theirs, q))
            most, total, summed = (take(x, pair.queries, 3) for x in (self.most, self.total, self.sum))
            new_most = torch.maximum(most, scores.amax(-1, keepdim=True))
            finite = new_most.masked_fill(new_most == -math.inf, 0)  # a row may have seen nothing yet
            weights = scores.sub_(finite).exp_()
            fade = (most - finite).exp_()
            total.mul_(fade).add_(weights.sum(-1, keepdim=True))
            summed.mul_(fade).add_((rows(weights) @ values).view_as(summed))
            most.copy_(new_most)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The result, (b, h, l, d), and the log-sum-exp of each row, infinite for one that saw nothing."""
        blind = self.total == 0
        total = self.total.masked_fill(blind, 1)
        out = (self.sum / total).flatten(1, 2).to(self.out_dtype)
        return out, (self.most + total.log()).masked_fill(blind, math.inf)


class Gradients:
    """Gradients of queries, and of one block of keys and values after another.

    Args:
        q: queries, (b, h, l, d).
        out: what attention gave.
        lse: the log-sum-exp of each row, as :meth:`Attended.finish` has it.
        grad: the gradient of ``out``.
        blocks: what is computed.
    """

    def __init__(self, q: Tensor, out: Tensor, lse: Tensor, grad: Tensor, blocks: BlockMath) -> None:
        self.blocks, self.lse = blocks, lse
        self.dtype = precise(q)
        self.q, self.grad = blocks.grouped(q), blocks.grouped(grad)
        products = self.grad.to(self.dtype) * blocks.grouped(out)
        self.mean = products.sum(-1, keepdim=True)  # of the weights' gradients, which softmax takes off
        self._dq = torch.zeros_like(self.q, dtype=self.dtype, memory_format=torch.contiguous_format)

    def of_block(
        self, k: Tensor, v: Tensor, valid: Tensor | None, theirs: Tensor | None, source: int
    ) -> Tensor:
        """This rank's part of a block's gradients, packed; adds to the queries' own.

        Args:
            k: the block's keys.
            v: its values.
            valid: which queries are real.
            theirs: which of the block's keys are real.
            source: whose block it is.
        """
        packed = k.new_zeros(k.numel() + v.numel(), dtype=self.dtype)
        dk, dv = unpack(packed, k, v)
        scale = self.q.shape[-1] ** -0.5
        for pair in self.blocks.tiles(source):
            q, grad = (take(x, pair.queries, 3).to(self.dtype) for x in (self.q, self.grad))
            keys, values = (take(x, pair.keys, 2).to(self.dtype) for x in (k, v))
            scores = self.blocks.scores(q, keys, self.blocks.hidden(pair, valid, theirs, q))
            weights = scores.sub_(take(self.lse, pair.queries, 3)).exp_()
            take(dv, pair.keys, 2).add_(rows(weights).transpose(-1, -2) @ rows(grad))
            dscores = (rows(grad) @ values.transpose(-1, -2)).view_as(weights)
            dscores.sub_(take(self.mean, pair.queries, 3)).mul_(weights).mul_(scale)
            take(dk, pair.keys, 2).add_(rows(dscores).transpose(-1, -2) @ rows(q))
            dq = take(self._dq, pair.queries, 3)
            dq.add_((rows(dscores) @ keys).view_as(dq))
        return packed

    @property
    def dq(self) -> Tensor:
        """The queries' gradient, (b, h, l, d)."""
        return self._dq.flatten(1, 2)


def rows(x: Tensor) -> Tensor:
    """(b, m, g, l, d) with the g heads of a key head as rows: (b, m, g * l, d)."""
    return x.flatten(2, 3)


def take(x: Tensor, span: Span, dim: int) -> Tensor:
    """The part of a tensor that holds a span's tokens."""
    return x.narrow(dim, span.offset, span.length)


def precise(x: Tensor) -> torch.dtype:
    """The dtype in which scores and sums are computed."""
    return torch.promote_types(x.dtype, torch.float32)


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values in one flat tensor, so that they travel as one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def unpack(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a packed tensor in the shapes of ``k`` and ``v``."""
    keys, values = packed.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)
