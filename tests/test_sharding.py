"""How tensors lie over the groups: regions, full tensors from parts, models that are not what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategy_models import DATA, GLOBAL, TENSOR, TRAIN, Run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rlightning_groups import (
    CheckpointError,
    LayoutError,
    ModeError,
    ParallelContext,
    ShapeError,
    get_local_rank,
)
from rlightning_groups.checkpoint import full_state, gather_state, shard_like
from rlightning_groups.collectives import all_gather_object, chunk_sizes, split_to
from rlightning_groups.replicas import check_replicas
from rlightning_groups.sharding import (
    Region,
    copy_marks,
    mark_sharded,
    marked_state_dict,
    regions_by_rank,
    shard_groups,
    shard_spec,
)

SEQUENCE = "SEQUENCE_PARALLEL"


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(1, 1 + count, dtype=torch.float64).reshape(shape).to(dtype)


def marked(full: Tensor, dim: int, mode: str = TENSOR) -> Tensor:
    part = split_to(full, dim, mode).clone()
    mark_sharded(part, dim, mode, sizes=chunk_sizes(full.shape[dim], mode))
    return part


def fsdp(full: Tensor, plan: Any) -> Tensor:
    """A weight under FSDP over TRAIN_DATA_PARALLEL, on top of tensor parallelism by a plan, or marked."""
    context = ParallelContext()
    outside = nn.Sequential(nn.Linear(full.shape[1], full.shape[0], bias=False))
    outside[0].weight = nn.Parameter(full)
    marks = None
    if isinstance(plan, int):
        marks = marked(full, plan)
        outside[0].weight = nn.Parameter(marks)
    elif plan is not None:
        parallelize_module(outside, context.device_mesh(TENSOR), {"0": plan})
    fully_shard(outside, mesh=context.device_mesh(TRAIN))
    if marks is not None:
        copy_marks(marks, outside[0].weight)
    return outside[0].weight.detach() if marks is None else outside[0].weight


def tensors() -> dict[str, tuple[Tensor, Tensor]]:
    """The part of this rank and the full tensor, by kind; eight ranks are data 2 x sequence 2 x tensor 2."""
    context = ParallelContext()
    tensor, both = context.device_mesh(TENSOR), context.device_mesh(TRAIN, TENSOR)
    four, uneven, thin = numbers(4, 6), numbers(5, 3), numbers(1, 3)
    twice = marked(marked(four, 0), 1, SEQUENCE)
    mark_sharded(twice, 0)
    mark_sharded(twice, 1, SEQUENCE)
    cases = {
        "whole": (four, four),
        "mark 0": (marked(four, 0), four),
        "mark 1": (marked(four, -1), four),
        "mark uneven": (marked(uneven, 0), uneven),
        "mark empty": (marked(thin, 0), thin),
        "mark bfloat16": (marked(four.bfloat16(), 0), four.bfloat16()),
        "two marks": (twice, four),
        "dtensor 0": (distribute_tensor(four, tensor, [Shard(0)]), four),
        "dtensor uneven": (distribute_tensor(uneven, tensor, [Shard(0)]), uneven),
        "dtensor empty": (distribute_tensor(thin, tensor, [Shard(0)]), thin),
        "dtensor copy": (distribute_tensor(four, tensor, [Replicate()]), four),
        "2-d": (distribute_tensor(four, both, [Shard(1), Shard(0)]), four),
        "2-d same dim": (distribute_tensor(numbers(9, 2), both, [Shard(0), Shard(0)]), numbers(9, 2)),
        "fsdp": (fsdp(uneven, None), uneven),
        "fsdp over columns": (fsdp(numbers(7, 4), ColwiseParallel()), numbers(7, 4)),
        "fsdp over rows": (fsdp(numbers(7, 4), RowwiseParallel()), numbers(7, 4)),
        "fsdp over mark 0": (fsdp(numbers(10, 4), 0), numbers(10, 4)),
        "fsdp over mark 1": (fsdp(numbers(3, 4), 1), numbers(3, 4)),
    }
    return {name: (part, full) for name, (part, full) in cases.items()}


def read_back() -> dict[str, Any]:
    """Every kind read as its spec says; what is told is compared with what is there."""
    ParallelContext().initialize(tensor_parallel_size=2, sequence_parallel_size=2, backend="gloo")
    rank, told = dist.get_rank(), {}
    all_ = tensors()
    for name, (part, full) in all_.items():
        spec, regions = shard_spec(part), regions_by_rank(part)
        local = part._local_tensor if isinstance(part, DTensor) else part
        assert spec.global_shape == tuple(full.shape), name
        assert spec.dtype == full.dtype, name
        assert torch.equal(local, full[spec.region.slices]), name
        assert regions[rank] == spec.region, name
        seen = torch.zeros(full.shape, dtype=torch.int)
        for region in regions.values():
            seen[region.slices] += 1
        assert bool((seen == 1).all()), name
        everywhere = all_gather_object(spec.region, GLOBAL)
        assert all(everywhere[other] == region for other, region in regions.items()), name
        again = shard_like(full, part)
        assert torch.equal(again._local_tensor if isinstance(again, DTensor) else again, local), name
        assert type(again) is type(part.detach()), name
        assert shard_spec(again) == spec, name
        told[name] = (sorted(regions), spec.replicated_over, len(shard_groups(part)))
    state = {name: part for name, (part, _) in all_.items()}
    whole = full_state(state)
    gathered = gather_state({"nested": [state]})
    for name, (_, full) in all_.items():
        assert torch.equal(whole[name], full), name
        if rank == 0:
            assert torch.equal(gathered["nested"][0][name], full), name
            assert type(gathered["nested"][0][name]) is Tensor, name
    assert rank == 0 or gathered is None
    return told


def test_every_kind_lies_where_its_spec_says(run_ranks: Run) -> None:
    for rank, told in enumerate(run_ranks(read_back, 8)):
        tensor = [rank // 2 * 2, rank // 2 * 2 + 1]
        train = [other for other in range(8) if other % 2 == rank % 2]
        assert told["whole"] == ([rank], (DATA, SEQUENCE, TENSOR), 0)
        for name in ("mark 0", "mark uneven", "mark empty", "dtensor 0"):
            assert told[name] == (tensor, (DATA, SEQUENCE), 1)
        assert told["two marks"] == (
            sorted({r ^ s ^ t for r in [rank] for s in (0, 1) for t in (0, 2)}),
            (DATA,),
            2,
        )
        assert told["dtensor copy"] == ([rank], (DATA, SEQUENCE, TENSOR), 0)
        assert told["fsdp"] == (train, (TENSOR,), 1)
        for name in ("2-d", "2-d same dim", "fsdp over columns", "fsdp over mark 0", "fsdp over mark 1"):
            assert told[name] == (list(range(8)), (), 2)


def test_marks_that_cannot_be() -> None:
    part = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ShapeError, match=r"there is no dim 2 in a tensor of shape \[2, 3\]"):
        mark_sharded(part, 2)
    with pytest.raises(ShapeError, match=r"sizes=\(3, 1\) must be the lengths of all parts along dim 0"):
        mark_sharded(part, 0, sizes=[3, 1])
    with pytest.raises(LayoutError, match="mode='' must be the name of a mode"):
        mark_sharded(part, 0, "")
    with pytest.raises(LayoutError, match="only a plain tensor can be marked as sharded, got 5"):
        mark_sharded(5, 0)  # type: ignore[arg-type]


def message_of(kind: type[Exception], call: Any, *args: Any) -> str:
    with pytest.raises(kind) as error:
        call(*args)
    return str(error.value)


def wrong() -> dict[str, str]:
    context = ParallelContext().initialize(tensor_parallel_size=2, backend="gloo")
    rank, tensor = dist.get_rank(), get_local_rank(TENSOR)
    elsewhere, uneven, dtensor = torch.zeros(2), torch.zeros(1 + tensor), torch.zeros(2)
    mark_sharded(elsewhere, 0, "PIPELINE")
    mark_sharded(uneven, 0, sizes=[2, 1])
    dtensor = distribute_tensor(dtensor, context.device_mesh(TENSOR), [Shard(0)])

    def model(weight: Tensor, **buffers: Tensor) -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(weight)
        for name, value in buffers.items():
            module.register_buffer(name, value)
        return module

    shards, good = model(torch.full((2,), float(tensor))), model(torch.full((2,), float(tensor)))
    mark_sharded(good.weight, 0)
    check_replicas(good)
    check_replicas(model(torch.full((2,), float(rank // 2))))  # what data ranks hold is made equal later
    late = model(torch.zeros(3), stat=torch.full((3,), float(rank == 3)))
    part = nn.Parameter(torch.zeros(2))
    mark_sharded(part, 0)
    return {
        "mode": message_of(ModeError, shard_spec, elsewhere),
        "sizes": message_of(ShapeError, shard_spec, uneven),
        "dtensor": message_of(LayoutError, mark_sharded, dtensor, 0),
        "like": message_of(CheckpointError, shard_like, torch.zeros(5), part),
        "values": message_of(LayoutError, check_replicas, shards),
        "one pair": message_of(LayoutError, check_replicas, late),
        "shapes": message_of(LayoutError, check_replicas, model(torch.zeros(1 + (rank == 2)))),
        "unlike": message_of(
            CheckpointError, gather_state, {"a": good.weight} if rank != 1 else {"a": part, "b": part}
        ),
    }


def test_what_ranks_hold_is_not_what_they_say(run_ranks: Run) -> None:
    results = run_ranks(wrong, 4)
    for rank, got in enumerate(results):
        assert "PIPELINE" in got["mode"]
        assert (
            f"rank {rank} is number {rank % 2} of 2 in TENSOR_PARALLEL and holds {1 + rank % 2}"
            in got["sizes"]
        )
        assert "a DTensor, whose placements say how it is sharded" in got["dtensor"]
        assert got["like"] == "a full tensor of shape [5] does not fit one of [4]"
        lines = got["values"].splitlines()
        assert [line.split(", which")[0] for line in lines] == [
            "tensor-parallel ranks 0-1 hold different values of weight",
            "tensor-parallel ranks 2-3 hold different values of weight",
        ]
        assert "mark_sharded(parameter, dim)" in lines[0]
        # Ranks 0 and 1 agree between themselves, and end as well.
        assert got["one pair"].startswith("tensor-parallel ranks 2-3 hold different values of stat")
        assert "weight is torch.float32 [1] on ranks 0-1,3, torch.float32 [2] on rank 2" in got["shapes"]
        assert got["unlike"].startswith(
            "ranks 1 hold parts of other tensors than rank 0 (1 of them, rank 1 has 2)"
        )


def test_marks_are_found_under_the_names_of_a_state_dict() -> None:
    class Renames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
            mark_sharded(self.a, 0)
            self.register_state_dict_post_hook(self.rename)

        @staticmethod
        def rename(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
            state["other"] = state.pop("a")

    state = marked_state_dict(Renames())
    assert [(mark.dim, mark.mode) for mark in state["other"]._rlightning_groups_cuts] == [(0, TENSOR)]
    assert not hasattr(state["b"], "_rlightning_groups_cuts")
    assert Region((1, 0), (2, 3)).numel == 6
