"""The context on real ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from pool import RankError
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rlightning_groups as rg
from rlightning_groups import (
    ContextError,
    LayoutError,
    ModeError,
    ParallelContext,
    ParallelLayout,
    ParallelMode,
    _torch_compat,
    get_cpu_group,
    get_global_rank,
    get_group,
    get_local_rank,
    get_ranks_in_group,
    get_world_size,
    is_initialized,
)
from rlightning_groups.failures import announce
from rlightning_groups.group_initializer import (
    ProcessGroupInitializer,
    RankListInitializer,
    TrainDPGroupInitializer,
    WeightTransferGroupInitializer,
)

Run = Callable[..., list[Any]]
TP, SP, DP = ParallelMode.TENSOR_PARALLEL, ParallelMode.SEQUENCE_PARALLEL, ParallelMode.DATA_PARALLEL
TRAIN, TRANSFER, GLOBAL = ParallelMode.TRAIN_DATA_PARALLEL, ParallelMode.WEIGHT_TRANSFER, ParallelMode.GLOBAL
CUBE = {"tensor_parallel_size": 2, "sequence_parallel_size": 2}


def start(**settings: Any) -> ParallelContext:
    return ParallelContext().initialize(**settings)


def total(group: dist.ProcessGroup | None) -> int:
    """The sum of 2**rank over a group tells which ranks took part."""
    value = torch.tensor(2 ** dist.get_rank())
    dist.all_reduce(value, group=group)
    return int(value)


def members(ranks: Sequence[int]) -> int:
    return sum(2**rank for rank in ranks)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def message_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The class name and the text of what a call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@contextlib.contextmanager
def recorded_creations() -> Iterator[list[tuple[int, ...]]]:
    """The rank list of each group that is made meanwhile."""
    real, made = _torch_compat.new_named_group, []

    def record(ranks: Sequence[int], **how: Any) -> dist.ProcessGroup:
        made.append(tuple(ranks))
        return real(ranks, **how)

    _torch_compat.new_named_group = record
    try:
        yield made
    finally:
        _torch_compat.new_named_group = real


def pairs_with_next(rank: int, world_size: int) -> WeightTransferGroupInitializer:
    first = rank // 2 * 2
    return WeightTransferGroupInitializer(rank, world_size, [first, first + 1])


class RingInitializer(RankListInitializer):
    """A mode of one's own: the whole world, backwards."""

    mode = "RING"

    def own_ranks(self) -> list[int]:
        return list(range(self.world_size))[::-1]


class EvensInitializer(ProcessGroupInitializer):
    """Not a rank list: calls torch itself on every rank and hands non-members torch's integer."""

    mode = "EVENS"

    def init_dist_group(self, backend: str = "nccl", use_cpu: bool = False) -> Any:
        ranks = list(range(0, self.world_size, 2))
        group = dist.new_group(ranks, backend="gloo" if use_cpu else backend)
        return dist.get_rank(group), len(ranks), group, ranks, self.mode


# ------------------------------------------------------------------------------------------ every mode


