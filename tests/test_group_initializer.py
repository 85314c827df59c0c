"""The initializers by hand: torch.distributed is started by the rank, no context is involved."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlightning_groups import ContextError, LayoutError, ParallelLayout
from rlightning_groups.group_initializer import (
    CommMode,
    DPGroupInitializer,
    GroupFactory,
    InterNodeGroupInitializer,
    IntraNodeGroupInitializer,
    LayoutGroupInitializer,
    ParallelMode,
    ProcessGroupInitializer,
    RankListInitializer,
    SPGroupInitializer,
    TPGroupInitializer,
    TrainDPGroupInitializer,
    WeightTransferGroupInitializer,
)

Run = Callable[..., list[Any]]
Groups = list[list[int]]


class PairInitializer(RankListInitializer):
    """A mode of one's own: neighbours in pairs, the last rank of an odd world in none."""

    mode = "PAIR"

    def own_ranks(self) -> list[int] | None:
        first = self.rank // 2 * 2
        return [first, first + 1] if first + 1 < self.world_size else None


class HandMadeInitializer(ProcessGroupInitializer):
    """Knows nothing of rank lists and calls torch itself."""

    mode = "HAND_MADE"

    def init_dist_group(self, backend: str = "nccl", use_cpu: bool = False) -> Any:
        evens = list(range(0, self.world_size, 2))
        group = dist.new_group(evens, backend="gloo" if use_cpu else backend, group_desc=self.mode)
        if self.rank not in evens:
            return None, None, None, None, self.mode
        return evens.index(self.rank), len(evens), group, evens, self.mode


class NamelessInitializer(RankListInitializer):
    def own_ranks(self) -> list[int]:
        return [self.rank]


def total(group: dist.ProcessGroup) -> int:
    """The sum of 2**rank over a group tells which ranks took part."""
    value = torch.tensor(2 ** dist.get_rank())
    dist.all_reduce(value, group=group)
    return int(value)


def members(ranks: Sequence[int]) -> int:
    return sum(2**rank for rank in ranks)


def made(initializer: ProcessGroupInitializer, **how: Any) -> dict[str, Any]:
    """What came of an initializer, with the group put to work."""
    local_rank, group_world_size, group, ranks, mode = initializer.init_dist_group(**how)
    stored = (initializer.local_rank, initializer.group_world_size, initializer.ranks_in_group)
    result = {
        "returned": (local_rank, group_world_size, ranks, mode),
        "stored": (*stored, initializer.mode),
        "same_group": initializer.process_group is group,
        "group": group is not None,
    }
    if group is not None:
        result |= {
            "sum": total(group),
            "torch_rank": dist.get_rank(group),
            "torch_ranks": dist.get_process_group_ranks(group),
            "description": group.group_desc,
            "backend": dist.get_backend(group),
            "timeout": group._get_backend(torch.device("cpu")).options._timeout,
        }
    return result


def expected(rank: int, ranks: Sequence[int] | None, mode: str) -> dict[str, Any]:
    if ranks is None or rank not in ranks:
        nothing = (None, None, None, mode)
        return {"returned": nothing, "stored": nothing, "same_group": True, "group": False}
    place = list(ranks).index(rank)
    return {
        "returned": (place, len(ranks), list(ranks), mode),
        "stored": (place, len(ranks), list(ranks), mode),
        "same_group": True,
        "group": True,
        "sum": members(ranks),
        "torch_rank": place,
        "torch_ranks": list(ranks),
        "description": mode,
        "backend": "gloo",
        "timeout": timedelta(minutes=30),
    }


def by_hand(kind: type[ProcessGroupInitializer], arguments: Any, **how: Any) -> tuple[dict[str, Any], ...]:
    dist.init_process_group("gloo")
    initializer = kind(dist.get_rank(), dist.get_world_size(), *arguments)
    before = {
        name: getattr(initializer, name) for name in ("local_rank", "group_world_size", "ranks_in_group")
    }
    attributes = {name: value for name, value in vars(initializer).items() if isinstance(value, (int, list))}
    return before, attributes, made(initializer, **how)


# -------------------------------------------------------------------------------------- the seed's eight

