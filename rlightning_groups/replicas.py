"""Replicas kept equal: found to differ where they must not, and copied from one rank where they may."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from rlightning_groups.agreement import name_ranks
from rlightning_groups.collectives import all_gather_object, object_group
from rlightning_groups.context import get_ranks_in_group, get_world_size
from rlightning_groups.errors import LayoutError, ShapeError
from rlightning_groups.modes import ParallelMode
from rlightning_groups.sharding import local_tensor, marked_state_dict, shard_groups, shard_spec

_MEBI = 1024 * 1024
_FINGERPRINT_WORDS = 16 * _MEBI  # at a time, which bounds the memory it takes


def is_replicated_over(tensor: Tensor, ranks: Sequence[int], rank: int) -> bool:
    """Whether the given ranks hold copies of a tensor, rather than parts of one or a DTensor's own copies.

    Args:
        tensor: a parameter or buffer.
        ranks: world ranks of a group.
        rank: this process's world rank.
    """
    on_mesh = set(tensor.device_mesh.mesh.flatten().tolist()) if isinstance(tensor, DTensor) else set()
    return _is_whole_on(tensor, ranks, rank) and on_mesh & set(ranks) <= {rank}


def synchronize_replicas(
    module: nn.Module | Iterable[Tensor],
    group: ProcessGroup,
    device: torch.device | None = None,
    bucket_mb: float = 250.0,
) -> None:
    """Give every rank of a group the parameters and buffers of the group's first rank.

    Meant for a group whose ranks hold copies of the same weights; a DTensor that is itself spread over the
    group is left alone.

    Args:
        module: the model, or some of its parameters and buffers.
        group: ranks that hold the same weights.
        device: where the group's backend wants tensors to be; ``None`` leaves them where they are.
        bucket_mb: how many MiB travel in one broadcast.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return
    rank = dist.get_rank()
    states = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else module
    tensors = [local_tensor(one.detach()) for one in states if is_replicated_over(one, ranks, rank)]
    for bucket in buckets_of(tensors, int(bucket_mb * _MEBI)):
        flat = torch.cat([one.reshape(-1) for one in bucket]).to(device)
        dist.broadcast(flat, src=ranks[0], group=group)
        with torch.no_grad():
            for one, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                one.copy_(part.view_as(one))


def check_replicas(module: nn.Module) -> None:
    """Make sure that the ranks hold one model, and tensor-parallel peers equal values of what is not sharded.

    A collective over TENSOR_PARALLEL and GLOBAL that moves a few numbers. Parameters and persistent buffers
    are compared by name, full shape and dtype over all ranks, and by a digest of their values over the tensor
    ranks, unless they are described as sharded over these.

    Args:
        module: the model.

    Raises:
        LayoutError: ranks differ; on all ranks, with names and what would mend it.
    """
    state = {name: value for name, value in marked_state_dict(module).items() if isinstance(value, Tensor)}
    problem = None
    try:
        told = {name: f"{value.dtype} {list(_full_shape(name, value))}" for name, value in state.items()}
    except ShapeError as error:
        problem, told = str(error), {}
    if get_world_size(ParallelMode.TENSOR_PARALLEL) > 1:
        problem = _compare_values({} if problem else state) or problem
    digest = int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:7], "little")
    group = object_group(ParallelMode.GLOBAL)
    votes = torch.tensor([digest, -digest, int(problem is not None)])
    if "gloo" not in dist.get_backend(group):
        votes = votes.to(torch.accelerator.current_accelerator())
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest, failed = int(votes[0]), -int(votes[1]), bool(votes[2])
    if failed:
        problems = all_gather_object(problem, ParallelMode.GLOBAL)
        raise LayoutError("\n".join(dict.fromkeys(one for one in problems if one is not None)))
    if largest != smallest:
        everywhere = all_gather_object(told, ParallelMode.GLOBAL)
        names = dict.fromkeys(name for one in everywhere for name in one)
        odd = [_odd(name, [one.get(name, "missing") for one in everywhere]) for name in names]
        raise LayoutError(
            f"the ranks hold different models: {'; '.join(text for text in odd if text)}. Plain shards are "
            f"described by mark_sharded, with sizes=... where they are not equally long"
        )


def _compare_values(state: dict[str, Tensor]) -> str | None:
    """What is wrong with the values of tensors that this rank's tensor-parallel group holds in whole."""
    peers, rank = get_ranks_in_group(ParallelMode.TENSOR_PARALLEL), dist.get_rank()
    prints = {
        name: _fingerprint(local_tensor(value.detach()))
        for name, value in state.items()
        if not value.is_meta and _is_whole_on(value, peers, rank)
    }
    digests = all_gather_object(hashlib.sha256(repr(prints).encode()).digest(), ParallelMode.TENSOR_PARALLEL)
    if len(set(digests)) == 1:
        return None
    everywhere = all_gather_object(prints, ParallelMode.TENSOR_PARALLEL)
    odd = [name for name in prints if len({one[name] for one in everywhere if name in one}) > 1]
    if not odd:
        return None  # other names: the comparison of the models says it
    return (
        f"tensor-parallel {name_ranks(peers)} hold different values of {', '.join(odd)}, which nothing "
        f"describes as sharded. If they are shards, say so where they are made, by "
        f"mark_sharded(parameter, dim) from rlightning_groups.sharding; if not, initialise them "
        f"alike, by seed_everything_by_layout or "
        f"init_full_then_shard from rlightning_groups.random"
    )


def _full_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    try:
        return shard_spec(tensor).global_shape
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from error


def _odd(name: str, said: list[str]) -> str | None:
    values = dict.fromkeys(said)
    if len(values) == 1:
        return None
    parts = (f"{value} on {name_ranks([r for r, v in enumerate(said) if v == value])}" for value in values)
    return f"{name} is {', '.join(parts)}"


def _is_whole_on(tensor: Tensor, ranks: Sequence[int], rank: int) -> bool:
    others = {other for group in shard_groups(tensor) for other in dist.get_process_group_ranks(group)}
    return others.isdisjoint(set(ranks) - {rank})


def _fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Two sums over a tensor's bits, wrapped to 64 bits; the second one knows where each bit stands."""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    if bits.numel() % 8:
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8))
    plain = placed = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for words in bits.view(torch.int64).split(_FINGERPRINT_WORDS):
        places = torch.arange(start, start + words.numel(), device=words.device)
        plain, placed = plain + words.sum(), placed + (words * (2 * places + 1)).sum()
        start += words.numel()
    return int(plain), int(placed)


def buckets_of(tensors: Iterable[Any], limit: int) -> list[list[Any]]:
    """Tensors in their order, cut into runs of one dtype and device of at most ``limit`` bytes.

    Args:
        tensors: parameters or buffers; what counts is what this rank holds of each.
        limit: the most bytes in a run; a tensor that is larger is a run of its own.
    """
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