def survey(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything there is to ask about each mode, with its group put to work."""
    with recorded_creations() as made:
        context = start(**settings)
    modes = {}
    for mode in context.layout.modes:
        group = get_group(mode)
        modes[mode] = {
            "ranks": get_ranks_in_group(mode),
            "torch_ranks": dist.get_process_group_ranks(group),
            "local_rank": get_local_rank(mode),
            "torch_rank": dist.get_rank(group),
            "world_size": get_world_size(mode),
            "sum": total(group),
            "timeout": timeout_of(group),
            "description": group.group_desc,
            "backend": dist.get_backend(group),
            "cpu_group_is_group": get_cpu_group(mode) is group,
            "method_is_function": context.get_group(mode) is group,
            "initialized": is_initialized(mode),
            "next": context.get_next_global_rank(mode),
            "previous": context.get_prev_global_rank(mode),
            "first": context.is_first_rank(mode),
            "last": context.is_last_rank(mode),
        }
    same = {
        (one, other)
        for one in modes
        for other in modes
        if one != other and get_group(one) is get_group(other)
    }
    return {
        "modes": modes,
        "same": same,
        "made": made,
        "known": len(dist.distributed_c10d._world.pg_map),
        "rank": get_global_rank(),
        "coordinates": [context.coordinates(), context.coordinates(0)],
        "has": context.modes(),
        "sizes": dict(context.layout.sizes),
        "node_sizes": context.layout.node_sizes,
    }


def check_survey(results: Sequence[dict[str, Any]], layout: ParallelLayout, timeout: timedelta) -> None:
    for rank, result in enumerate(results):
        own = {mode: layout.ranks_in_group(mode, rank) for mode in layout.modes}
        for mode, ranks in own.items():
            place = ranks.index(rank)
            assert result["modes"][mode] == {
                "ranks": ranks,
                "torch_ranks": ranks,
                "local_rank": place,
                "torch_rank": place,
                "world_size": len(ranks),
                "sum": members(ranks),
                "timeout": timeout,
                "description": ",".join(other for other in layout.modes if own[other] == ranks),
                "backend": "gloo",
                "cpu_group_is_group": True,
                "method_is_function": True,
                "initialized": True,
                "next": ranks[(place + 1) % len(ranks)],
                "previous": ranks[place - 1],
                "first": place == 0,
                "last": place == len(ranks) - 1,
            }
        assert result["same"] == {
            (one, other) for one in own for other in own if one != other and own[one] == own[other]
        }
        distinct = {tuple(ranks) for ranks in own.values()}
        # The world's own group serves whoever wants all ranks.
        assert sorted(result["made"]) == sorted(distinct - {tuple(range(layout.world_size))})
        assert result["known"] == len(distinct)
        assert result["rank"] == rank
        assert result["coordinates"] == [layout.coordinates(rank), layout.coordinates(0)]
        assert result["has"] == list(layout.modes)
        assert result["sizes"] == layout.sizes
        assert result["node_sizes"] == layout.node_sizes


@pytest.mark.parametrize(
    ("world_size", "settings", "nodes"),
    [
        (1, {}, None),
        (2, {"tensor_parallel_size": 2}, None),
        (2, {}, [1, 1]),
        (4, {"sequence_parallel_size": 2}, [3, 1]),
        (4, {"tensor_parallel_size": 4, "order": "dp-tp-sp"}, [2, 2]),
        (8, CUBE, None),
        (8, {**CUBE, "order": "sp-tp-dp"}, [5, 3]),
        (8, {**CUBE, "order": "dp-sp-tp"}, [4, 4]),
        (
            8,
            {
                "tensor_parallel_size": 2,
                "extra_axes": {"pipeline": 2},
                "order": "tp-sp-pipeline-dp",
                "composed": {"MODEL_PARALLEL": ("tensor", "pipeline")},
            },
            None,
        ),
    ],
    ids=str,
)
def test_every_mode(
    run_ranks: Run, world_size: int, settings: dict[str, Any], nodes: list[int] | None
) -> None:
    """Each mode's ranks, places, neighbours and sum, on every rank.

    Law 1: one creation per distinct own rank list, equal lists share one group. Law 2: a group of size 1 is a
    real group. Law 5: the local rank is torch's. Law 6: modes, timeout and backend of each group.
    Law 8: nodes are the launcher's, equal or not.
    """
    results = run_ranks(survey, world_size, {**settings, "timeout": 40}, nodes=nodes)
    check_survey(results, ParallelLayout(world_size, **settings, node_sizes=nodes), timedelta(seconds=40))


def test_every_mode_where_gloo_connects_at_once(run_ranks: Run) -> None:
    results = run_ranks(survey, 8, CUBE, lazy=False)
    check_survey(results, ParallelLayout(8, **CUBE), timedelta(minutes=30))


def scattered(node: str) -> dict[str, Any]:
    return survey({"node": node, "timeout": timedelta(seconds=40)})


def test_nodes_whose_ranks_are_not_consecutive(run_ranks: Run) -> None:
    """Law 8: node membership is asked, never computed from the rank."""
    results = run_ranks(scattered, 4, per_rank=["x", "y", "y", "x"])
    check_survey(results, ParallelLayout(4, node_of_rank=[0, 1, 1, 0]), timedelta(seconds=40))
    assert results[3]["modes"]["INTRA_NODE"]["ranks"] == [0, 3]
    assert results[3]["modes"]["INTER_NODE"]["ranks"] == [2, 3]


def single_process() -> dict[str, Any]:
    return survey({"timeout": 40})


def test_a_process_without_a_launcher_is_a_world_of_one(run_ranks: Run) -> None:
    """Law 8: no launcher and no accelerator is a normal case; law 2: its groups are real."""
    nothing = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    results = run_ranks(single_process, 1, env=nothing)
    check_survey(results, ParallelLayout(1), timedelta(seconds=40))


def equal_shapes_in_a_row() -> list[tuple[int, ...]]:
    """Group creations of three starts with one, two and four tensor-parallel ranks."""
    counts = []
    for size in (1, 2, 4):
        with recorded_creations() as made:
            start(tensor_parallel_size=size)
        counts.append((len(made), len(set(made)), total(get_group(TP)), total(get_group(TRAIN))))
        ParallelContext().destroy()
    return counts


def test_re_initialize_with_other_sizes(run_ranks: Run) -> None:
    """Law 7: initialize works again in the same process, with other sizes."""
    for rank, counts in enumerate(run_ranks(equal_shapes_in_a_row, 4)):
        pair, other = rank // 2 * 2, rank % 2
        assert counts == [
            (1, 1, 1 << rank, 15),
            (3, 3, members([pair, pair + 1]), members([other, other + 2])),
            (1, 1, 15, 1 << rank),
        ]


# ---------------------------------------------------------------------------------- groups that are missing


def refusals() -> dict[str, tuple[str, str]]:
    found = {
        "before": message_of(get_group, TP),
        "before, rank": message_of(get_global_rank),
        "before, layout": message_of(lambda: ParallelContext().layout),
        "before, register": message_of(ParallelContext().register, RingInitializer),
        "before, mesh": message_of(ParallelContext().device_mesh, TP),
    }
    context = start(initializers={"pair": lambda r, w: WeightTransferGroupInitializer(r, w, [1, 0])})
    found |= {
        "mode": message_of(get_group, "PIPELINE"),
        "lower case": message_of(get_local_rank, "tensor_parallel"),
        "not a member": message_of(get_group, TRANSFER),
        "not a member, by name": message_of(get_ranks_in_group, TRANSFER, "pair"),
        "not a member, size": message_of(get_world_size, TRANSFER),
        "not a member, cpu": message_of(get_cpu_group, TRANSFER),
        "not a member, next": message_of(context.get_next_global_rank, TRANSFER),
        "name": message_of(get_group, TRANSFER, "pear"),
        "name of none": message_of(get_group, TP, "pair"),
    }
    context.destroy()
    found["after"] = message_of(get_group, TP)
    found["after, size"] = message_of(get_world_size, TP)
    found["after, initialized"] = str(is_initialized()), str(is_initialized(TP))
    return found


def test_a_group_that_is_not_there(run_ranks: Run) -> None:
    """Law 3: the error names the mode, the rank, and the modes this rank does have."""
    results = run_ranks(refusals, 3)
    layout_modes = ", ".join(ParallelLayout(3).modes)
    how = (
        "call ParallelContext().initialize(...), which without a launcher makes a world of one, or train "
        "with HybridParallelStrategy"
    )
    for rank, found in enumerate(results):
        has = layout_modes + (", WEIGHT_TRANSFER" if rank < 2 else "")
        for key, wanted in {
            "before": "a group for 'TENSOR_PARALLEL'",
            "before, rank": "this call",
            "before, layout": "layout",
            "before, register": "register()",
            "before, mesh": "device_mesh()",
        }.items():
            text = f"{wanted} needs a running context, but it is not initialized; {how}"
            # A worker may have run a context in an earlier test.
            assert found[key] in {
                ("ContextError", text),
                ("ContextError", text.replace("is not initialized", "was destroyed")),
            }
        assert found["mode"] == (
            "ModeError",
            f"mode 'PIPELINE' was never set up; rank {rank} has groups for {has}",
        )
        assert found["lower case"] == (
            "ModeError",
            f"mode 'tensor_parallel' was never set up (did you mean 'TENSOR_PARALLEL'?); rank {rank} has "
            f"groups for {has}",
        )
        assert found["name"] == (
            "ModeError",
            "there is no WEIGHT_TRANSFER group named 'pear'; names: pair",
        )
        assert found["name of none"] == (
            "ModeError",
            "there is no TENSOR_PARALLEL group named 'pair'; names: none has a name",
        )
        destroyed = f"a group for 'TENSOR_PARALLEL' needs a running context, but it was destroyed; {how}"
        assert found["after"] == found["after, size"] == ("ContextError", destroyed)
        assert found["after, initialized"] == ("False", "False")
    unnamed = f"rank 2 is not in any WEIGHT_TRANSFER group; it has groups for {layout_modes}"
    named = f"rank 2 is not in the WEIGHT_TRANSFER group 'pair'; it has groups for {layout_modes}"
    assert results[2]["not a member"] == ("ModeError", unnamed)
    assert results[2]["not a member, by name"] == ("ModeError", named)
    for key in ("size", "cpu", "next"):
        assert results[2][f"not a member, {key}"] == ("ModeError", unnamed)
    assert results[0]["not a member"] == results[1]["not a member"] == ("nothing", "")


# -------------------------------------------------------------------------------------- groups of one's own


def register_several() -> dict[str, Any]:
    context = start(tensor_parallel_size=2)
    rank = get_global_rank()
    with recorded_creations() as made:
        for name, ranks in {"to a": [0, 1, 2], "to b": [3, 2], "one": [3], "as tp": [0, 1]}.items():
            context.register(lambda r, w, ranks=ranks: WeightTransferGroupInitializer(r, w, ranks), name)
        context.register(RingInitializer)
        context.register(EvensInitializer(rank, 4), "evens")
    names = ["to a", "to b", "one", "as tp"]
    own = [name for name in names if message_of(get_group, TRANSFER, name)[0] == "nothing"]
    return {
        "own": own,
        "ranks": [get_ranks_in_group(TRANSFER, name) for name in own],
        "local": [(get_local_rank(TRANSFER, n), dist.get_rank(get_group(TRANSFER, n))) for n in own],
        "sums": [total(get_group(TRANSFER, name)) for name in own],
        "next": [context.get_next_global_rank(TRANSFER, name) for name in own],
        "unnamed": message_of(get_group, TRANSFER),
        "again": message_of(context.register, RingInitializer),
        "ring": (get_ranks_in_group("RING"), get_local_rank("RING"), total(get_group("RING"))),
        "evens": message_of(get_group, "EVENS"),
        "evens sum": total(get_group("EVENS")) if rank % 2 == 0 else 0,
        "made": made,
        "shares tp": "as tp" in own and get_group(TRANSFER, "as tp") is get_group(TP),
        "modes": context.modes()[-3:],
    }


@pytest.mark.parametrize("lazy", [True, False])
def test_register(run_ranks: Run, lazy: bool) -> None:
    """WEIGHT_TRANSFER groups have names, for a rank may be in several.

    Law 1: a registered list that is there already shares its group. Law 3: torch's integer for non-members
    never reaches a user. Law 5: a list out of order keeps its order.
    """
    lists = {"to a": [0, 1, 2], "to b": [3, 2], "one": [3], "as tp": [0, 1]}
    results = run_ranks(register_several, 4, lazy=lazy, timeout=30)
    for rank, result in enumerate(results):
        own = {name: ranks for name, ranks in lists.items() if rank in ranks}
        assert result["own"] == list(own)
        assert result["ranks"] == list(own.values())
        assert result["local"] == [(ranks.index(rank),) * 2 for ranks in own.values()]
        assert result["sums"] == [members(ranks) for ranks in own.values()]
        assert result["next"] == [r[(r.index(rank) + 1) % len(r)] for r in own.values()]
        assert result["ring"] == ([3, 2, 1, 0], 3 - rank, 15)
        assert result["again"] == (
            "ContextError",
            "there is a RING group without a name already; give this one another name",
        )
        assert result["evens sum"] == (0b0101 if rank % 2 == 0 else 0)
        assert result["evens"][0] == ("ModeError" if rank % 2 else "nothing")
        new = [tuple(ranks) for name, ranks in own.items() if name != "as tp"]
        # Rank 3's list of itself is there already: no node of another shares it.
        assert [ranks for ranks in result["made"] if len(ranks) > 1] == [
            *(ranks for ranks in new if len(ranks) > 1),
            (3, 2, 1, 0),
        ]
        assert result["shares tp"] == (rank < 2)
    assert results[2]["unnamed"] == (
        "ModeError",
        "rank 2 is in several WEIGHT_TRANSFER groups; say which by name=: to a, to b",
    )
    assert results[1]["modes"] == ["TENSOR_PARALLEL", "WEIGHT_TRANSFER", "RING"]


def only_one_name() -> tuple[bool, int]:
    context = start()
    context.register(pairs_with_next, "pair")
    context.register(lambda r, w: WeightTransferGroupInitializer(r, w, [0, 1]), "other")
    same = get_rank_group_or_none(TRANSFER)
    return same, total(get_group(TRANSFER, "pair"))


def get_rank_group_or_none(mode: str) -> bool:
    """Whether the mode alone says which group."""
    try:
        return get_group(mode) is get_group(mode, "pair")
    except ModeError:
        return False


def test_the_only_group_of_a_mode_needs_no_name(run_ranks: Run) -> None:
    assert run_ranks(only_one_name, 4) == [(False, 3), (False, 3), (True, 12), (True, 12)]


def with_initializers(initializers: Any) -> dict[str, Any]:
    context = start(initializers=initializers)
    names = [None] if not isinstance(initializers, Mapping) else list(initializers)
    found = {}
    for handle_name in names:
        for mode in ("RING", TRANSFER, "EVENS"):
            if message_of(get_group, mode, handle_name)[0] == "nothing":
                found[(mode, handle_name)] = (
                    get_ranks_in_group(mode, handle_name),
                    total(get_group(mode, handle_name)),
                )
    before = len(dist.distributed_c10d._world.pg_map)
    context.destroy()
    return {"found": found, "before": before, "running": dist.is_initialized()}


@pytest.mark.parametrize(
    ("initializers", "found"),
    [
        (
            [RingInitializer, EvensInitializer, pairs_with_next],
            {("RING", None): [3, 2, 1, 0], ("EVENS", None): [0, 2], (TRANSFER, None): [[0, 1], [2, 3]]},
        ),
        (
            {"one": pairs_with_next, "two": RingInitializer},
            {("RING", "two"): [3, 2, 1, 0], (TRANSFER, "one"): [[0, 1], [2, 3]]},
        ),
    ],
    ids=["sequence", "mapping"],
)
def test_initializers_of_ones_own(
    run_ranks: Run, initializers: Any, found: dict[tuple[str, str | None], Any]
) -> None:
    results = run_ranks(with_initializers, 4, initializers)
    for rank, result in enumerate(results):
        wanted = {}
        for key, lists in found.items():
            options = lists if isinstance(lists[0], list) else [lists]
            for ranks in options:
                if rank in ranks:
                    wanted[key] = (ranks, members(ranks))
        assert result["found"] == wanted
        assert result["running"] is False


WRONG_INITIALIZERS: list[tuple[Any, str, str]] = [
    ([lambda r, w: WeightTransferGroupInitializer(r, w, [0, 9])], "LayoutError", "holds 9, but the world"),
    (
        [pairs_with_next, pairs_with_next],
        "LayoutError",
        "two groups of mode 'WEIGHT_TRANSFER' are named None; pass initializers as a mapping",
    ),
    (
        [lambda r, w: TrainDPGroupInitializer(r, w, [0, 1])],
        "LayoutError",
        "two groups of mode 'TRAIN_DATA_PARALLEL' are named None",
    ),
    ([lambda r, w: "group"], "LayoutError", "gave a str; an initializer is a ProcessGroupInitializer"),
    ([lambda r, w: WeightTransferGroupInitializer(0, w, [1, 0])], "LayoutError", "rank=0"),
    ([lambda r, w: WeightTransferGroupInitializer(r, 2 * w, [1, 0])], "LayoutError", "world_size=4"),
]


def with_wrong_initializers(index: int) -> None:
    start(initializers=WRONG_INITIALIZERS[index][0], timeout=8)


@pytest.mark.parametrize("index", range(len(WRONG_INITIALIZERS)))
def test_wrong_initializers_are_refused_on_every_rank(run_ranks: Run, index: int) -> None:
    """Laws 4 and 5: an error that one rank meets reaches all of them, and in no time."""
    begin = time.monotonic()
    results = run_ranks(with_wrong_initializers, 2, index, expect_errors=True, lazy=False)
    assert time.monotonic() - begin < 7
    _, name, message = WRONG_INITIALIZERS[index]
    assert all(isinstance(result, RankError) for result in results)
    assert any(result.type_name == name and message in result.message for result in results)
    assert all(message in result.message for result in results)


# ----------------------------------------------------------------------------- calling it more than once


def twice(second: Mapping[str, Any]) -> tuple[str, str]:
    context = start(tensor_parallel_size=2, backend="gloo", timeout=30)
    group = get_group(TP)
    said = message_of(context.initialize, **second)
    assert get_group(TP) is group
    return said


@pytest.mark.parametrize(
    "second",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "backend": "gloo", "timeout": 30},
        {"tensor_parallel_size": 2, "timeout": timedelta(seconds=30)},
        {"tensor_parallel_size": 2, "sequence_parallel_size": 1, "data_parallel_size": 1},
    ],
    ids=str,
)
def test_initialize_twice_with_the_same_settings(run_ranks: Run, second: dict[str, Any]) -> None:
    assert run_ranks(twice, 2, second) == [("nothing", "")] * 2


@pytest.mark.parametrize(
    ("second", "difference"),
    [
        ({}, "tensor_parallel_size=1, but it runs with tensor_parallel_size=2"),
        (
            {"tensor_parallel_size": 2, "order": "dp-sp-tp"},
            "order='dp-sp-tp', but it runs with order='tp-sp-dp'",
        ),
        (
            {"tensor_parallel_size": 2, "backend": "nccl"},
            "backend='nccl', but it runs with backend='gloo'",
        ),
        (
            {"tensor_parallel_size": 2, "cpu_groups": True},
            "cpu_groups=True, but it runs with cpu_groups=False",
        ),
    ],
    ids=str,
)
def test_initialize_twice_with_other_settings(
    run_ranks: Run, second: dict[str, Any], difference: str
) -> None:
    text = f"the context is initialized already: asked for {difference}. Call destroy() first"
    assert run_ranks(twice, 2, second) == [("ContextError", text)] * 2


def from_two_threads() -> tuple[list[bool], int, int]:
    contexts: list[ParallelContext] = []
    threads = [
        threading.Thread(target=lambda: contexts.append(start(tensor_parallel_size=2))) for _ in range(2)
    ]
    with recorded_creations() as made:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [context is ParallelContext() for context in contexts], len(made), total(get_group(TP))


def test_initialize_from_two_threads_starts_once(run_ranks: Run) -> None:
    results = run_ranks(from_two_threads, 2)
    assert results == [([True, True], 1, 3)] * 2


def test_copies_of_the_context_are_the_context() -> None:
    context = ParallelContext()
    assert ParallelContext() is context
    assert pickle.loads(pickle.dumps(context)) is context
    assert copy.copy(context) is context
    assert copy.deepcopy({"context": [context]})["context"][0] is context


def copied_while_running() -> list[bool]:
    context = start()
    copies = [pickle.loads(pickle.dumps(context)), copy.deepcopy(context)]
    return [other is context and other.get_group(GLOBAL) is get_group(GLOBAL) for other in copies]


def test_a_running_context_can_be_copied(run_ranks: Run) -> None:
    assert run_ranks(copied_while_running, 1) == [[True, True]]


# ------------------------------------------------------------------------------------- destroy and again


def in_a_world_of_the_users(init_method: str | None) -> dict[str, Any]:
    kwargs = {}
    if init_method is not None:
        kwargs = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", init_method=init_method, **kwargs)
    rank = dist.get_rank()
    mine = dist.new_group([0, 1, 2, 3])
    before = set(dist.distributed_c10d._world.pg_map)
    sums = []
    for size in (2, 4):
        context = start(tensor_parallel_size=size, initializers=[EvensInitializer])
        evens = get_group("EVENS") if rank % 2 == 0 else None
        sums += [total(get_group(TP)), 0 if evens is None else total(evens)]
        context.destroy()
        assert set(dist.distributed_c10d._world.pg_map) == before
    later = dist.new_group([0, 1, 2, 3])
    return {
        "sums": sums,
        "mine": total(mine),
        "later": total(later),
        "world": total(None),
        "running": dist.is_initialized(),
    }


@pytest.mark.parametrize("method", [None, "file"])
@pytest.mark.parametrize("lazy", [True, False])
def test_destroy_leaves_a_world_it_did_not_start(
    run_ranks: Run, tmp_path: Path, method: str | None, lazy: bool
) -> None:
    """Law 7: destroy frees what this context made and nothing else."""
    url = None if method is None else f"file://{tmp_path / 'store'}"
    for rank, result in enumerate(run_ranks(in_a_world_of_the_users, 4, url, lazy=lazy)):
        pair = members([rank // 2 * 2, rank // 2 * 2 + 1])
        evens = 0b0101 if rank % 2 == 0 else 0
        assert result == {
            "sums": [pair, evens, 15, evens],
            "mine": 15,
            "later": 15,
            "world": 15,
            "running": True,
        }


def share_the_users_world(timeout: float | None) -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    world = dist.group.WORLD
    before = world.group_desc
    context = start(timeout=timeout, tensor_parallel_size=2)
    group = get_group(GLOBAL)
    found = {
        "is the world": group is world,
        "described": group.group_desc,
        "timeouts": (timeout_of(group), timeout_of(world)),
        "sums": [total(get_group(GLOBAL)), total(None)],
    }
    context.destroy()
    return {**found, "restored": world.group_desc == before, "after": total(None)}


@pytest.mark.parametrize(("timeout", "shared"), [(None, True), (50, True), (40, False)])
def test_the_users_world_is_the_global_group_where_it_fits(
    run_ranks: Run, timeout: float | None, shared: bool
) -> None:
    """Laws 1 and 6: shared only with the timeout that was asked for; law 7: left as it was."""
    for result in run_ranks(share_the_users_world, 2, timeout):
        seconds = timedelta(seconds=timeout or 50)
        assert result == {
            "is the world": shared,
            "described": "GLOBAL,INTRA_NODE,TENSOR_PARALLEL",
            "timeouts": (seconds, timedelta(seconds=50)),
            "sums": [3, 3],
            "restored": True,
            "after": 3,
        }


def stop_own_world() -> list[Any]:
    context = start()
    seen = [dist.is_initialized(), is_initialized()]
    context.destroy()
    seen += [dist.is_initialized(), is_initialized()]
    context.destroy()
    # The user may now start a world, which the context then uses and leaves.
    store = dist.PrefixStore("user", next(dist.rendezvous("env://"))[0])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    context.initialize(tensor_parallel_size=2)
    seen += [total(get_group(TP))]
    context.destroy()
    return [*seen, dist.is_initialized()]


def test_destroy_stops_a_world_that_it_started(run_ranks: Run) -> None:
    """Law 7, and destroying twice does nothing."""
    assert run_ranks(stop_own_world, 2) == [[True, True, False, False, 3, True]] * 2


def world_destroyed_by_somebody_else() -> list[Any]:
    start(tensor_parallel_size=2)
    dist.destroy_process_group()
    seen: list[Any] = [is_initialized(), is_initialized(TP)]
    start(sequence_parallel_size=2)
    return [*seen, total(get_group(SP)), total(get_group(TP))]


def test_the_world_may_be_destroyed_behind_its_back(run_ranks: Run) -> None:
    """Law 7: initialize works again, whatever became of the groups."""
    assert run_ranks(world_destroyed_by_somebody_else, 2) == [[False, False, 3, 1], [False, False, 3, 2]]


def fails_half_way() -> list[Any]:
    """The last initializer fails after the world and all other groups have been made."""

    class Failing(RankListInitializer):
        mode = "FAILING"

        def own_ranks(self) -> list[int]:
            return [self.rank]

        def init_dist_group(self, backend: str = "nccl", use_cpu: bool = False) -> Any:
            raise KeyError("half way")

    seen: list[Any] = [message_of(start, initializers=[Failing], tensor_parallel_size=2)]
    seen += [is_initialized(), dist.is_initialized(), message_of(get_group, TP)[0]]
    start(tensor_parallel_size=2)
    return [*seen, total(get_group(TP))]


def test_a_start_that_fails_half_way_leaves_nothing(run_ranks: Run) -> None:
    """Law 7: works whatever failed half way."""
    wanted = [("KeyError", "'half way'"), False, False, "ContextError", 3]
    assert run_ranks(fails_half_way, 2) == [wanted] * 2


def resources() -> dict[str, int]:
    gc.collect()
    tables = dist.distributed_c10d._world
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "groups": len(tables.pg_map) + len(tables.pg_names) + len(tables.pg_group_ranks),
        "objects": len(gc.get_objects()),
        "MiB": (resident - shared) * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def hundred_cycles() -> tuple[dict[str, int], dict[str, int]]:
    before: dict[str, int] = {}
    for cycle in range(104):
        context = start(tensor_parallel_size=(1, 2, 4)[cycle % 3])
        total(get_group(TP)), total(get_group(TRAIN))
        context.destroy()
        if cycle == 3:
            time.sleep(0.2)
            before.update(resources())
    deadline = time.monotonic() + 3  # what closes in the background may take a moment
    while resources()["threads"] > before["threads"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return before, resources()


def test_a_hundred_cycles_leak_nothing(run_ranks: Run) -> None:
    """Law 7: any number of times, with other sizes."""
    for before, after in run_ranks(hundred_cycles, 4):
        for kind, room in {"threads": 0, "files": 0, "groups": 0, "objects": 10, "MiB": 2}.items():
            assert after[kind] <= before[kind] + room, (kind, before, after)


def errors_after_several_worlds() -> str:
    """What the interpreter prints of an error that nobody catches, in a process as new as a user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.__excepthook__)  # a worker has seen other tests' worlds
        patch.setattr("rlightning_groups.failures._excepthook", None)
        patch.setattr("rlightning_groups.launch._hooked", False)
        for _ in range(3):
            context = start()
            announce()
            context.destroy()
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            error = ValueError("nobody catches this")
            sys.excepthook(ValueError, error, None)
        return printed.getvalue()


