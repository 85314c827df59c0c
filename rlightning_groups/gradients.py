"""Replicas kept equal: states copied once, gradients averaged in every step.

Torch's DistributedDataParallel does this for plain tensors. :class:`GradientReducer` does the same for
models that hold DTensor parameters, which DistributedDataParallel refuses, and for both kinds together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Placement

from rlightning_groups.context import get_group
from rlightning_groups.sharding import partial_gradient_modes

_MEBI = 1024 * 1024


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: a DTensor's shard, any other tensor itself.

    Args:
        tensor: any tensor.

    Returns:
        A tensor that shares memory with the argument.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_replicated_over(tensor: Tensor, ranks: Sequence[int], rank: int) -> bool:
    """Whether the given ranks hold copies of a tensor rather than shards of one DTensor.

    Args:
        tensor: a parameter or buffer.
        ranks: world ranks of a group.
        rank: this process's world rank.
    """
    if not isinstance(tensor, DTensor):
        return True
    on_mesh = set(tensor.device_mesh.mesh.flatten().tolist())
    return set(ranks) & on_mesh <= {rank}


def synchronize_replicas(
    module: nn.Module, group: ProcessGroup, device: torch.device | None = None, bucket_mb: float = 250.0
) -> None:
    """Give every rank of a group the parameters and buffers of the group's first rank.

    Meant for a group whose ranks hold copies of the same weights; a DTensor that is itself spread over the
    group is left alone.

    Args:
        module: the model.
        group: ranks that hold the same weights.
        device: where the group's backend wants tensors to be; ``None`` leaves them where they are.
        bucket_mb: how many MiB travel in one broadcast.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return
    rank = dist.get_rank()
    states = [*module.parameters(), *module.buffers()]
    tensors = [local_tensor(one.detach()) for one in states if is_replicated_over(one, ranks, rank)]
    for bucket in _buckets(tensors, int(bucket_mb * _MEBI)):
        flat = torch.cat([one.reshape(-1) for one in bucket]).to(device)
        dist.broadcast(flat, src=ranks[0], group=group)
        with torch.no_grad():
            for one, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                one.copy_(part.view_as(one))


@dataclass
class _Bucket:
    """Parameters whose gradients travel together."""

    parameters: list[nn.Parameter]
    arrived: set[int] = field(default_factory=set)  # in the pass that is running
    buffer: Tensor | None = None
    work: Any = None


