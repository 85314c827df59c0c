"""How a tensor lies over the groups: read from a DTensor's placements, or from marks on a plain tensor.

A tensor is *cut* over a group along a dim when each rank of the group holds a part of it. Cuts are nested,
outermost first: hand-made marks come before a DTensor's own cuts, since a marked shard is what data-parallel
sharding cuts further. Everything that must know the whole from its parts (norms, checkpoints, weight
transfer) asks :func:`shard_spec`, and nothing guesses by a parameter's name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from rlightning_groups import _torch_compat
from rlightning_groups.context import ParallelContext, get_global_rank, get_group, is_initialized
from rlightning_groups.errors import LayoutError, ShapeError
from rlightning_groups.layout import ParallelLayout
from rlightning_groups.modes import ParallelMode

__all__ = [
    "Region",
    "ShardSpec",
    "is_sharded",
    "local_tensor",
    "marked_state_dict",
    "mark_partial_gradient",
    "mark_sharded",
    "partial_gradient_modes",
    "regions_by_rank",
    "shard_groups",
    "shard_spec",
]

_PARTIAL = "_rlightning_groups_partial_modes"
_CUTS = "_rlightning_groups_cuts"


class Region(NamedTuple):
    """A box inside a tensor: where it starts and how long it is, by dim.

    A rank that holds nothing has a length of 0 somewhere.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index the full tensor with."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.lengths:
            count *= length
        return count


@dataclass(frozen=True)
class ShardSpec:
    """What this rank holds of a tensor, and who holds the same.

    Attributes:
        global_shape: shape of the full tensor.
        dtype: its dtype.
        region: the part of the full tensor that this rank holds.
        replicated_over: the modes, one per axis of the layout, along which all ranks hold this same part;
            empty without a context.
    """

    global_shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region
    replicated_over: tuple[str, ...]


class ShardMark(NamedTuple):
    """One mark of a plain tensor.

    Attributes:
        dim: along which the parts lie.
        mode: over whose group.
        sizes: their lengths by group rank; ``None`` for equal parts.
    """

    dim: int
    mode: str
    sizes: tuple[int, ...] | None


class _Cut(NamedTuple):
    """One cut of a tensor: along which dim, over which ranks, into which lengths."""

    dim: int
    group: ProcessGroup
    own: int  # number of this rank's part
    parts: int
    sizes: tuple[int, ...] | None  # None: torch.chunk's
    mode: str | None  # known for marks
    mesh_dim: int | None  # known for DTensors


# -------------------------------------------------------------------------------------------------- marks


def mark_sharded(
    tensor: Tensor,
    dim: int,
    mode: str = ParallelMode.TENSOR_PARALLEL,
    *,
    sizes: Sequence[int] | None = None,
) -> None:
    """Say that each rank of a group holds a part of a plain parameter or buffer.

    Gradient norms, checkpoints and weight transfer then see one tensor, cut along ``dim`` in the order of the
    group's ranks. Marks for several modes are nested, the first one outermost; a second mark for the same
    mode replaces the first.

    Args:
        tensor: a plain parameter or buffer, this rank's part. The mark stays with this object: a copy made by
            ``copy.deepcopy`` needs its own.
        dim: the dim along which the parts lie; negative counts from the end.
        mode: over whose group the tensor is cut.
        sizes: the lengths of all parts along ``dim``, by group rank, where they are not equal; what
            :func:`~rlightning_groups.collectives.chunk_sizes` gives for weights cut by this package.

    Raises:
        LayoutError: ``tensor`` is a DTensor, whose placements say it, or no tensor; ``mode`` is no string.
        ShapeError: there is no such dim, or ``sizes`` holds something else than lengths.
    """
    if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
        what = "a DTensor, whose placements say how it is sharded" if isinstance(tensor, DTensor) else tensor
        raise LayoutError(f"only a plain tensor can be marked as sharded, got {what!s:.80}")
    _check_mode(mode)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ShapeError(f"mark_sharded: there is no dim {dim!r} in a tensor of shape {list(tensor.shape)}")
    dim %= tensor.dim()
    if sizes is not None:
        sizes = tuple(sizes)
        if not all(isinstance(size, int) and size >= 0 for size in sizes) or tensor.shape[dim] not in sizes:
            raise ShapeError(
                f"mark_sharded: sizes={sizes} must be the lengths of all parts along dim {dim}, this rank's "
                f"{tensor.shape[dim]} among them"
            )
    others = [mark for mark in shard_marks(tensor) if mark.mode != mode]
    setattr(tensor, _CUTS, (*others, ShardMark(dim, mode, sizes)))


