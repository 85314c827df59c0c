"""State in full from its parts, and parts from state in full.

In full, state is what a single process would have: plain tensors of their global shapes, under the names and
numbers of ``state_dict``. How the parts lie is asked of :func:`~rlightning_groups.sharding.shard_spec`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlightning_groups._torch_compat import settled
from rlightning_groups.collectives import all_gather, all_gather_object, object_group
from rlightning_groups.context import get_global_rank
from rlightning_groups.errors import CheckpointError
from rlightning_groups.modes import ParallelMode
from rlightning_groups.sharding import (
    Region,
    copy_marks,
    is_sharded,
    local_tensor,
    marked_state_dict,
    regions_by_rank,
    shard_marks,
    shard_spec,
)

_BUCKET_BYTES = 64 * 1024 * 1024
_ALIGNMENT = 16  # bytes; no dtype needs more


class _Part(NamedTuple):
    """This rank's part of a tensor, and what the others of its copy hold."""

    tensor: Tensor
    regions: dict[int, Region]

    @property
    def local(self) -> Tensor:
        return settled(local_tensor(self.tensor).detach())

    def padded_bytes(self, rank: int) -> int:
        size: int = self.regions[rank].numel * self.tensor.element_size()
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class Readable(Protocol):
    """A full tensor that lies in a file: parts of it can be read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, region: Region) -> Tensor:
        """The elements of a region."""

    def full(self) -> Tensor:
        """All elements."""


def full_state(state: Any, device: torch.device | str | None = "cpu") -> Any:
    """A nest of state with every sharded tensor replaced by the full tensor, on every rank.

    A collective over the groups of the DTensors' meshes and of the marks: every rank calls it with the same
    nest.

    Args:
        state: any nest of dicts, lists and tuples.
        device: where the full tensors go; ``None`` leaves them where they are.

    Returns:
        A nest of the same shape.
    """

    def in_full(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor) and not is_sharded(tensor):
            return settled(tensor)
        full = settled(tensor.full_tensor().detach()) if isinstance(tensor, DTensor) else tensor.detach()
        for dim, mode, sizes in reversed(shard_marks(tensor)):
            full = all_gather(full, dim, mode, sizes=sizes)
        return full if device is None else full.to(device)

    return _map_tensors(state, in_full)


def gather_state(state: Any) -> Any:
    """A nest of state with every sharded tensor replaced by the full tensor, on world rank 0 alone.

    A collective over GLOBAL. The parts travel to rank 0 in buckets of some tensors; no other rank holds
    anything above its own parts and one bucket of those.

    Args:
        state: any nest of dicts, lists and tuples, in the same order on all ranks that hold parts of it.

    Returns:
        On rank 0 a nest of the same shape with the full tensors on the CPU; on other ranks ``None``.

    Raises:
        CheckpointError: the ranks that hold one copy of the state hold different tensors; on every rank.
    """
    rank = get_global_rank()
    found: list[Tensor] = []
    _map_tensors(state, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    sharded = [tensor for tensor in found if is_sharded(tensor)]
    places = [regions_by_rank(tensor) for tensor in sharded]
    _check_alike(sharded, any(0 in regions for regions in places) or rank == 0)

    full_of: dict[int, Tensor] = {}
    bucket: list[_Part] = []
    size = 0
    for tensor, regions in zip(sharded, places, strict=True):
        if 0 not in regions:
            continue  # another copy than rank 0's
        bytes_ = sum(region.numel for region in regions.values()) * tensor.element_size()
        if bucket and (size + bytes_ > _BUCKET_BYTES or list(regions) != list(bucket[0].regions)):
            full_of |= _gather(bucket, rank)
            bucket, size = [], 0
        bucket.append(_Part(tensor, regions))
        size += bytes_
    if bucket:
        full_of |= _gather(bucket, rank)
    if rank != 0:
        return None

    def whole(tensor: Tensor) -> Tensor:
        return full_of[id(tensor)] if id(tensor) in full_of else settled(local_tensor(tensor).detach())

    return _map_tensors(state, whole)


def shard_like(full: Tensor | Readable, like: Tensor) -> Tensor:
    """This rank's part of a full tensor, laid out as another tensor is; no communication.

    Args:
        full: the full tensor, equal on all ranks, or one to be read from a file.
        like: a DTensor, or a plain tensor with marks, that says how to cut; for any other, all of ``full`` is
            returned.

    Returns:
        A tensor on the device of ``like`` with its placements and marks; ``full`` itself where it is a
        DTensor or nothing is to be cut.

    Raises:
        CheckpointError: the shapes are not those of one tensor.
    """
    if isinstance(full, DTensor):
        return full
    if not isinstance(like, DTensor) and not is_sharded(like):
        return full if isinstance(full, Tensor) else full.full()
    spec = shard_spec(like)
    if tuple(full.shape) != spec.global_shape:
        raise CheckpointError(
            f"a full tensor of shape {list(full.shape)} does not fit one of {list(spec.global_shape)}"
        )
    part = full[spec.region.slices] if isinstance(full, Tensor) else full.read(spec.region)
    # A view would keep the full tensor, or the file.
    local = part.to(local_tensor(like).device, copy=True).contiguous()
    result = local
    if isinstance(like, DTensor):
        result = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    copy_marks(like, result)
    return result


def shard_model_state(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """A full ``state_dict`` cut to what a module holds on this rank.

    Args:
        state: names to full tensors, or to tensors in a file.
        module: the module that will load it.

    Returns:
        Names to parts; names that the module lacks keep what they have.

    Raises:
        CheckpointError: a tensor has another shape than the module's, all of which are named.
    """
    own = marked_state_dict(module)
    shapes = {
        name: shard_spec(value).global_shape for name, value in own.items() if isinstance(value, Tensor)
    }
    wrong = [
        f"{name}: {list(value.shape)} instead of {list(shapes[name])}"
        for name, value in state.items()
        if name in shapes and hasattr(value, "shape") and tuple(value.shape) != shapes[name]
    ]
    if wrong:
        raise CheckpointError(f"the checkpoint is of another model; shapes differ: {'; '.join(wrong)}")
    return {
        name: shard_like(value, own[name]) if name in shapes else _read(value)
        for name, value in state.items()
    }


def sharded_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's ``state_dict``, whose plain tensors carry the marks of the parameters they belong to.

    Args:
        state: as ``Optimizer.state_dict`` gives it.
        optimizer: whose it is.

    Raises:
        CheckpointError: a tensor of the state belongs to a sharded parameter and has neither its shape nor is
            it a single number, so that nothing says how it lies.
    """

    def mark(parameter: Tensor, name: str, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or not is_sharded(parameter):
            return value
        if value.shape == parameter.shape and isinstance(value, DTensor) == isinstance(parameter, DTensor):
            copy_marks(parameter, value)
        elif not isinstance(value, DTensor) or shard_marks(parameter):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {key!r} of shape {list(value.shape)} for {name} of shape "
                f"{list(parameter.shape)}, which is sharded: nothing says how it would be put together. "
                f"Use an optimizer whose state has the parameter's shape, or single numbers"
            )
        return value

    return _map_optimizer_state(state, optimizer, mark)