class GradientReducer:
    """Averages gradients over a group during the backward pass.

    As soon as the gradients of a bucket are there, their average is started and overlaps with the rest of
    the backward pass; buckets start in the same order on every rank. A parameter that took no part on any
    rank keeps its ``None``; one that took part on some counts as zero on the others.

    A DTensor gradient that is still a partial sum over its own mesh is summed there once, at the end of a
    pass that synchronizes, never under :meth:`no_sync`.

    Args:
        parameters: the model's parameters, in the order of its definition; those that need no gradient, and
            DTensors that are spread over the group itself, are left out.
        group: ranks that hold the same weights.
        bucket_mb: how many MiB of gradients travel in one all-reduce.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: ProcessGroup, bucket_mb: float = 25.0
    ) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.synchronizes = True
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
        trained = [p for p in parameters if p.requires_grad and is_replicated_over(p, ranks, rank)]
        # The last layers' gradients come first.
        buckets = _buckets(trained[::-1], int(bucket_mb * _MEBI))
        self._buckets = [_Bucket(bucket) for bucket in buckets]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0
        self._running = False
        self._finished = False
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in trained]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside averages everything."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def reset(self) -> None:
        """Forget a backward pass that an exception cut short; call it before every pass."""
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.arrived.clear()
            bucket.buffer = bucket.work = None
        self._next = 0
        self._running = self._finished = False

    def flush(self) -> None:
        """Take part in the average after a pass in which this rank's loss reached no parameter at all."""
        if self.synchronizes and not self._finished:
            self._finish()

    def remove(self) -> None:
        """Take the hooks off the parameters again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self.synchronizes:
            return
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._bucket_of[id(parameter)].arrived.add(id(parameter))
        for ready in self._buckets[self._next :]:
            if len(ready.arrived) < len(ready.parameters):
                break
            self._start(ready)
            self._next += 1

    def _start(self, bucket: _Bucket) -> None:
        parts: list[Tensor] = []
        flags: list[float] = []
        first = local_tensor(bucket.parameters[0])
        for p in bucket.parameters:
            if p.grad is None:
                parts.append(torch.zeros_like(local_tensor(p)).reshape(-1))
            else:
                parts.append(local_tensor(p.grad).reshape(-1))
            flags += [float(p.grad is not None), *_partial_flags(p)]
        parts.append(torch.tensor(flags, dtype=first.dtype, device=first.device))
        bucket.buffer = torch.cat(parts).div_(self.size)
        bucket.work = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)

    def _finish(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._start(bucket)
        for bucket in self._buckets:
            self._collect(bucket)
            bucket.arrived.clear()
            bucket.buffer = bucket.work = None
        self._next = 0
        self._running, self._finished = False, True

    @torch.no_grad()
    def _collect(self, bucket: _Bucket) -> None:
        bucket.work.wait()
        assert bucket.buffer is not None
        sizes = [local_tensor(p).numel() for p in bucket.parameters]
        *parts, flags = bucket.buffer.split([*sizes, bucket.buffer.numel() - sum(sizes)])
        # Reading the flags waits for an accelerator; a rank that took part in everything need not.
        told: Iterator[float] | None = None
        if any(p.grad is None for p in bucket.parameters):
            told = iter(flags.tolist())
        for p, part in zip(bucket.parameters, parts, strict=True):
            partial: list[bool] = []
            if told is not None:
                touched = next(told) > 0
                partial = [next(told) > 0 for _ in _partial_flags(p)]
                if not touched:
                    continue
            if p.grad is None:
                p.grad = _empty_gradient(p, partial)
            local = local_tensor(p.grad)
            local.copy_(part.view_as(local))
            if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum the gradients of marked parameters over their groups, in place; call it once per optimizer step.

    One all-reduce per mode, dtype and device. A gradient that no rank of a group has stays ``None``; one that
    some lack counts as zero there.

    Args:
        parameters: any parameters, in the same order on all ranks of a group; those that
            :func:`~rlightning_groups.sharding.mark_partial_gradient` did not mark are left alone.

    Raises:
        ModeError: this rank has no group of a mode that a parameter is marked with.
    """
    marked: dict[tuple[str, torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        for mode in partial_gradient_modes(parameter):
            marked.setdefault((mode, parameter.dtype, parameter.device), []).append(parameter)
    for (mode, _, _), members in marked.items():
        group = get_group(mode)
        if group.size() == 1:
            continue
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in members]
        there = torch.tensor([float(p.grad is not None) for p in members]).to(parts[0])
        flat = torch.cat([*parts, there])
        dist.all_reduce(flat, group=group)
        *sums, there = flat.split([*(p.numel() for p in members), len(members)])
        for index, (p, total) in enumerate(zip(members, sums, strict=True)):
            if p.grad is not None:
                p.grad.copy_(total.view_as(p))
            elif there[index] > 0:
                p.grad = total.view_as(p).clone()


def _partial_flags(parameter: nn.Parameter) -> list[float]:
    """For each mesh dim of a DTensor parameter, whether its gradient is a partial sum there."""
    if not isinstance(parameter, DTensor):
        return []
    if not isinstance(parameter.grad, DTensor):
        return [0.0] * parameter.device_mesh.ndim
    return [float(placement.is_partial()) for placement in parameter.grad.placements]


def _empty_gradient(parameter: nn.Parameter, partial: Sequence[bool]) -> Tensor:
    """A gradient laid out as that of the ranks where the parameter took part."""
    if not isinstance(parameter, DTensor):
        return torch.zeros_like(parameter)
    placements: list[Placement] = [
        Partial() if is_partial else placement
        for is_partial, placement in zip(partial, parameter.placements, strict=True)
    ]
    return DTensor.from_local(
        torch.zeros_like(parameter._local_tensor),
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _buckets(tensors: Iterable[Any], limit: int) -> list[list[Any]]:
    """Tensors in their order, cut into runs of one dtype and device of at most ``limit`` bytes."""
    buckets: list[list[Any]] = []
    size, kind = 0, None
    for tensor in tensors:
        local = local_tensor(tensor)
        bytes_, this = local.numel() * local.element_size(), (local.dtype, local.device)
        if not buckets or kind != this or size + bytes_ > limit:
            buckets.append([])
            size, kind = 0, this
        buckets[-1].append(tensor)
        size += bytes_
    return buckets