EVENS_BACKWARDS = [6, 2, 4, 0]
SEED: list[tuple[type[ProcessGroupInitializer], int, Any, dict[str, Any], str, Groups]] = [
    (
        DPGroupInitializer,
        4,
        2,
        {"data_parallel_size": 2, "process_num_between_dp_rank": 2},
        "DATA_PARALLEL",
        [[0, 2], [1, 3]],
    ),
    (
        DPGroupInitializer,
        8,
        2,
        {"data_parallel_size": 2, "process_num_between_dp_rank": 4},
        "DATA_PARALLEL",
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    (
        TPGroupInitializer,
        4,
        4,
        {"tensor_parallel_size": 4, "tensor_parallel_group_num": 1},
        "TENSOR_PARALLEL",
        [[0, 1, 2, 3]],
    ),
    (
        TPGroupInitializer,
        8,
        2,
        {"tensor_parallel_size": 2, "tensor_parallel_group_num": 4},
        "TENSOR_PARALLEL",
        [[0, 1], [2, 3], [4, 5], [6, 7]],
    ),
    (
        SPGroupInitializer,
        4,
        1,
        {"sequence_parallel_size": 1, "sequence_parallel_group_num": 4},
        "SEQUENCE_PARALLEL",
        [[0], [1], [2], [3]],
    ),
    (
        SPGroupInitializer,
        8,
        4,
        {"sequence_parallel_size": 4, "sequence_parallel_group_num": 2},
        "SEQUENCE_PARALLEL",
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
    (
        InterNodeGroupInitializer,
        4,
        2,
        {"local_world_size": 2, "node_count": 2},
        "INTER_NODE",
        [[0, 2], [1, 3]],
    ),
    (
        InterNodeGroupInitializer,
        8,
        2,
        {"local_world_size": 2, "node_count": 4},
        "INTER_NODE",
        [[0, 2, 4, 6], [1, 3, 5, 7]],
    ),
    (IntraNodeGroupInitializer, 4, [2, 3], {"ranks": [2, 3]}, "INTRA_NODE", [[2, 3]]),
    (TrainDPGroupInitializer, 4, [3, 1], {"ranks": [3, 1]}, "TRAIN_DATA_PARALLEL", [[3, 1]]),
    (
        WeightTransferGroupInitializer,
        8,
        EVENS_BACKWARDS,
        {"ranks": EVENS_BACKWARDS},
        "WEIGHT_TRANSFER",
        [EVENS_BACKWARDS],
    ),
    (WeightTransferGroupInitializer, 4, [2], {"ranks": [2]}, "WEIGHT_TRANSFER", [[2]]),
]


@pytest.mark.parametrize(
    ("kind", "world_size", "argument", "attributes", "mode", "groups"),
    SEED,
    ids=[f"{kind.__name__}-{world}-{argument}" for kind, world, argument, *_ in SEED],
)
def test_the_seed_initializers(
    run_ranks: Run,
    kind: type[ProcessGroupInitializer],
    world_size: int,
    argument: Any,
    attributes: dict[str, Any],
    mode: str,
    groups: Groups,
) -> None:
    """The 5-tuple, the attributes and a working group on each member; four None and the mode elsewhere.

    Law 2: a group of size 1 is a real group. Law 5: the order of a rank list is kept and the local rank is
    torch's. Law 6: a group carries its mode and its timeout.
    """
    results = run_ranks(by_hand, world_size, kind, (argument,), backend="gloo")
    for rank, (before, found, outcome) in enumerate(results):
        own = next((group for group in groups if rank in group), None)
        assert before == dict.fromkeys(("local_rank", "group_world_size", "ranks_in_group"))
        assert found == {"rank": rank, "world_size": world_size, **attributes}
        assert outcome == expected(rank, own, mode)


@pytest.mark.parametrize(
    ("kind", "argument"), [(TPGroupInitializer, 2), (WeightTransferGroupInitializer, [1, 0])]
)
def test_use_cpu_means_gloo_whatever_the_backend(
    run_ranks: Run, kind: type[ProcessGroupInitializer], argument: Any
) -> None:
    results = run_ranks(by_hand, 2, kind, (argument,), backend="nccl", use_cpu=True)
    ranks = [0, 1] if argument == 2 else argument
    for rank, (_, _, outcome) in enumerate(results):
        assert outcome == expected(rank, ranks, kind(0, 2, argument).mode or "")


def layout_group(mode: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    layout = ParallelLayout(4, tensor_parallel_size=2, node_sizes=[3, 1])
    return made(LayoutGroupInitializer(dist.get_rank(), layout, mode), backend="gloo")


@pytest.mark.parametrize("mode", ["INTRA_NODE", "TRAIN_DATA_PARALLEL"])
def test_a_mode_of_a_layout(run_ranks: Run, mode: str) -> None:
    own = {"INTRA_NODE": [[0, 1, 2], [3]], "TRAIN_DATA_PARALLEL": [[0, 2], [1, 3]]}[mode]
    for rank, outcome in enumerate(run_ranks(layout_group, 4, mode)):
        assert outcome == expected(rank, next(group for group in own if rank in group), mode)


# --------------------------------------------------------------------------------- initializers of one's own


def test_a_rank_list_of_ones_own(run_ranks: Run) -> None:
    results = run_ranks(by_hand, 3, PairInitializer, (), backend="gloo")
    for rank, (_, _, outcome) in enumerate(results):
        assert outcome == expected(rank, [0, 1] if rank < 2 else None, "PAIR")


def test_a_plain_initializer_that_calls_torch(run_ranks: Run) -> None:
    results = run_ranks(by_hand, 4, HandMadeInitializer, (), use_cpu=True)
    for rank, (_, _, outcome) in enumerate(results):
        wanted = expected(rank, [0, 2], "HAND_MADE")
        assert outcome["returned"] == wanted["returned"]
        assert outcome.get("sum") == wanted.get("sum")


def test_the_base_classes_are_abstract() -> None:
    for kind in (ProcessGroupInitializer, RankListInitializer):
        with pytest.raises(TypeError, match="abstract"):
            kind(0, 1)


# ------------------------------------------------------------- subsets in unequal numbers and another order

TRANSFERS = {"a": [0, 1, 2], "b": [1, 2, 3], "c": [3, 0], "d": [2, 1], "e": [1, 2], "a again": [0, 1, 2]}
WHICH = [
    ["c", "a", "a again"],
    ["d", "a", "e", "b", "a again"],
    ["a", "b", "a again", "e", "d"],
    ["b", "c"],
]


def make_transfers(names: list[str]) -> dict[str, Any]:
    """Make only the subsets this rank is in, in its own order; then use them in one order."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {
        name: WeightTransferGroupInitializer(rank, size, TRANSFERS[name]).init_dist_group("gloo")
        for name in names
    }
    used = sorted(names)
    return {
        "sums": {name: total(groups[name][2]) for name in used},
        "local_ranks": {name: (groups[name][0], dist.get_rank(groups[name][2])) for name in used},
        "distinct": len({groups[name][2] for name in used}),
    }


@pytest.mark.parametrize("lazy", [True, False])
def test_overlapping_subsets_in_unequal_numbers_and_different_order(run_ranks: Run, lazy: bool) -> None:
    """Law 1: a subset group has a name that its members derive, however many groups each has made.

    Eager gloo connects all members while the group is made, so there the order must not cross; the same
    initializers then still differ in number.
    """
    which = WHICH if lazy else [sorted(names) for names in WHICH]
    for rank, result in enumerate(run_ranks(make_transfers, 4, per_rank=which, lazy=lazy, timeout=30)):
        names = WHICH[rank]
        assert result["sums"] == {name: members(TRANSFERS[name]) for name in names}
        places = {name: TRANSFERS[name].index(rank) for name in names}
        assert result["local_ranks"] == {name: (place, place) for name, place in places.items()}
        assert result["distinct"] == len(names)


def only_some_ranks_make_one() -> tuple[int, int]:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank in (1, 3):
        WeightTransferGroupInitializer(rank, size, [1, 3]).init_dist_group("gloo")
    group = TPGroupInitializer(rank, size, 2).init_dist_group("gloo")[2]
    return total(group), total(dist.new_group(range(size)))


@pytest.mark.parametrize("lazy", [True, False])
def test_members_alone_may_make_a_group(run_ranks: Run, lazy: bool) -> None:
    """Law 1: a group made by its members alone upsets neither ours nor torch's own groups."""
    results = run_ranks(only_some_ranks_make_one, 4, lazy=lazy, timeout=30)
    assert results == [(3, 15), (3, 15), (12, 15), (12, 15)]


def second_world() -> list[int]:
    sums = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(len(sums)), shared_store()), **place())
        info = TPGroupInitializer(dist.get_rank(), 2, 2).init_dist_group("gloo")
        sums.append(total(info[2]))
        dist.destroy_process_group()
    return sums


def shared_store() -> dist.Store:
    return next(dist.rendezvous("env://"))[0]


def place() -> dict[str, int]:
    _, rank, world_size = next(dist.rendezvous("env://"))
    return {"rank": rank, "world_size": world_size}


def test_the_same_group_in_a_second_world(run_ranks: Run) -> None:
    assert run_ranks(second_world, 2) == [[3, 3], [3, 3]]


def share_by_factory() -> dict[str, Any]:
    dist.init_process_group("gloo")
    factory = GroupFactory("test", timedelta(seconds=7), modes_of=lambda ranks: ["X", "ONE"])
    one = factory([0, 1], "ONE", "gloo")
    return {
        "same": factory((0, 1), "TWO", "gloo") is one,
        "other order": factory([1, 0], "ONE", "gloo") is one,
        "description": one.group_desc,
        "timeout": one._get_backend(torch.device("cpu")).options._timeout,
        "sum": total(one),
    }


def test_a_factory_makes_each_rank_list_once(run_ranks: Run) -> None:
    """Law 1: equal lists share one group; the order belongs to the list."""
    for result in run_ranks(share_by_factory, 2):
        assert result == {
            "same": True,
            "other order": False,
            "description": "ONE,X",
            "timeout": timedelta(seconds=7),
            "sum": 3,
        }


# --------------------------------------------------------------------------------------------- bad input

BAD_ARGUMENTS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: DPGroupInitializer(0, 8, 3),
        "data_parallel_size=3 does not divide world_size=8; sizes that do: 1, 2, 4, 8",
    ),
    (
        lambda: TPGroupInitializer(0, 6, 4),
        "tensor_parallel_size=4 does not divide world_size=6; sizes that do: 1, 2, 3, 6",
    ),
    (
        lambda: SPGroupInitializer(0, 8, 16),
        "sequence_parallel_size=16 does not divide world_size=8; sizes that do: 1, 2, 4, 8",
    ),
    (
        lambda: InterNodeGroupInitializer(0, 8, 3),
        "local_world_size=3 does not divide world_size=8; sizes that do: 1, 2, 4, 8",
    ),
    (lambda: DPGroupInitializer(0, 8, 0), "data_parallel_size=0 must be at least 1"),
    (lambda: TPGroupInitializer(0, 8, True), "tensor_parallel_size=True is a bool; it must be an int"),
    (lambda: SPGroupInitializer(0, 8, 2.0), "sequence_parallel_size=2.0 is a float; it must be an int"),
    (lambda: TPGroupInitializer(8, 8, 2), "but the world has ranks 0 to 7"),
    (lambda: TPGroupInitializer(-1, 8, 2), "but the world has ranks 0 to 7"),
    (lambda: PairInitializer(0, 0), "world_size=0 must be at least 1"),
    (lambda: PairInitializer(True, 2), "rank=True is a bool; it must be an int"),
    (lambda: IntraNodeGroupInitializer(0, 4, []), "ranks is empty; a group has at least one rank"),
    (
        lambda: TrainDPGroupInitializer(0, 4, [0, 4]),
        "ranks=0,4 holds 4, but the world has ranks 0 to 3",
    ),
    (
        lambda: WeightTransferGroupInitializer(0, 4, [0, 1, 0]),
        "ranks=0,1,0 repeats 0; each rank may stand once",
    ),
    (
        lambda: WeightTransferGroupInitializer(3, 4, [0, -1]),
        "ranks=0,-1 holds -1, but the world has ranks 0 to 3",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD_ARGUMENTS, ids=[message for _, message in BAD_ARGUMENTS])
