"""Which tokens of a sequence lie on which rank: pure arithmetic, without torch.

A sequence, padded to a length that divides, is cut into equal chunks: one per rank (contiguous), or two per
rank, one from each end (zigzag), so that a causal mask leaves every rank equally much to do.

>>> SequenceLayout("contiguous", size=2, local_length=4, length=7).spans([1])
[Span(offset=0, start=4, length=3)]
>>> SequenceLayout("zigzag", size=2, local_length=4, length=7).spans([0])
[Span(offset=0, start=0, length=2), Span(offset=2, start=6, length=1)]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from rlightning_groups.errors import ShapeError

__all__ = ["Scheme", "SequenceLayout", "Span", "TilePair", "check_scheme", "tile_pairs"]

Scheme = Literal["contiguous", "zigzag"]


def check_scheme(scheme: str) -> Scheme:
    """A scheme, checked.

    Args:
        scheme: what was asked for.

    Raises:
        ShapeError: there is no such scheme.
    """
    for known in get_args(Scheme):
        if scheme == known:
            return scheme  # type: ignore[return-value]
    raise ShapeError(f"scheme must be 'contiguous' or 'zigzag', got {scheme!r}")


class Span(NamedTuple):
    """Consecutive tokens.

    Attributes:
        offset: where they begin in the tensor that holds them.
        start: where they begin in the whole sequence.
        length: how many they are.
    """

    offset: int
    start: int
    length: int


class TilePair(NamedTuple):
    """Queries and keys of which some see each other, and what of the rest has to be masked.

    Attributes:
        queries: some queries.
        keys: some keys.
        causal: whether some of the keys come after some of the queries.
        documents: whether some of them are of different documents.
    """

    queries: Span
    keys: Span
    causal: bool
    documents: bool


@dataclass(frozen=True)
class SequenceLayout:
    """How one sequence lies over the ranks of a group.

    Args:
        scheme: ``"contiguous"``, rank *r* holding chunk *r*; or ``"zigzag"``, rank *r* of *n* holding chunks
            *r* and *2n - 1 - r*.
        size: number of ranks.
        local_length: tokens on each rank, padding included.
        length: tokens of the whole sequence, without the padding that was added at its end.
        cu_seqlens: where the documents of a packed row begin, and where the last ends.
    """

    scheme: Scheme
    size: int
    local_length: int
    length: int
    cu_seqlens: tuple[int, ...] | None = None

    @property
    def padded_length(self) -> int:
        """Tokens on all ranks together, padding included."""
        return self.size * self.local_length

    @property
    def chunks_per_rank(self) -> int:
        """Pieces of the sequence that a rank holds."""
        return 2 if self.scheme == "zigzag" else 1

    @property
    def chunk_length(self) -> int:
        """Tokens of one piece."""
        return self.local_length // self.chunks_per_rank

    def chunks(self, ranks: Iterable[int]) -> list[int]:
        """The chunks that some ranks hold, in the order in which they hold them.

        Args:
            ranks: ranks of the group, whose tensors are joined in this order.

        >>> SequenceLayout("zigzag", size=3, local_length=2, length=6).chunks(range(3))
        [0, 5, 1, 4, 2, 3]
        """
        if self.scheme == "contiguous":
            return list(ranks)
        return [chunk for rank in ranks for chunk in (rank, 2 * self.size - 1 - rank)]

    def spans(self, ranks: Iterable[int]) -> list[Span]:
        """The real tokens that some ranks hold.

        Args:
            ranks: ranks of the group, whose tensors are joined in this order.
        """
        spans: list[Span] = []
        for index, chunk in enumerate(self.chunks(ranks)):
            offset, start = index * self.chunk_length, chunk * self.chunk_length
            length = min(self.chunk_length, self.length - start)
            if length <= 0:
                continue
            last = spans[-1] if spans else None
            if last and (last.offset + last.length, last.start + last.length) == (offset, start):
                spans[-1] = last._replace(length=last.length + length)
            else:
                spans.append(Span(offset, start, length))
        return spans


def tile_pairs(
    queries: Sequence[Span],
    keys: Sequence[Span],
    tile: int,
    causal: bool,
    cu_seqlens: Sequence[int] | None,
) -> Iterator[TilePair]:
    """The pieces of an attention matrix in which anything is visible.

    Args:
        queries: the queries' tokens.
        keys: the keys' tokens.
        tile: tokens along a piece's side, at most.
        causal: whether a token sees only itself and what is before it.
        cu_seqlens: where documents begin.

    Yields:
        Pairs of tokens; what is masked as a whole is left out.

    >>> pairs = tile_pairs([Span(0, 0, 4)], [Span(0, 0, 4)], tile=2, causal=True, cu_seqlens=None)
    >>> [(pair.queries.start, pair.keys.start, pair.causal) for pair in pairs]
    [(0, 0, True), (2, 0, False), (2, 2, True)]
    """
    key_tiles = [(key, _documents(key, cu_seqlens)) for key in _tiles(keys, tile)]
    for query in _tiles(queries, tile):
        first, last = _documents(query, cu_seqlens)
        for key, (first_key, last_key) in key_tiles:
            if causal and key.start >= query.start + query.length:
                continue
            if last_key < first or first_key > last:
                continue
            cut = causal and key.start + key.length - 1 > query.start
            yield TilePair(query, key, cut, not first == last == first_key == last_key)


def _tiles(spans: Sequence[Span], tile: int) -> Iterator[Span]:
    for span in spans:
        for begin in range(0, span.length, tile):
            yield Span(span.offset + begin, span.start + begin, min(tile, span.length - begin))


def _documents(span: Span, cu_seqlens: Sequence[int] | None) -> tuple[int, int]:
    """The first and the last document that a span touches."""
    if cu_seqlens is None:
        return 0, 0
    end = span.start + span.length - 1
    return bisect_right(cu_seqlens, span.start) - 1, bisect_right(cu_seqlens, end) - 1