def test_an_error_is_printed_once_whatever_the_number_of_worlds(run_ranks: Run) -> None:
    for rank, printed in enumerate(run_ranks(errors_after_several_worlds, 2)):
        assert printed.count("nobody catches this") == 1
        assert printed.count(f"[rank{rank}]: ValueError") == 1
        assert printed.count("[rank") == 1, printed


# ---------------------------------------------------------------------------------------- ranks that differ


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def rank_0_serves() -> dict[str, str | None]:
    """The environment of a launcher that serves no store, as most of them do."""
    return {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": free_port()}


def start_as(settings: Mapping[str, Any], running: bool = False) -> None:
    if running:
        dist.init_process_group("gloo")
    start(**{"timeout": 20, **settings})


HEADER = "the ranks of this job were started with different settings:"
MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "sizes": (
        {"tensor_parallel_size": 2},
        {"sequence_parallel_size": 2},
        [
            "  tensor_parallel_size: 2 on ranks 0-2; 1 on rank 3",
            "  sequence_parallel_size: 1 on ranks 0-2; 2 on rank 3",
        ],
    ),
    "data_parallel_size": (
        {},
        {"tensor_parallel_size": 4, "data_parallel_size": 1},
        [
            "  tensor_parallel_size: 1 on ranks 0-2; 4 on rank 3",
            "  data_parallel_size: 4 on ranks 0-2; 1 on rank 3",
        ],
    ),
    "order": ({}, {"order": "sp-tp-dp"}, ["  order: tp-sp-dp on ranks 0-2; sp-tp-dp on rank 3"]),
    "backend": (
        {"backend": "gloo"},
        {"backend": "cpu:gloo"},
        ["  backend: gloo on ranks 0-2; cpu:gloo on rank 3"],
    ),
    "timeout": ({}, {"timeout": 21}, ["  timeout: 20 on ranks 0-2; 21 on rank 3"]),
    "cpu_groups": ({}, {"cpu_groups": True}, ["  cpu_groups: False on ranks 0-2; True on rank 3"]),
    "composed": (
        {"composed": {"MODEL": ("tensor",)}},
        {"composed": {"MODEL": ("data",)}},
        ["  composed: {'MODEL': ('tensor',)} on ranks 0-2; {'MODEL': ('data',)} on rank 3"],
    ),
    "initializers": (
        {"initializers": [RingInitializer]},
        {},
        ["  initializers: RingInitializer(mode='RING', name=None) on ranks 0-2; none on rank 3"],
    ),
}