def test_bad_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    """Law 5: a size that does not divide, and ranks out of range, repeated or empty, are errors."""
    with pytest.raises(LayoutError, match=re.escape(message)):
        make()


def test_without_torch_distributed() -> None:
    message = "TPGroupInitializer makes a group of torch.distributed, which is not running; call Parallel"
    with pytest.raises(ContextError, match=message):
        TPGroupInitializer(0, 4, 2).init_dist_group("gloo")
    # A rank outside the group has nothing to make, so it needs no torch.distributed either.
    nothing = (None, None, None, None, "WEIGHT_TRANSFER")
    assert WeightTransferGroupInitializer(0, 4, [2, 3]).init_dist_group("gloo") == nothing


def test_an_initializer_needs_a_mode() -> None:
    with pytest.raises(LayoutError, match="NamelessInitializer has no mode; set the class attribute"):
        NamelessInitializer(0, 1).init_dist_group("gloo")


def in_a_world_of_one(kind: type[ProcessGroupInitializer], arguments: Any, backend: str) -> None:
    dist.init_process_group("gloo")
    kind(*arguments).init_dist_group(backend)


@pytest.mark.parametrize(
    ("kind", "arguments", "backend", "error", "message"),
    [
        (
            TPGroupInitializer,
            (1, 4, 2),
            "gloo",
            "LayoutError",
            "TPGroupInitializer was given rank=1 of world_size=4, but torch.distributed runs as rank 0 of 1",
        ),
        (
            WeightTransferGroupInitializer,
            (0, 2, [0]),
            "gloo",
            "LayoutError",
            "given rank=0 of world_size=2, but torch.distributed runs as rank 0 of 1",
        ),
        pytest.param(
            TPGroupInitializer,
            (0, 1, 1),
            "nccl",
            "ContextError",
            "could not make the TENSOR_PARALLEL group of ranks 0 with backend 'nccl': ",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="here nccl works"),
        ),
        pytest.param(
            TPGroupInitializer,
            (0, 1, 1),
            "ucc",
            "ContextError",
            "could not make the TENSOR_PARALLEL group of ranks 0 with backend 'ucc': ",
            marks=pytest.mark.skipif(dist.is_ucc_available(), reason="here ucc works"),
        ),
    ],
)
def test_a_group_that_cannot_be_made(
    run_ranks: Run,
    kind: type[ProcessGroupInitializer],
    arguments: Any,
    backend: str,
    error: str,
    message: str,
) -> None:
    (found,) = run_ranks(in_a_world_of_one, 1, kind, arguments, backend, expect_errors=True)
    assert found.type_name == error
    assert message in found.message
    if error == "ContextError":
        assert found.message.endswith("use backend='gloo'")


