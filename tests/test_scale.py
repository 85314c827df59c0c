"""One process that stands for a rank of a large world: torch's fake backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlightning_groups import ParallelContext, ParallelLayout, _torch_compat, get_group, get_ranks_in_group

Run = Callable[..., list[Any]]
SETTINGS = {"tensor_parallel_size": 8, "sequence_parallel_size": 4}


def start_as_rank(ranks: list[int], world_size: int) -> list[dict[str, Any]]:
    """Start as each of the ranks in turn, and count the groups that are made."""
    real, made = _torch_compat.new_named_group, []

    def record(ranks: Any, **how: Any) -> dist.ProcessGroup:
        made.append(tuple(ranks))
        return real(ranks, **how)

    results = []
    _torch_compat.new_named_group = record
    try:
        for rank in ranks:
            made.clear()
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            begin = time.process_time()
            context = ParallelContext().initialize(**SETTINGS)
            seconds = time.process_time() - begin
            groups = {mode: get_ranks_in_group(mode) for mode in context.layout.modes}
            results.append(
                {
                    "made": sorted(made),
                    "known": len(dist.distributed_c10d._world.pg_map),
                    "groups": groups,
                    "torch": {m: dist.get_process_group_ranks(get_group(m)) for m in groups},
                    "local": {m: dist.get_rank(get_group(m)) for m in groups},
                    "seconds": seconds,
                }
            )
            context.destroy()
            results[-1]["left"] = len(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
    finally:
        _torch_compat.new_named_group = real
    return results


@pytest.mark.parametrize(("world_size", "ranks"), [(1024, [0, 37, 511, 1023]), (16384, [9999])])
def test_a_rank_makes_its_own_groups_only(run_ranks: Run, world_size: int, ranks: list[int]) -> None:
    """Law 1: at most one creation per distinct own rank list, whatever the world size."""
    layout = ParallelLayout(world_size, **SETTINGS)
    (results,) = run_ranks(start_as_rank, 1, ranks, world_size)
    for rank, result in zip(ranks, results, strict=True):
        own = {mode: layout.ranks_in_group(mode, rank) for mode in layout.modes}
        assert result["groups"] == own
        assert result["torch"] == own
        assert result["local"] == {mode: group.index(rank) for mode, group in own.items()}
        distinct = {tuple(group) for group in own.values()}
        # The world's own group serves whoever wants all ranks.
        assert result["made"] == sorted(distinct - {tuple(range(world_size))})
        assert len(result["made"]) == 5
        assert result["known"] == 6
        assert result["left"] == 1
        assert result["seconds"] < 2