@pytest.mark.parametrize("running", [False, True], ids=["own world", "user's world"])
@pytest.mark.parametrize("what", MISMATCHES)
def test_different_settings(run_ranks: Run, what: str, running: bool) -> None:
    """Law 4: before any group is made, each rank learns who differs, with both values, within seconds."""
    usual, other, lines = MISMATCHES[what]
    begin = time.monotonic()
    results = run_ranks(start_as, 4, running, per_rank=[usual] * 3 + [other], expect_errors=True, lazy=False)
    assert time.monotonic() - begin < 10
    wanted = "\n".join([HEADER, *lines])
    assert [(r.type_name, r.message) for r in results] == [("AgreementError", wanted)] * 4


@pytest.mark.parametrize("odd", [0, 3])
def test_different_settings_where_a_rank_serves_the_store(run_ranks: Run, odd: int) -> None:
    """Law 4 without torchrun: rank 0 must not take the store along before all have read why."""
    settings = [{"order": "dp-sp-tp"} if rank == odd else {} for rank in range(4)]
    results = run_ranks(start_as, 4, per_rank=settings, env=rank_0_serves(), expect_errors=True)
    assert {result.type_name for result in results} == {"AgreementError"}
    assert len({result.message for result in results}) == 1
    assert f"dp-sp-tp on rank {odd}" in results[0].message


