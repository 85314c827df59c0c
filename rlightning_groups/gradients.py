"""Gradients of replicas averaged in every step, and partial gradients summed.

Torch's DistributedDataParallel does this for plain tensors. :class:`GradientReducer` does the same for
models that hold DTensor parameters, which DistributedDataParallel refuses, and for both kinds together.
"""

from __future__ import annotations

import itertools
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
from rlightning_groups.replicas import buckets_of, is_replicated_over
from rlightning_groups.sharding import local_tensor, partial_gradient_modes

_MEBI = 1024 * 1024


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
        buckets = buckets_of(trained[::-1], int(bucket_mb * _MEBI))
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
        parts = [
            (torch.zeros_like(local_tensor(p)) if p.grad is None else local_tensor(p.grad)).reshape(-1)
            for p in members
        ]
        there = torch.tensor([float(p.grad is not None) for p in members]).to(parts[0])
        flat = torch.cat([*parts, there])
        dist.all_reduce(flat, group=group)
        *sums, there = flat.split([*(part.numel() for part in parts), len(members)])
        for index, (p, total) in enumerate(zip(members, sums, strict=True)):
            if p.grad is None and there[index] > 0:
                p.grad = _empty_gradient(p)
            if p.grad is not None:
                local = local_tensor(p.grad)
                local.copy_(total.view_as(local))


def _partial_flags(parameter: nn.Parameter) -> list[float]:
    """For each mesh dim of a DTensor parameter, whether its gradient is a partial sum there."""
    if not isinstance(parameter, DTensor):
        return []
    if not isinstance(parameter.grad, DTensor):
        return [0.0] * parameter.device_mesh.ndim
    return [float(placement.is_partial()) for placement in parameter.grad.placements]


def _empty_gradient(parameter: Tensor, partial: Sequence[bool] = ()) -> Tensor:
    """A gradient laid out as that of the ranks where the parameter took part."""
    if not isinstance(parameter, DTensor):
        return torch.zeros_like(parameter)
    placements: list[Placement] = [
        Partial() if is_partial else placement
        for is_partial, placement in itertools.zip_longest(partial, parameter.placements)
    ]
    return DTensor.from_local(
        torch.zeros_like(parameter._local_tensor),
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