def shard_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A full optimizer ``state_dict`` cut to what an optimizer's parameters hold on this rank.

    Args:
        state: as ``Optimizer.state_dict`` gives it, with full tensors, or tensors in a file.
        optimizer: the optimizer that will load it.

    Raises:
        CheckpointError: the state is for another number of parameters, or a tensor of it neither has its
            parameter's shape nor is a single number, and the parameter is sharded.
    """
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in state["param_groups"]]
    if ours != theirs:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {theirs} parameters, "
            f"{type(optimizer).__name__} has {ours}"
        )

    def cut(parameter: Tensor, name: str, key: str, value: Any) -> Any:
        if not hasattr(value, "shape") or not is_sharded(parameter) or not tuple(value.shape):
            # A copy, so that the file can go.
            return value.clone() if isinstance(value, Tensor) else _read(value)
        if tuple(value.shape) != (shape := shard_spec(parameter).global_shape):
            raise CheckpointError(
                f"{key!r} of {name} has shape {list(value.shape)} in the checkpoint and the parameter "
                f"{list(shape)}: nothing says how it lies over the ranks"
            )
        return shard_like(value, parameter)

    return _map_optimizer_state(state, optimizer, cut)


def _map_optimizer_state(
    state: Mapping[str, Any], optimizer: Optimizer, change: Callable[[Tensor, str, str, Any], Any]
) -> dict[str, Any]:
    """Apply ``change(parameter, its name, key, value)`` to each value of a ``state_dict``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of = dict(zip(numbers, parameters, strict=True))
    return {
        **state,
        "state": {
            number: {
                key: change(of[number], f"parameter {number}", key, value) if number in of else value
                for key, value in entries.items()
            }
            for number, entries in state["state"].items()
        },
    }