def mark_partial_gradient(parameter: Tensor, mode: str = ParallelMode.TENSOR_PARALLEL) -> None:
    """Say that each rank of a group computes a summand of a replicated parameter's gradient.

    Such is a norm's weight inside a sequence-sharded region: every tensor-parallel rank uses all of it, on
    its own tokens. The strategy sums the gradients over the group once per optimizer step, before unscaling
    and clipping; without the strategy call :func:`~rlightning_groups.gradients.sum_partial_gradients`.

    Args:
        parameter: a plain parameter that is equal on all ranks of the group; marking twice is marking once.
            The mark stays with this object: a copy made by ``copy.deepcopy`` needs its own.
        mode: over whose group the gradient is to be summed.

    Raises:
        LayoutError: ``parameter`` is not a leaf tensor that needs a gradient, or ``mode`` no string.
    """
    if not isinstance(parameter, Tensor) or not parameter.is_leaf or not parameter.requires_grad:
        raise LayoutError(
            f"only a parameter that needs a gradient can be marked, got {type(parameter).__name__}"
        )
    _check_mode(mode)
    setattr(parameter, _PARTIAL, tuple(dict.fromkeys([*partial_gradient_modes(parameter), mode])))


def partial_gradient_modes(parameter: Tensor) -> tuple[str, ...]:
    """The modes over which a parameter's gradient is a summand; empty where it was not marked.

    Args:
        parameter: any tensor.
    """
    modes: tuple[str, ...] = getattr(parameter, _PARTIAL, ())
    return modes


def shard_marks(tensor: Tensor) -> tuple[ShardMark, ...]:
    """What :func:`mark_sharded` said of a tensor, outermost first.

    Args:
        tensor: any tensor.
    """
    marks: tuple[ShardMark, ...] = getattr(tensor, _CUTS, ())
    return marks


def copy_marks(source: Tensor, target: Tensor) -> None:
    """Give a tensor the marks of the one it stands for.

    Args:
        source: a tensor that may be marked.
        target: its replacement, a DTensor perhaps.
    """
    for name in (_CUTS, _PARTIAL):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


@contextmanager
def kept_marks(module: nn.Module) -> Iterator[None]:
    """Around ``module.to(...)`` and the like, which give a DTensor parameter a new inside without its marks.

    Args:
        module: any module; its parameters afterwards have the marks that they had before.
    """
    before = {
        name: {key: getattr(parameter, key) for key in (_CUTS, _PARTIAL) if hasattr(parameter, key)}
        for name, parameter in module.named_parameters()
    }
    yield
    for name, parameter in module.named_parameters():
        for key, value in before.get(name, {}).items():
            setattr(parameter, key, value)