def test_start_where_a_rank_serves_the_store(run_ranks: Run) -> None:
    for rank, counts in enumerate(run_ranks(equal_shapes_in_a_row, 4, env=rank_0_serves())):
        assert [sums for _, _, *sums in counts] == [
            [1 << rank, 15],
            [members([rank // 2 * 2, rank // 2 * 2 + 1]), members([rank % 2, rank % 2 + 2])],
            [15, 1 << rank],
        ]


def test_equal_settings_spelled_differently_are_equal(run_ranks: Run) -> None:
    spellings = [
        {"timeout": 20},
        {"timeout": timedelta(seconds=20), "backend": "gloo"},
        {"timeout": 20.0, "data_parallel_size": 3},
    ]
    assert run_ranks(start_as, 3, per_rank=spellings) == [None] * 3


def start_with_ranks(ranks: list[int] | None) -> None:
    initializer = (lambda r, w: WeightTransferGroupInitializer(r, w, ranks)) if ranks else pairs_with_next
    start(initializers=[initializer], timeout=20)


@pytest.mark.parametrize(
    ("lists", "shown"),
    [
        ([[0, 1], [0, 1], [0, 1, 2], [0, 1]], ["0,1 on ranks 0-1", "0,1,2 on rank 2"]),
        ([[0, 1], [1, 0], [0, 1], [0, 1]], ["0,1 on rank 0", "1,0 on rank 1"]),
        ([[0, 1, 2], [0, 1, 2], [0, 1], [0, 1]], ["0,1,2 on ranks 0-1"]),
    ],
)
def test_different_lists_for_one_group(run_ranks: Run, lists: list[list[int]], shown: list[str]) -> None:
    """Law 4: extra initializers are compared too, and both values are named."""
    begin = time.monotonic()
    results = run_ranks(start_with_ranks, 4, per_rank=lists, expect_errors=True, lazy=False)
    assert time.monotonic() - begin < 10
    assert len({result.message for result in results}) == 1
    assert {result.type_name for result in results} == {"AgreementError"}
    assert "different ranks" in results[0].message
    for text in shown:
        assert text in results[0].message


def test_one_rank_with_a_bad_layout(run_ranks: Run) -> None:
    """Law 4: the others do not wait for a rank that cannot start."""
    begin = time.monotonic()
    settings = [{}, {"tensor_parallel_size": 3}, {}, {}]
    results = run_ranks(start_as, 4, per_rank=settings, expect_errors=True)
    assert time.monotonic() - begin < 10
    own = "tensor_parallel_size=3 does not divide world_size=4; sizes that do: 1, 2, 4"
    theirs = f"some ranks could not start, so none of them does:\n  rank 1: LayoutError: {own}"
    assert [(r.type_name, r.message) for r in results] == [
        ("AgreementError", theirs),
        ("LayoutError", own),
        ("AgreementError", theirs),
        ("AgreementError", theirs),
    ]


@pytest.mark.parametrize(
    "bad", [{"initializers": 5}, {"timeout": "soon"}, {"backend": 5}, {"backend_options": 5}], ids=str
)
def test_one_rank_with_an_argument_of_a_wrong_type(run_ranks: Run, bad: dict[str, Any]) -> None:
    """Law 4: whatever is wrong with one rank's arguments, no rank hangs and each names it."""
    begin = time.monotonic()
    settings = [{"timeout": 6}, {"timeout": 6, **bad}]
    results = run_ranks(start_as, 2, per_rank=settings, expect_errors=True)
    assert time.monotonic() - begin < 5
    assert all(isinstance(result, RankError) for result in results)
    assert results[0].type_name == "AgreementError"
    assert "rank 1" in results[0].message


def start_unless(missing: int) -> str:
    if int(os.environ["RANK"]) == missing:
        return "stayed away"
    start(timeout=2)
    return "started"


@pytest.mark.parametrize("launcher", ["torchrun", "another"])
def test_a_rank_that_never_calls(run_ranks: Run, launcher: str) -> None:
    """Law 4: a missing rank is named after the timeout. Without torchrun, rank 0 serves the store itself."""
    env = rank_0_serves() if launcher == "another" else {}
    begin = time.monotonic()
    results = run_ranks(start_unless, 4, 2, env=env, expect_errors=True)
    assert 2 <= time.monotonic() - begin < 10
    assert results[2] == "stayed away"
    message = (
        "rank 2 did not call initialize within 2 s; 3 of 4 did. Start every rank, and see whether one of "
        "them ended with an error of its own"
    )
    others = [results[rank] for rank in (0, 1, 3)]
    assert [(r.type_name, r.message) for r in others] == [("AgreementError", message)] * 3


def start_with_options(there: bool) -> None:
    options = {TP: dist.ProcessGroupGloo._Options()} if there else None
    start(tensor_parallel_size=2, timeout=6, backend_options=options)


def test_backend_options_on_one_rank_only(run_ranks: Run) -> None:
    """Law 4: a mode with options has a group of its own, so all ranks must give them to the same modes."""
    begin = time.monotonic()
    results = run_ranks(start_with_options, 2, per_rank=[True, False], expect_errors=True, lazy=False)
    assert time.monotonic() - begin < 5
    assert [getattr(result, "type_name", result) for result in results] == ["AgreementError"] * 2
    assert "TENSOR_PARALLEL" in results[0].message


def register_on(rank: int) -> tuple[str, str]:
    context = start(timeout=2)
    return message_of(context.register, RingInitializer) if get_global_rank() == rank else ("", "")


def test_a_rank_that_never_registers(run_ranks: Run) -> None:
    (name, message), _ = run_ranks(register_on, 2, 0)
    assert name == "AgreementError"
    assert message.startswith("rank 1 did not call register within 2 s; 1 of 2 did")


def try_then_agree(first: Mapping[str, Any]) -> tuple[str, int]:
    error = message_of(start, **first)[0]
    start(tensor_parallel_size=2)
    return error, total(get_group(TP))


def test_after_a_mismatch_all_may_try_again(run_ranks: Run) -> None:
    """Law 7: initialize works after a start that failed."""
    settings = [{"tensor_parallel_size": 1}, {"tensor_parallel_size": 2}]
    assert run_ranks(try_then_agree, 2, per_rank=settings) == [("AgreementError", 3)] * 2


def late_then_agree(rank: int) -> tuple[str, int]:
    # The last rank comes only after the others have given up.
    if rank == 2:
        time.sleep(2)
        error = ""
    else:
        error = message_of(start, timeout=1)[0]
    start(timeout=10)
    return error, total(get_group(GLOBAL))


def test_after_a_missing_rank_all_may_try_again(run_ranks: Run) -> None:
    """Law 7: the ranks that came in vain count for nothing afterwards."""
    results = run_ranks(late_then_agree, 3, per_rank=range(3), timeout=30)
    assert results == [("AgreementError", 7), ("AgreementError", 7), ("", 7)]


def register_as(what: tuple[str, list[int]]) -> tuple[str, str]:
    name, ranks = what
    context = start(timeout=20)
    said = message_of(context.register, lambda r, w: WeightTransferGroupInitializer(r, w, ranks), name)
    context.register(RingInitializer)
    assert total(get_group("RING")) == 3
    return said


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (("a", [0, 1]), ("b", [0, 1]), "name='a') on rank 0; WeightTransferGroupInitializer(mode='WEIGHT"),
        (("a", [0, 1]), ("a", [1, 0]), "planned with different ranks by its own members"),
        (("a", [0, 1]), ("a", [0, 7]), "LayoutError: ranks=0,7 holds 7, but the world has ranks 0 to 1"),
    ],
)
def test_registering_different_things(run_ranks: Run, first: Any, second: Any, message: str) -> None:
    """Law 4 holds for register as well, and the context goes on."""
    results = run_ranks(register_as, 2, per_rank=[first, second], lazy=False)
    assert results[0][0] == "AgreementError"
    assert message in results[0][1]
    assert results[1][0] in ("AgreementError", "LayoutError")


# -------------------------------------------------------------------------------------------- the launcher


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"RANK": None},
            "the environment has WORLD_SIZE, MASTER_ADDR, MASTER_PORT but not RANK; a launcher such as "
            "torchrun sets all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, a single process has none",
        ),
        (
            {"MASTER_ADDR": None, "MASTER_PORT": None},
            "the environment has RANK, WORLD_SIZE but not MASTER_ADDR, MASTER_PORT; a launcher such as",
        ),
        ({"WORLD_SIZE": ""}, "the environment has RANK, MASTER_ADDR, MASTER_PORT but not WORLD_SIZE"),
        ({"RANK": "first"}, "RANK='first' and WORLD_SIZE='1' must be numbers with 0 <= RANK < WORLD_SIZE"),
        ({"RANK": "1"}, "RANK='1' and WORLD_SIZE='1' must be numbers with 0 <= RANK < WORLD_SIZE"),
    ],
    ids=str,
)
def test_a_launchers_environment_that_is_not_whole(
    run_ranks: Run, env: dict[str, str | None], message: str
) -> None:
    """Law 8: half a launcher is an error that names what is missing."""
    (error,) = run_ranks(start_as, 1, {}, env=env, expect_errors=True)
    assert error.type_name == "ContextError"
    assert error.message.startswith(message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here nccl works")
@pytest.mark.parametrize("running", [False, True], ids=["own world", "user's world"])
def test_nccl_without_an_accelerator(run_ranks: Run, running: bool) -> None:
    """The error says what would work, and the failed start leaves nothing behind."""
    results = run_ranks(start_as, 2, {"backend": "nccl"}, running, expect_errors=True)
    assert {result.type_name for result in results} == {"ContextError"}
    assert all("nccl" in result.message for result in results)


def stray_environment() -> tuple[list[int], tuple[int, ...]]:
    context = start()
    os.environ.update(RANK="7", LOCAL_RANK="7", WORLD_SIZE="64", GROUP_RANK="5")
    return [get_global_rank(), get_local_rank(ParallelMode.INTRA_NODE)], context.layout.node_sizes


def test_the_environment_is_asked_once(run_ranks: Run) -> None:
    """Law 8: the answer from start-up is kept."""
    results = run_ranks(stray_environment, 3, nodes=[1, 2])
    assert results == [([0, 0], (1, 2)), ([1, 0], (1, 2)), ([2, 1], (1, 2))]


# ---------------------------------------------------------------------------------------------- the meshes


def meshes() -> dict[str, Any]:
    context = start(**CUBE, initializers=[RingInitializer])
    before = len(dist.distributed_c10d._world.pg_map)
    with recorded_creations() as made:
        two = context.device_mesh(DP, TP)
        three = context.device_mesh(DP, SP, TP)
        train = context.device_mesh(TRAIN, TP)
        one = context.device_mesh(SP)
        ring = context.device_mesh("RING")
    return {
        "new": (len(dist.distributed_c10d._world.pg_map) - before, made),
        "same": context.device_mesh(DP, TP) is two,
        "ranks": [mesh.mesh.tolist() for mesh in (two, three, train, one, ring)],
        "names": [mesh.mesh_dim_names for mesh in (two, three, train, one, ring)],
        "device": {mesh.device_type for mesh in (two, three, train, one, ring)},
        "groups": [
            two.get_group("data_parallel") is get_group(DP),
            two.get_group("tensor_parallel") is get_group(TP),
            three["sequence_parallel"].get_group() is get_group(SP),
            train.get_group(0) is get_group(TRAIN),
            one.get_group() is get_group(SP),
        ],
        "coordinate": three.get_coordinate(),
        "errors": [
            message_of(context.device_mesh),
            message_of(context.device_mesh, TP, TP),
            message_of(context.device_mesh, TRAIN, DP),
            message_of(context.device_mesh, GLOBAL, TP),
            message_of(context.device_mesh, ParallelMode.INTRA_NODE, TP),
            message_of(context.device_mesh, "RING", TP),
            message_of(context.device_mesh, "PIPELINE", TP)[0:1],
        ],
    }


def test_device_mesh(run_ranks: Run) -> None:
    """A mesh is a view: dims named after the modes, no communicator is made."""
    for rank, result in enumerate(run_ranks(meshes, 8)):
        d, s, t = rank // 4, rank // 2 % 2, rank % 2
        line = s * 2
        assert result["new"] == (0, [])
        assert result["same"] is True
        assert result["ranks"] == [
            [[line, line + 1], [line + 4, line + 5]],
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
            [[0, 1], [2, 3], [4, 5], [6, 7]],
            [4 * d + t, 4 * d + t + 2],
            [7, 6, 5, 4, 3, 2, 1, 0],
        ]
        assert result["names"] == [
            ("data_parallel", "tensor_parallel"),
            ("data_parallel", "sequence_parallel", "tensor_parallel"),
            ("train_data_parallel", "tensor_parallel"),
            ("sequence_parallel",),
            ("ring",),
        ]
        assert result["device"] == {"cpu"}
        assert result["groups"] == [True] * 5
        assert result["coordinate"] in ([d, s, t], (d, s, t))
        need = "a mesh needs modes over different axes of the layout, but"
        assert result["errors"] == [
            ("ModeError", "device_mesh needs one or more different modes, got ()"),
            (
                "ModeError",
                "device_mesh needs one or more different modes, got ('TENSOR_PARALLEL', 'TENSOR_PARALLEL')",
            ),
            ("ModeError", f"{need} TRAIN_DATA_PARALLEL spans dataxsequence, DATA_PARALLEL spans data"),
            ("ModeError", f"{need} GLOBAL spans dataxsequencextensor, TENSOR_PARALLEL spans tensor"),
            ("ModeError", f"{need} INTRA_NODE spans no axis, TENSOR_PARALLEL spans tensor"),
            ("ModeError", f"{need} RING spans no axis, TENSOR_PARALLEL spans tensor"),
            ("ModeError",),
        ]


def multiply_on_mesh(order: str) -> tuple[torch.Tensor, list[int]]:
    mesh = start(**CUBE, order=order).device_mesh(DP, TP)
    left = distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0), Shard(1)])
    right = distribute_tensor(torch.arange(18.0).reshape(6, 3), mesh, [Shard(0), Shard(0)])
    product = left @ right
    assert isinstance(product, DTensor)
    return product.full_tensor(), list(left.to_local().shape)