def a_failure_then_success() -> tuple[str, int]:
    """A member that fails to make a group must not shift the names of later ones."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    error = ""
    if rank == 0:
        try:
            TPGroupInitializer(rank, 2, 2).init_dist_group("ucc")
        except ContextError as raised:
            error = type(raised).__name__
    group = TPGroupInitializer(rank, 2, 2).init_dist_group("gloo")[2]
    return error, total(group)


@pytest.mark.skipif(dist.is_ucc_available(), reason="here ucc works")
def test_another_backends_failure_does_not_shift_names(run_ranks: Run) -> None:
    assert run_ranks(a_failure_then_success, 2, timeout=20) == [("ContextError", 3), ("", 3)]


def test_the_modes_are_the_seed_strings() -> None:
    assert {name: value for name, value in vars(CommMode).items() if name.isupper()} == {
        "GLOBAL": "GLOBAL",
        "INTER_NODE": "INTER_NODE",
        "INTRA_NODE": "INTRA_NODE",
    }
    assert {name: value for name, value in vars(ParallelMode).items() if name.isupper()} == {
        "DATA_PARALLEL": "DATA_PARALLEL",
        "SEQUENCE_PARALLEL": "SEQUENCE_PARALLEL",
        "TENSOR_PARALLEL": "TENSOR_PARALLEL",
        "TRAIN_DATA_PARALLEL": "TRAIN_DATA_PARALLEL",
        "WEIGHT_TRANSFER": "WEIGHT_TRANSFER",
    }
    assert issubclass(ParallelMode, CommMode)
    assert ParallelMode.GLOBAL == "GLOBAL"