# ------------------------------------------------------------------------------------------------ reading


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: a DTensor's shard, any other tensor itself.

    Args:
        tensor: any tensor.

    Returns:
        A tensor that shares memory with the argument.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is described as a part of a larger one; no context is needed.

    Args:
        tensor: any tensor.
    """
    return bool(shard_marks(tensor)) or (isinstance(tensor, DTensor) and any(map(_shards, tensor.placements)))


def shard_groups(tensor: Tensor) -> list[ProcessGroup]:
    """The groups over which a tensor is cut, outermost first; no group of one rank, no communication.

    Args:
        tensor: any tensor.

    Raises:
        ContextError, ModeError: a tensor is marked for a mode that has no group here.
    """
    return [cut.group for cut in _cuts(tensor)]


def shard_spec(tensor: Tensor) -> ShardSpec:
    """What this rank holds of a tensor, by its placements or its marks; no communication.

    Args:
        tensor: a DTensor or a plain tensor, marked or not.

    Raises:
        ContextError, ModeError: the tensor is marked for a mode that has no group here.
        ShapeError: its shape is not what its marks or placements say.
    """
    cuts = _cuts(tensor)
    shape = _global_shape(tensor, cuts)
    region = _region(shape, [(cut, cut.own) for cut in cuts])
    local = local_tensor(tensor)
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        region = Region((0,) * len(shape), (0,) * len(shape))
    elif tuple(local.shape) != region.lengths:
        raise ShapeError(
            f"this rank holds {list(local.shape)} of a tensor of shape {list(shape)}, but its "
            f"{'placements' if isinstance(tensor, DTensor) else 'marks'} say {list(region.lengths)}"
        )
    return ShardSpec(shape, tensor.dtype, region, _replicated_over(cuts))


def regions_by_rank(tensor: Tensor) -> dict[int, Region]:
    """The ranks that together hold one copy of a tensor, this one among them, and what each holds.

    Args:
        tensor: a DTensor or a plain tensor, marked or not.

    Returns:
        World ranks to regions that cover the full tensor, each element once; for a tensor that is not cut,
        this rank alone.

    Raises:
        ContextError, ModeError: the tensor is marked for a mode that has no group here.
        LayoutError: it is cut over a mode without axes of the layout and over another one.
    """
    cuts = _cuts(tensor)
    shape = _global_shape(tensor, cuts)
    places = itertools.product(*(range(cut.parts) for cut in cuts))
    ranks = _grid(tensor, cuts)
    return {
        rank: _region(shape, list(zip(cuts, place, strict=True)))
        for rank, place in zip(ranks, places, strict=True)
    }


def _check_mode(mode: str) -> None:
    if not isinstance(mode, str) or not mode:
        raise LayoutError(f"mode={mode!r} must be the name of a mode")


def _shards(placement: Placement) -> bool:
    return isinstance(placement, Shard) or _torch_compat.is_strided(placement)


def _cuts(tensor: Tensor) -> list[_Cut]:
    """The cuts over more than one rank, outermost first."""
    cuts = []
    for dim, mode, sizes in shard_marks(tensor):
        group = get_group(mode)
        # A marked shard that was sharded further is a DTensor of the shard's shape.
        length = tensor.shape[dim]
        if sizes is not None and (len(sizes) != group.size() or sizes[group.rank()] != length):
            raise ShapeError(
                f"rank {get_global_rank()} is number {group.rank()} of {group.size()} in {mode} and holds "
                f"{length} along dim {dim}, but the tensor's mark says sizes={sizes}"
            )
        if group.size() > 1:
            cuts.append(_Cut(dim, group, group.rank(), group.size(), sizes, mode, None))
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        place = mesh.get_coordinate() or [0] * mesh.ndim
        shards = [(i, p) for i, p in enumerate(tensor.placements) if _shards(p)]
        # A strided shard cuts what the other cuts along its dim have left.
        for mesh_dim, placement in sorted(shards, key=lambda shard: _torch_compat.is_strided(shard[1])):
            if (parts := mesh.size(mesh_dim)) > 1:
                dim = placement.dim  # type: ignore[attr-defined]
                cuts.append(_Cut(dim, mesh.get_group(mesh_dim), place[mesh_dim], parts, None, None, mesh_dim))
    return cuts


def _global_shape(tensor: Tensor, cuts: Sequence[_Cut]) -> tuple[int, ...]:
    shape = list(tensor.shape)
    for cut in reversed(cuts):
        if cut.mode is not None:
            shape[cut.dim] = sum(cut.sizes) if cut.sizes is not None else shape[cut.dim] * cut.parts
    return tuple(shape)


def _region(shape: Sequence[int], place: Sequence[tuple[_Cut, int]]) -> Region:
    """The part at a place: the index of one part for every cut."""
    offsets, lengths = [0] * len(shape), list(shape)
    for cut, index in place:
        length = lengths[cut.dim]
        if cut.sizes is not None:
            start, own = sum(cut.sizes[:index]), cut.sizes[index]
        else:
            part = -(-length // cut.parts)
            start = min(index * part, length)
            own = min(part, length - start)
        offsets[cut.dim] += start
        lengths[cut.dim] = own
    return Region(tuple(offsets), tuple(lengths))


def _grid(tensor: Tensor, cuts: Sequence[_Cut]) -> list[int]:
    """World ranks of all places, in the order of ``itertools.product`` over the cuts."""
    if len(cuts) == 1:
        return get_process_group_ranks(cuts[0].group)
    own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    ranks = torch.tensor(_mesh_ranks(tensor.device_mesh, cuts) if isinstance(tensor, DTensor) else own)
    for cut in reversed(cuts):
        if cut.mode is not None:
            layout = ParallelContext().layout
            if cut.mode not in layout.modes or not layout.axes_of(cut.mode):
                raise LayoutError(
                    f"a tensor that is cut over {cut.mode} cannot be cut over other groups as well: "
                    f"the layout gives {cut.mode} no axis of its own"
                )
            members = [layout.ranks_in_group(cut.mode, rank) for rank in ranks.flatten().tolist()]
            ranks = torch.tensor(members).T.reshape(cut.parts, *ranks.shape)
    grid: list[int] = ranks.flatten().tolist()
    return grid


def _mesh_ranks(mesh: DeviceMesh, cuts: Sequence[_Cut]) -> object:
    """The part of a mesh that this rank reaches along the dims that cut, those dims in the cuts' order."""
    dims = [cut.mesh_dim for cut in cuts if cut.mesh_dim is not None]
    place = mesh.get_coordinate() or [0] * mesh.ndim
    ranks = mesh.mesh
    for dim in reversed(range(mesh.ndim)):
        if dim not in dims:
            ranks = ranks.select(dim, place[dim])
    order = [sorted(dims).index(dim) for dim in dims]
    return ranks.permute(order).tolist()