@pytest.mark.parametrize("order", ["tp-sp-dp", "dp-tp-sp"])
def test_a_dtensor_over_the_mesh(run_ranks: Run, order: str) -> None:
    expected = torch.arange(24.0).reshape(4, 6) @ torch.arange(18.0).reshape(6, 3)
    for product, shape in run_ranks(multiply_on_mesh, 8, order):
        torch.testing.assert_close(product, expected, rtol=0, atol=0)
        assert shape == [2, 3]


# --------------------------------------------------------------------------------------------- the compiler


def scaled_sum(value: torch.Tensor) -> torch.Tensor:
    rank, size = get_local_rank(TP), get_world_size(TP)
    summed = funcol.all_reduce(value * (rank + 1), "sum", get_group(TP))
    return funcol.wait_tensor(summed) * size


def compiled() -> list[list[float]]:
    torch._dynamo.reset()
    function = torch.compile(scaled_sum, fullgraph=True, backend="aot_eager")
    results = []
    for size in (2, 1):
        start(tensor_parallel_size=size)
        results.append(function(torch.ones(2)).tolist())
        results.append(scaled_sum(torch.ones(2)).tolist())
        ParallelContext().destroy()
    torch._dynamo.reset()
    return results


def test_torch_compile_traces_get_group(run_ranks: Run) -> None:
    """Law 9: fullgraph traces through get_group; after a re-start the new group is taken."""
    assert run_ranks(compiled, 2, timeout=120) == [[[6.0, 6.0], [6.0, 6.0], [1.0, 1.0], [1.0, 1.0]]] * 2


