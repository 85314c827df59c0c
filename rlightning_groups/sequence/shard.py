"""Slicing a batch over the sequence axis, and putting it together again.

Shift labels first, then slice: after the cut a token's successor may be on another rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from rlightning_groups.collectives import gather_from, split_to
from rlightning_groups.context import get_local_rank, get_world_size
from rlightning_groups.errors import ShapeError
from rlightning_groups.modes import ParallelMode
from rlightning_groups.sequence._nest import Path, length_along, map_tensors
from rlightning_groups.sequence.layout import SequenceLayout, check_scheme

__all__ = ["SequenceShard", "shard_sequence", "unshard_sequence"]

_PAD_VALUES: Mapping[str, float] = {"labels": -100}  # what torch's cross_entropy ignores


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """This rank's part of a batch; made by :func:`shard_sequence` and given to the attention calls.

    Attributes:
        batch: the batch, its sequences cut.
        positions: where each local token stands in the whole sequence, (local length,), int64. Padding is
            counted on, so a table of positions needs ``layout.padded_length`` rows.
        valid: which local tokens are real, (local length,) or (batch, local length), bool.
        documents: the document of each local token, (local length,), int64; ``None`` for unpacked rows.
        layout: how the sequence lies over the ranks.
        mode: whose group shares it.
        dim: the dim that was cut.
        ragged: whether ``valid`` says more than where the padding at the end of the sequence is.
    """

    batch: Any
    positions: Tensor
    valid: Tensor
    documents: Tensor | None
    layout: SequenceLayout
    mode: str
    dim: int
    _padding: Tensor = field(repr=False)  # ``valid`` as it follows from the layout
    ragged: bool = field(init=False)

    def __post_init__(self) -> None:
        # By identity: to compare the values would make the CPU wait for the device in every step.
        object.__setattr__(self, "ragged", self.valid is not self._padding)

    @property
    def document_positions(self) -> Tensor:
        """Where each local token stands in its own document, (local length,), int64."""
        if self.documents is None or self.layout.cu_seqlens is None:
            return self.positions
        return self.positions - self.positions.new_tensor(self.layout.cu_seqlens)[self.documents]


def shard_sequence(
    batch: Any,
    *,
    dim: int = 1,
    scheme: str = "contiguous",
    pad: bool = True,
    mode: str = ParallelMode.SEQUENCE_PARALLEL,
    leave: Collection[str] = (),
    pad_values: Mapping[str, float] | None = None,
    valid: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> SequenceShard:
    """Keep this rank's tokens of a batch that every rank of the group holds.

    The rule: every tensor is cut along ``dim``, all by the same index, and must be as long as the others
    there; what is no sequence is named in ``leave``. An element is named by the keys, field names and
    indices that lead to it, joined by dots: ``"meta"``, ``"inputs.0"``. Numbers, strings and ``None`` stay.

    Forward: own slice, a copy. Backward, where a tensor needs a gradient: all-gather of the slices'
    gradients, which is replicated (as :func:`~rlightning_groups.collectives.split_to`).

    Args:
        batch: a tensor, or any nest of dicts, lists, tuples, named tuples and dataclasses of tensors;
            unchanged, equal on every rank of the group.
        dim: the sequence dim of every tensor that is cut.
        scheme: ``"contiguous"``: rank *r* holds the *r*-th of *size* chunks. ``"zigzag"``: of *2 size* chunks
            rank *r* holds *r* and *2 size - 1 - r*, which balances causal ring attention.
        pad: whether a length that does not divide is padded at its end, or refused.
        mode: whose group shares the sequence.
        leave: elements that are left alone, with all below them.
        pad_values: what a tensor is padded with, by its path or the last name of it; default 0, and -100 for
            ``"labels"``, since integers do not show whether they are labels. An integer tensor without a name
            (in a list or tuple) needs an entry by its index; a batch that is one tensor has the name ``""``.
        valid: which tokens of the whole sequence are real, (length,) or (batch, length), bool or 0 and 1;
            by default all but the padding that is added.
        cu_seqlens: where the documents of a packed row begin, then the row's length, as flash attention
            has it: ``[0, 3, 8]`` for documents of 3 and 5 tokens. The same for every row of the batch.

    Returns:
        The slices, with what attention needs to know of the whole.

    Raises:
        ShapeError: a tensor without the dim or of another length, a length that does not divide where
            ``pad`` is off, an unknown scheme, or ``leave``, ``valid`` or ``cu_seqlens`` that do not fit.
        ModeError: this rank has no group of the mode.
    """
    size, rank = get_world_size(mode), get_local_rank(mode)
    pieces = size * (2 if check_scheme(scheme) == "zigzag" else 1)
    first: list[tuple[str, int, Tensor]] = []

    def measure(path: Path, x: Tensor) -> Tensor:
        length = length_along(path, x, dim, first[0][:2] if first else None, "shard_sequence")
        first.append((path.say(), length, x))
        integers = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if pad and integers and _pad_value(path, values) is None:
            raise ShapeError(
                f"shard_sequence: {path.say()} holds integers under an index, which does not say whether "
                f"they are labels; give its padding as pad_values={{{str(path)!r}: -100}} for labels "
                f"(0 for token ids), use a dict, or set pad=False"
            )
        return x

    values = {**_PAD_VALUES, **(pad_values or {})}
    map_tensors(batch, measure, leave, "shard_sequence")
    if not first:
        raise ShapeError("shard_sequence: the batch has no tensor to cut")
    length, device = first[0][1], first[0][2].device
    padded = -(-length // pieces) * pieces
    if padded != length and not pad:
        raise ShapeError(
            f"shard_sequence: {length} tokens do not divide into {pieces} pieces ({scheme} over the {size} "
            f"ranks of {mode}); lengths that do are multiples of {pieces}, such as "
            f"{padded - pieces or 2 * padded} and {padded}, or set pad=True"
        )
    bounds = None if cu_seqlens is None else _check_cu_seqlens(cu_seqlens, length)
    mask = None if valid is None else _check_valid(valid, length)
    layout = SequenceLayout(check_scheme(scheme), size, padded // size, length, bounds)

    def cut(path: Path, x: Tensor) -> Tensor:
        return _cut(_padded(x, dim, padded, _pad_value(path, values) or 0), dim, layout, rank, mode)

    result = map_tensors(batch, cut, leave, "shard_sequence")
    positions = _own(torch.arange(padded, device=device), 0, layout, rank)
    padding = positions < length
    return SequenceShard(
        result,
        positions,
        padding if mask is None else _own(_padded(mask, -1, padded, 0), -1, layout, rank).to(device),
        None if bounds is None else document_of(positions, bounds),
        layout,
        mode,
        dim,
        padding,
    )


def unshard_sequence(
    batch: Any,
    shard: SequenceShard,
    *,
    dim: int | None = None,
    leave: Collection[str] = (),
    grad: Literal["replicated", "partial"] = "replicated",
) -> Any:
    """Put the ranks' slices together on every rank, in the order of the sequence and without the padding.

    Forward: all-gather. Backward: own slice of a ``replicated`` gradient, or reduce-scatter of a ``partial``
    one (as :func:`~rlightning_groups.collectives.gather_from`); the gradient of padding is zero.

    Args:
        batch: a tensor or nest of tensors, all as long as the shard's along ``dim``.
        shard: what the slices belong to.
        dim: their sequence dim; by default the one that was cut.
        leave: elements that are left alone, named as for :func:`shard_sequence`.
        grad: what the backward is given: ``replicated`` where every rank computes the same from the result.

    Returns:
        The same nest, its tensors of the whole sequence's length.

    Raises:
        ShapeError: a tensor without the dim or of another length, or ``leave`` or ``grad`` that do not fit.
        ModeError: this rank has no group of the shard's mode.
    """
    layout, along = shard.layout, shard.dim if dim is None else dim
    if get_world_size(shard.mode) != layout.size:
        raise ShapeError(
            f"unshard_sequence: the shard is of {layout.size} ranks, but {shard.mode} has "
            f"{get_world_size(shard.mode)}"
        )
    if grad not in ("replicated", "partial"):
        raise ShapeError(f"unshard_sequence: grad must be 'replicated' or 'partial', got {grad!r}")

    def check(path: Path, x: Tensor) -> Tensor:
        length_along(path, x, along, ("the shard", layout.local_length), "unshard_sequence")
        return x

    def join(path: Path, x: Tensor) -> Tensor:
        if x.dtype == torch.bool:  # not every backend can send them
            return join(path, x.view(torch.uint8)).view(torch.bool)
        whole = gather_from(x, along, shard.mode, grad=grad)
        return in_order(whole, along, layout).narrow(along, 0, layout.length)

    map_tensors(batch, check, leave, "unshard_sequence")  # before anything is sent
    return map_tensors(batch, join, leave, "unshard_sequence")


def in_order(x: Tensor, dim: int, layout: SequenceLayout) -> Tensor:
    """Bring the tokens of all ranks, joined in group order, into the order of the sequence.

    Args:
        x: a tensor of ``layout.padded_length`` along ``dim``.
        dim: the sequence dim.
        layout: how the sequence lies over the ranks.
    """
    order = layout.chunks(range(layout.size))
    return _rearranged(x, dim, [order.index(chunk) for chunk in range(len(order))], layout)


def by_rank(x: Tensor, dim: int, layout: SequenceLayout) -> Tensor:
    """Bring the tokens of a sequence into the order in which the ranks hold them: undoes :func:`in_order`.

    Args:
        x: a tensor of ``layout.padded_length`` along ``dim``.
        dim: the sequence dim.
        layout: how the sequence lies over the ranks.
    """
    return _rearranged(x, dim, layout.chunks(range(layout.size)), layout)


def document_of(positions: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    """The document of each position; what lies behind the last document is one of its own.

    Args:
        positions: positions in the whole sequence.
        cu_seqlens: where documents begin, and where the last ends.
    """
    return torch.bucketize(positions, positions.new_tensor(cu_seqlens[1:]), right=True)


def _rearranged(x: Tensor, dim: int, order: list[int], layout: SequenceLayout) -> Tensor:
    if order == sorted(order):
        return x
    chunks = x.split(layout.chunk_length, dim)
    return torch.cat([chunks[index] for index in order], dim)


def _own(x: Tensor, dim: int, layout: SequenceLayout, rank: int) -> Tensor:
    chunks = x.split(layout.chunk_length, dim)
    return torch.cat([chunks[chunk] for chunk in layout.chunks([rank])], dim)


def _cut(x: Tensor, dim: int, layout: SequenceLayout, rank: int, mode: str) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return split_to(by_rank(x, dim, layout), dim, mode)
    return _own(x, dim, layout, rank)


def _padded(x: Tensor, dim: int, length: int, value: float) -> Tensor:
    if x.shape[dim] == length:
        return x
    shape = list(x.shape)
    shape[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_full(shape, value)], dim)


def _pad_value(path: Path, values: Mapping[str, float]) -> float | None:
    """What a tensor is padded with, ``None`` where only a name could tell."""
    last = path.parts[-1] if path.parts else ""
    if str(path) in values or last in values:
        return values.get(str(path), values.get(last))
    return 0 if path.named else None


def _check_cu_seqlens(cu_seqlens: Tensor | Sequence[int], length: int) -> tuple[int, ...]:
    given: Any = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    numbers = isinstance(given, list) and all(isinstance(x, int) for x in given)
    if not numbers or len(given) < 2 or given[0] != 0 or given[-1] != length or given != sorted(given):
        raise ShapeError(
            f"cu_seqlens must be whole numbers that start with 0, never fall, and end with the row's "
            f"{length} tokens, such as [0, {max(1, length // 2)}, {length}]; got {given}"
        )
    return tuple(given)


def _check_valid(valid: Tensor, length: int) -> Tensor:
    if valid.dim() not in (1, 2) or valid.shape[-1] != length or valid.is_floating_point():
        raise ShapeError(
            f"valid must be bool (or 0 and 1) of shape ({length},) or (batch, {length}), got {valid.dtype} "
            f"of shape {list(valid.shape)}"
        )
    return valid.bool()