def _read(value: Any) -> Any:
    return value.full() if hasattr(value, "full") and hasattr(value, "read") else value


def _map_tensors(state: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, Mapping):
        return {key: _map_tensors(value, change) for key, value in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_map_tensors(value, change) for value in state))
    if isinstance(state, (list, tuple)):
        return type(state)(_map_tensors(value, change) for value in state)
    return state


def _check_alike(tensors: list[Tensor], asked: bool) -> None:
    """All ranks that send to rank 0 hold parts of the same tensors, or none of them sends."""
    text = "; ".join(f"{tensor.dtype} {list(shard_spec(tensor).global_shape)}" for tensor in tensors)
    digest = (len(tensors), hashlib.sha256(text.encode()).hexdigest())
    said = all_gather_object(digest if asked else None, ParallelMode.GLOBAL)
    odd = [rank for rank, other in enumerate(said) if other is not None and other != said[0]]
    if odd:
        raise CheckpointError(
            f"ranks {', '.join(map(str, odd))} hold parts of other tensors than rank 0 ({said[0][0]} of "
            f"them, rank {odd[0]} has {said[odd[0]][0]}): every rank's model and optimizers must be alike"
        )


def _gather(bucket: list[_Part], rank: int) -> dict[int, Tensor]:
    """Send this rank's parts to rank 0; there, the full tensors by the ``id`` of the part."""
    group = object_group(ParallelMode.GLOBAL)
    device = torch.device("cpu") if "gloo" in dist.get_backend(group) else bucket[0].local.device
    lengths: dict[int, list[int]] = {
        other: [part.padded_bytes(other) for part in bucket] for other in bucket[0].regions
    }
    if rank != 0:
        packed = torch.zeros(sum(lengths[rank]), dtype=torch.uint8, device=device)
        for part, place in zip(bucket, packed.split(lengths[rank]), strict=True):
            flat = part.local.contiguous().reshape(-1).view(torch.uint8)
            place[: flat.numel()].copy_(flat)
        if packed.numel():
            dist.send(packed, dst=0, group=group)
        return {}
    arriving = {}
    for other, sizes in lengths.items():
        if other != 0 and any(sizes):
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            arriving[other] = buffer, dist.irecv(buffer, src=other, group=group)
    full = {}
    for part in bucket:
        whole = torch.empty(shard_spec(part.tensor).global_shape, dtype=part.tensor.dtype)
        whole[part.regions[0].slices] = part.local.cpu()
        full[id(part.tensor)] = whole
    for other, (buffer, work) in arriving.items():
        cast(dist.Work, work).wait()
        for part, bytes_ in zip(bucket, buffer.cpu().split(lengths[other]), strict=True):
            region = part.regions[other]
            values = bytes_[: region.numel * part.tensor.element_size()].view(part.tensor.dtype)
            full[id(part.tensor)][region.slices] = values.view(region.lengths)
    return full