def test_the_context_says_what_it_is(run_ranks: Run) -> None:
    assert run_ranks(in_words, 2) == [
        (
            "ParallelContext(not initialized)",
            f"ParallelContext(rank {rank} of 2 ranks = data 1 x sequence 1 x tensor 2, order tp-sp-dp, "
            "1 node, gloo)",
        )
        for rank in range(2)
    ]


def in_words() -> tuple[str, str]:
    before = repr(ParallelContext())
    return before, repr(start(tensor_parallel_size=2))


def test_the_package_forwards_to_the_context() -> None:
    assert rg.get_group is ParallelContext.get_group
    assert issubclass(ModeError, RuntimeError)
    assert issubclass(ContextError, RuntimeError)
    assert issubclass(LayoutError, ValueError)


def bad_size_unless(missing: int) -> None:
    if int(os.environ["RANK"]) != missing:
        start(tensor_parallel_size=2, timeout=1)


def test_a_bad_size_and_a_missing_rank(run_ranks: Run) -> None:
    """Law 4: the timeout that was asked for counts for a request that cannot be met, too."""
    begin = time.monotonic()
    results = run_ranks(bad_size_unless, 3, 1, expect_errors=True)
    assert time.monotonic() - begin < 10
    assert results[1] is None
    for result in (results[0], results[2]):
        assert result.type_name == "LayoutError"
        assert "tensor_parallel_size=2 does not divide world_size=3" in result.message