def _replicated_over(cuts: Sequence[_Cut]) -> tuple[str, ...]:
    if not is_initialized():
        return ()
    groups = tuple(tuple(get_process_group_ranks(cut.group)) for cut in cuts)
    return _modes_without(ParallelContext().layout, get_global_rank(), groups)


@functools.lru_cache(maxsize=64)  # a model has thousands of tensors, cut in a few ways
def _modes_without(layout: ParallelLayout, rank: int, groups: tuple[tuple[int, ...], ...]) -> tuple[str, ...]:
    taken = {other for group in groups for other in group} - {rank}
    modes = [mode for mode in layout.modes if len(layout.axes_of(mode)) == 1]
    return tuple(mode for mode in modes if taken.isdisjoint(layout.ranks_in_group(mode, rank)))


def marked_state_dict(module: nn.Module) -> dict[str, Any]:
    """A module's ``state_dict``, whose tensors carry the marks of the parameters and buffers they stand for.

    ``state_dict`` hands out new tensors that share memory with the module's, and no marks.

    Args:
        module: any module.
    """
    state = dict(module.state_dict())
    own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    marked = {name: tensor for name, tensor in own if hasattr(tensor, _CUTS)}
    by_memory = {local_tensor(tensor).data_ptr(): tensor for tensor in marked.values()}
    for name, value in state.items():
        if marked and isinstance(value, Tensor):
            # Modules may rename what they hand out.
            source = marked.get(name, by_memory.get(local_tensor(value).data_ptr()))
            if source is not None and source.shape == value.shape:
                copy_marks(source, value)
    return state
