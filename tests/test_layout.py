"""The layout against published tables, literal tables and a layout counted out rank by rank."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlightning_groups import CommMode, GroupsError, LayoutError, ParallelLayout, ParallelMode
from rlightning_groups.layout import check_ranks, check_size

CASES = json.loads((Path(__file__).parent / "cases" / "rank_groups.json").read_text())["cases"]
TOKENS = {"tp": "tensor", "sp": "sequence", "dp": "data"}
MAX_WORLD = 4096
Sizes = dict[str, int]


# ------------------------------------------------------------------------------------------ given tables


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["from"])
def test_published_tables(case: dict[str, Any]) -> None:
    layout = ParallelLayout(
        case["world_size"],
        tensor_parallel_size=case["tensor_parallel_size"],
        sequence_parallel_size=case["sequence_parallel_size"],
        order=case["order"],
    )
    assert case["groups"]
    assert {mode: layout.groups(mode) for mode in case["groups"]} == case["groups"]


def test_default_order_at_eight_ranks() -> None:
    """World rank = (d * sp + s) * tp + t: the table of the documentation."""
    layout = ParallelLayout(8, tensor_parallel_size=2, sequence_parallel_size=2)
    assert {mode: layout.groups(mode) for mode in layout.modes} == {
        "GLOBAL": [[0, 1, 2, 3, 4, 5, 6, 7]],
        "INTRA_NODE": [[0, 1, 2, 3, 4, 5, 6, 7]],
        "INTER_NODE": [[0], [1], [2], [3], [4], [5], [6], [7]],
        "TRAIN_DATA_PARALLEL": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "DATA_PARALLEL": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "SEQUENCE_PARALLEL": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "TENSOR_PARALLEL": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    assert layout.sizes == {"data": 2, "sequence": 2, "tensor": 2}
    assert layout.axes == ("tensor", "sequence", "data")
    assert [tuple(layout.coordinates(rank).values()) for rank in range(8)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]


def test_the_slowest_axis_may_be_tensor() -> None:
    layout = ParallelLayout(8, tensor_parallel_size=2, sequence_parallel_size=2, order="dp-sp-tp")
    assert layout.groups(ParallelMode.DATA_PARALLEL) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups(ParallelMode.SEQUENCE_PARALLEL) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups(ParallelMode.TENSOR_PARALLEL) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups(ParallelMode.TRAIN_DATA_PARALLEL) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.axes_of(ParallelMode.TRAIN_DATA_PARALLEL) == ("sequence", "data")


def test_an_extra_axis_and_a_composed_mode() -> None:
    layout = ParallelLayout(
        8,
        tensor_parallel_size=2,
        order="tp-sp-pipeline-dp",
        extra_axes={"pipeline": 2},
        composed={"MODEL_PARALLEL": ("tensor", "pipeline"), "REPLICAS": "data"},
    )
    assert {mode: layout.groups(mode) for mode in layout.modes} == {
        "GLOBAL": [[0, 1, 2, 3, 4, 5, 6, 7]],
        "INTRA_NODE": [[0, 1, 2, 3, 4, 5, 6, 7]],
        "INTER_NODE": [[0], [1], [2], [3], [4], [5], [6], [7]],
        "TRAIN_DATA_PARALLEL": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "DATA_PARALLEL": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "SEQUENCE_PARALLEL": [[0], [1], [2], [3], [4], [5], [6], [7]],
        "TENSOR_PARALLEL": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "PIPELINE": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "MODEL_PARALLEL": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "REPLICAS": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    assert layout.axes == ("tensor", "sequence", "pipeline", "data")
    assert layout.coordinates(6) == {"data": 1, "sequence": 0, "tensor": 0, "pipeline": 1}
    assert layout.rank(data=1, pipeline=1, tensor=0) == 6
    assert layout.axes_of("MODEL_PARALLEL") == ("pipeline", "tensor")
    assert layout.ranks_in_group("MODEL_PARALLEL", 6) == [4, 5, 6, 7]


# --------------------------------------------------------------------------------------------- the nodes


@pytest.mark.parametrize(
    ("nodes", "intra", "inter"),
    [
        ({}, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
        ({"node_sizes": [2, 2]}, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ({"node_sizes": [3, 1]}, [[0, 1, 2], [3]], [[0, 3], [1], [2]]),
        ({"node_sizes": [1, 3]}, [[0], [1, 2, 3]], [[0, 1], [2], [3]]),
        ({"node_sizes": [5, 3]}, [[0, 1, 2, 3, 4], [5, 6, 7]], [[0, 5], [1, 6], [2, 7], [3], [4]]),
        (
            {"node_sizes": [1, 3, 2]},
            [[0], [1, 2, 3], [4, 5]],
            [[0, 1, 4], [2, 5], [3]],
        ),
        ({"node_of_rank": [0, 1, 0, 1]}, [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        ({"node_of_rank": [1, 0, 0, 1, 0]}, [[0, 3], [1, 2, 4]], [[0, 1], [2, 3], [4]]),
    ],
    ids=str,
)
def test_node_groups(nodes: dict[str, list[int]], intra: list[list[int]], inter: list[list[int]]) -> None:
    """INTRA_NODE is one node; INTER_NODE the same local rank on every node that has it."""
    layout = ParallelLayout(sum(map(len, intra)), **nodes)
    assert layout.groups(CommMode.INTRA_NODE) == intra
    assert layout.groups(CommMode.INTER_NODE) == inter
    assert layout.node_count == len(intra)
    for group in intra:
        assert len({layout.node(rank) for rank in group}) == 1
        assert [layout.node_local_rank(rank) for rank in group] == list(range(len(group)))
    for group in intra + inter:
        mode = CommMode.INTRA_NODE if group in intra else CommMode.INTER_NODE
        assert all(layout.ranks_in_group(mode, rank) == group for rank in group)


def test_scattered_nodes_keep_their_numbers() -> None:
    layout = ParallelLayout(5, node_of_rank=[1, 0, 0, 1, 0])
    assert [layout.node(rank) for rank in range(5)] == [1, 0, 0, 1, 0]
    assert [layout.node_local_rank(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert layout.node_sizes == (3, 2)


def test_consecutive_nodes_are_the_same_layout_however_they_are_given() -> None:
    by_rank = ParallelLayout(4, node_of_rank=[0, 0, 0, 1])
    by_size = ParallelLayout(4, node_sizes=[3, 1])
    assert by_rank == by_size
    assert hash(by_rank) == hash(by_size)
    assert by_rank.node_of_rank is None
    assert by_rank.node_sizes == (3, 1)
    assert ParallelLayout(4).node_sizes == (4,)


# ------------------------------------------------------------------------ any layout, counted out by hand


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ParallelLayout, list[str], Sizes]:
    """A layout, its axes from fastest to slowest, and their sizes."""
    extra = [f"axis_{index}" for index in range(draw(st.integers(0, 2)))]
    sizes, room = {}, MAX_WORLD
    for axis in draw(st.permutations(["tensor", "sequence", "data", *extra])):
        sizes[axis] = draw(st.one_of(st.integers(1, min(room, 8)), st.integers(1, room)))
        room //= sizes[axis]
    order = draw(st.permutations([*TOKENS, *extra]))
    world = math.prod(sizes.values())
    node_sizes, left = [], world
    while left:
        node_sizes.append(left if len(node_sizes) == 5 else draw(st.integers(1, left)))
        left -= node_sizes[-1]
    layout = ParallelLayout(
        world,
        tensor_parallel_size=sizes["tensor"],
        sequence_parallel_size=sizes["sequence"],
        data_parallel_size=draw(st.sampled_from([None, sizes["data"]])),
        order="-".join(order),
        node_sizes=node_sizes,
        extra_axes={axis: sizes[axis] for axis in extra},
    )
    return layout, [TOKENS.get(token, token) for token in order], sizes


def count_out(axes: list[str], sizes: Sizes) -> list[Sizes]:
    """The coordinates of rank 0, 1, 2, ...: the first axis counts fastest."""
    slowest_first = axes[::-1]
    places = itertools.product(*(range(sizes[axis]) for axis in slowest_first))
    return [dict(zip(slowest_first, place, strict=True)) for place in places]


def some_ranks(world: int) -> list[int]:
    return sorted({0, 1 % world, world // 3, world // 2, world - 1})


SMALL = (ParallelLayout(6, 3), ["tensor", "sequence", "data"], {"tensor": 3, "sequence": 1, "data": 2})


@settings(max_examples=25)
@given(layouts())
@example(SMALL)
def test_every_mode_is_the_ranks_equal_on_all_other_axes(
    drawn: tuple[ParallelLayout, list[str], Sizes],
) -> None:
    """TRAIN_DATA_PARALLEL is data x sequence; each other axis mode moves along its own axis alone."""
    layout, axes, sizes = drawn
    places = count_out(axes, sizes)
    spans = {
        ParallelMode.GLOBAL: set(axes),
        ParallelMode.TRAIN_DATA_PARALLEL: {"data", "sequence"},
        ParallelMode.DATA_PARALLEL: {"data"},
        ParallelMode.SEQUENCE_PARALLEL: {"sequence"},
        ParallelMode.TENSOR_PARALLEL: {"tensor"},
        **{axis.upper(): {axis} for axis in axes if axis.startswith("axis_")},
    }
    assert set(layout.modes) == {*spans, CommMode.INTRA_NODE, CommMode.INTER_NODE}
    for mode, span in spans.items():
        expected: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            expected.setdefault(tuple(place[a] for a in axes if a not in span), []).append(rank)
        assert layout.groups(mode) == sorted(expected.values())
        assert set(layout.axes_of(mode)) == span


@settings(max_examples=25)
@given(layouts())
@example(SMALL)
def test_groups_partition_the_world_and_agree_with_ranks_in_group(
    drawn: tuple[ParallelLayout, list[str], Sizes],
) -> None:
    layout, _, _ = drawn
    for mode in layout.modes:
        groups = layout.groups(mode)
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(layout.world_size))
        assert groups == sorted(sorted(group) for group in groups)
        home = {rank: group for group in groups for rank in group}
        assert all(layout.ranks_in_group(mode, r) == home[r] for r in some_ranks(layout.world_size))


@given(layouts())
def test_coordinates_and_rank_invert_each_other(drawn: tuple[ParallelLayout, list[str], Sizes]) -> None:
    layout, axes, sizes = drawn
    places = count_out(axes, sizes)
    for rank in some_ranks(layout.world_size):
        assert layout.coordinates(rank) == places[rank]
        assert layout.rank(**places[rank]) == rank
        assert layout.rank(**{a: i for a, i in places[rank].items() if sizes[a] > 1}) == rank


@given(layouts())
def test_one_group_per_axis_meets_in_the_rank_itself(drawn: tuple[ParallelLayout, list[str], Sizes]) -> None:
    layout, axes, _ = drawn
    modes = ["TENSOR_PARALLEL", "SEQUENCE_PARALLEL", "DATA_PARALLEL"]
    modes += [axis.upper() for axis in axes if axis.startswith("axis_")]
    for rank in some_ranks(layout.world_size):
        groups = [set(layout.ranks_in_group(mode, rank)) for mode in modes]
        assert all(one & other == {rank} for one, other in itertools.combinations(groups, 2))
        assert math.prod(map(len, groups)) == layout.world_size


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200))
def test_scattered_nodes(raw: list[int]) -> None:
    """Node groups hold ranks of one node each; across nodes, equal places meet."""
    numbers = {node: index for index, node in enumerate(sorted(set(raw)))}
    nodes = [numbers[node] for node in raw]
    layout = ParallelLayout(len(nodes), node_of_rank=nodes)
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    across: dict[int, list[int]] = {}
    for ranks in members.values():
        for place, rank in enumerate(ranks):
            across.setdefault(place, []).append(rank)
    assert layout.groups(CommMode.INTRA_NODE) == sorted(members.values())
    assert layout.groups(CommMode.INTER_NODE) == sorted(sorted(ranks) for ranks in across.values())
    for rank, node in enumerate(nodes):
        place = members[node].index(rank)
        assert (layout.node(rank), layout.node_local_rank(rank)) == (node, place)
        assert layout.ranks_in_group(CommMode.INTRA_NODE, rank) == members[node]
        assert layout.ranks_in_group(CommMode.INTER_NODE, rank) == sorted(across[place])


def test_a_rank_of_a_huge_world_is_asked_at_the_price_of_its_group() -> None:
    """Law 1: every rank knows its own groups by arithmetic, whatever the world size."""
    layout = ParallelLayout(2**40, tensor_parallel_size=8, data_parallel_size=2, sequence_parallel_size=2**36)
    last = 2**40 - 1
    assert layout.ranks_in_group(ParallelMode.TENSOR_PARALLEL, last) == list(range(2**40 - 8, 2**40))
    assert layout.ranks_in_group(ParallelMode.DATA_PARALLEL, last) == [2**39 - 1, last]
    assert layout.coordinates(last) == {"data": 1, "sequence": 2**36 - 1, "tensor": 7}


# ------------------------------------------------------------------------------------------- as an object

FULL: dict[str, Any] = {
    "world_size": 16,
    "tensor_parallel_size": 2,
    "sequence_parallel_size": 2,
    "order": "sp-pipeline-tp-dp",
    "extra_axes": {"pipeline": 2},
    "composed": {"MODEL_PARALLEL": ("tensor", "pipeline")},
}


@pytest.mark.parametrize(
    "arguments",
    [
        {"world_size": 8, "tensor_parallel_size": 2},
        {**FULL, "node_sizes": [10, 6]},
        {**FULL, "node_of_rank": [0, 1] * 8},
    ],
    ids=["plain", "unequal nodes", "scattered nodes"],
)
def test_copies_equal_the_original(arguments: dict[str, Any]) -> None:
    layout = ParallelLayout(**arguments)
    layout.groups("TENSOR_PARALLEL")  # what was worked out once must not disturb the copies
    copies = [
        ParallelLayout(**arguments),
        pickle.loads(pickle.dumps(layout)),
        copy.copy(layout),
        copy.deepcopy(layout),
        dataclasses.replace(layout),
    ]
    for other in copies:
        assert other == layout
        assert hash(other) == hash(layout)
        assert {m: other.groups(m) for m in other.modes} == {m: layout.groups(m) for m in layout.modes}
        assert other.node_sizes == layout.node_sizes
    assert len({layout, *copies}) == 1


def test_a_size_left_open_equals_the_same_size_spelled_out() -> None:
    assert ParallelLayout(8, 2) == ParallelLayout(8, 2, 1, 4)
    assert ParallelLayout(8, 2).data_parallel_size == 4


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 32},
        {"tensor_parallel_size": 1},
        {"sequence_parallel_size": 1},
        {"order": "pipeline-sp-tp-dp"},
        {"node_sizes": [8, 8]},
        {"node_of_rank": [0, 1] * 8},
        {"extra_axes": {"pipeline": 4}},
        {"composed": {}},
    ],
    ids=str,
)
def test_whatever_differs_makes_another_layout(change: dict[str, Any]) -> None:
    assert ParallelLayout(**FULL) != ParallelLayout(**{**FULL, **change})


def test_nothing_in_it_can_be_changed() -> None:
    sizes, axes, composed = [8, 8], {"pipeline": 2}, {"MODEL_PARALLEL": ["tensor", "pipeline"]}
    layout = ParallelLayout(**{**FULL, "extra_axes": axes, "composed": composed, "node_sizes": sizes})
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.tensor_parallel_size = 4  # type: ignore[misc]
    for mapping in (layout.sizes, layout.extra_axes, layout.composed):
        with pytest.raises(TypeError):
            mapping["pipeline"] = 4  # type: ignore[index]
    layout.groups("TENSOR_PARALLEL").clear()
    layout.coordinates(0).clear()
    sizes.append(1)
    axes["pipeline"] = 4
    composed["MODEL_PARALLEL"].append("data")
    assert layout == ParallelLayout(**FULL, node_sizes=[8, 8])
    assert len(layout.groups("TENSOR_PARALLEL")) == 8


def test_any_integer_type_is_a_size() -> None:
    class Eight:
        def __index__(self) -> int:
            return 8

    assert ParallelLayout(Eight()) == ParallelLayout(8)  # type: ignore[arg-type]
    assert ParallelLayout(16).node(Eight()) == 0  # type: ignore[arg-type]


def test_it_describes_itself() -> None:
    layout = ParallelLayout(8, tensor_parallel_size=2, sequence_parallel_size=2, node_sizes=[5, 3])
    assert layout.describe(max_groups=2).splitlines() == [
        "8 ranks = data 2 x sequence 2 x tensor 2, order tp-sp-dp, 2 nodes",
        "mode                 size  groups",
        "GLOBAL               8     0,1,2,3,4,5,6,7",
        "INTRA_NODE           3-5   0,1,2,3,4  5,6,7",
        "INTER_NODE           1-2   0,5  1,6  ... 3 more",
        "TRAIN_DATA_PARALLEL  4     0,2,4,6  1,3,5,7",
        "DATA_PARALLEL        2     0,4  1,5  ... 2 more",
        "SEQUENCE_PARALLEL    2     0,2  1,3  ... 2 more",
        "TENSOR_PARALLEL      2     0,1  2,3  ... 2 more",
    ]
    assert str(layout) == "8 ranks = data 2 x sequence 2 x tensor 2, order tp-sp-dp, 2 nodes"
    wide = ParallelLayout(64).describe().splitlines()
    assert wide[2] == "GLOBAL               64    0,1,2,3,4,5,6,7,...(64 in all)...,63"


# --------------------------------------------------------------------------------------------- bad input

BAD_LAYOUTS: list[tuple[dict[str, Any], str]] = [
    # Sizes that do not fit (law 5: never floor-divide a rank away).
    (
        {"world_size": 8, "tensor_parallel_size": 3},
        "tensor_parallel_size=3 does not divide world_size=8; sizes that do: 1, 2, 4, 8",
    ),
    (
        {"world_size": 12, "sequence_parallel_size": 5},
        "sequence_parallel_size=5 does not divide world_size=12; sizes that do: 1, 2, 3, 4, 6, 12",
    ),
    (
        {"world_size": 4, "tensor_parallel_size": 8},
        "tensor_parallel_size=8 does not divide world_size=4; sizes that do: 1, 2, 4",
    ),
    (
        {"world_size": 6, "data_parallel_size": 4},
        "data_parallel_size=4 does not divide world_size=6; sizes that do: 1, 2, 3, 6",
    ),
    (
        {"world_size": 8, "tensor_parallel_size": 4, "sequence_parallel_size": 4},
        "tensor_parallel_size=4 x sequence_parallel_size=4 = 16 does not divide world_size=8; products that "
        "do: 1, 2, 4, 8",
    ),
    (
        {"world_size": 8, "tensor_parallel_size": 2, "data_parallel_size": 2},
        "tensor_parallel_size=2 x data_parallel_size=2 = 4 is not world_size=8; with the other sizes, "
        "data_parallel_size=4 would",
    ),
    (
        {"world_size": 8, "data_parallel_size": 1},
        "is not world_size=8; with the other sizes, data_parallel_size=8 would",
    ),
    (
        {
            "world_size": 8,
            "tensor_parallel_size": 4,
            "sequence_parallel_size": 4,
            "data_parallel_size": 2,
        },
        "tensor_parallel_size=4 x sequence_parallel_size=4 x data_parallel_size=2 = 32 is not world_size=8; "
        "the sizes besides data_parallel_size must multiply to one of 1, 2, 4, 8",
    ),
    (
        {"world_size": 8, "extra_axes": {"pipeline": 3}, "order": "tp-sp-pipeline-dp"},
        "extra_axes['pipeline']=3 does not divide world_size=8; sizes that do: 1, 2, 4, 8",
    ),
    # Sizes that are none.
    ({"world_size": 0}, "world_size=0 must be at least 1"),
    ({"world_size": -8}, "world_size=-8 must be at least 1"),
    ({"world_size": True}, "world_size=True is a bool; it must be an int"),
    ({"world_size": 8.0}, "world_size=8.0 is a float; it must be an int"),
    ({"world_size": "8"}, "world_size='8' is a str; it must be an int"),
    ({"world_size": None}, "world_size=None is a NoneType; it must be an int"),
    ({"world_size": 8, "tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
    ({"world_size": 8, "sequence_parallel_size": -1}, "sequence_parallel_size=-1 must be at least 1"),
    ({"world_size": 8, "data_parallel_size": 0}, "data_parallel_size=0 must be at least 1"),
    ({"world_size": 8, "tensor_parallel_size": True}, "tensor_parallel_size=True is a bool"),
    ({"world_size": 8, "sequence_parallel_size": 2.0}, "sequence_parallel_size=2.0 is a float"),
    ({"world_size": 8, "data_parallel_size": "2"}, "data_parallel_size='2' is a str"),
    ({"world_size": 8, "extra_axes": {"pipeline": 0}}, "extra_axes['pipeline']=0 must be at least 1"),
    ({"world_size": 8, "extra_axes": {"pipeline": True}}, "extra_axes['pipeline']=True is a bool"),
    ({"world_size": 8, "extra_axes": ["pipeline"]}, "extra_axes"),
    # Orders.
    (
        {"world_size": 8, "order": "tp-dp"},
        "order='tp-dp' must name each of tp, sp, dp exactly once, fastest first, joined by '-'; for example "
        "'tp-sp-dp'",
    ),
    (
        {"world_size": 8, "extra_axes": {"pipeline": 2}},
        "order='tp-sp-dp' must name each of tp, sp, dp, pipeline exactly once, fastest first, joined by "
        "'-'; for example 'tp-sp-pipeline-dp'",
    ),
    ({"world_size": 8, "order": "tp-tp-sp-dp"}, "order='tp-tp-sp-dp' must name each of tp, sp, dp"),
    ({"world_size": 8, "order": "tp-sp-dp-pp"}, "order='tp-sp-dp-pp' must name each of tp, sp, dp"),
    ({"world_size": 8, "order": "TP-SP-DP"}, "order='TP-SP-DP' must name each of tp, sp, dp"),
    ({"world_size": 8, "order": "tensor-sequence-data"}, "must name each of tp, sp, dp exactly once"),
    ({"world_size": 8, "order": ""}, "order='' must name each of tp, sp, dp"),
    ({"world_size": 8, "order": ["tp", "sp", "dp"]}, "order=['tp', 'sp', 'dp'] must name each of"),
    ({"world_size": 8, "order": None}, "order=None must name each of tp, sp, dp"),
    # Nodes.
    ({"world_size": 8, "node_sizes": [4, 3]}, "node_sizes 4,3 add up to 7, not to world_size=8"),
    ({"world_size": 8, "node_sizes": []}, "add up to 0, not to world_size=8"),
    ({"world_size": 8, "node_sizes": [8, 0]}, "node_sizes=0 must be at least 1"),
    ({"world_size": 8, "node_sizes": [9, -1]}, "node_sizes=-1 must be at least 1"),
    ({"world_size": 8, "node_sizes": [4.0, 4]}, "node_sizes=4.0 is a float; it must be an int"),
    ({"world_size": 8, "node_sizes": [True, 7]}, "node_sizes=True is a bool; it must be an int"),
    ({"world_size": 8, "node_sizes": 4}, "node_sizes must list the number of ranks of each node, got 4"),
    ({"world_size": 8, "node_sizes": "44"}, "node_sizes must list the number of ranks of each node, got"),
    ({"world_size": 4, "node_of_rank": [0, 0, 1]}, "node_of_rank must give each of the 4 ranks a node"),
    ({"world_size": 4, "node_of_rank": [0, 2, 0, 2]}, "counted from 0 without gaps, got 0,2,0,2"),
    ({"world_size": 4, "node_of_rank": [1, 2, 1, 2]}, "counted from 0 without gaps, got 1,2,1,2"),
    ({"world_size": 4, "node_of_rank": ["a", "b", "a", "b"]}, "node_of_rank"),
    ({"world_size": 4, "node_of_rank": [0.0, 1.0, 0.0, 1.0]}, "node_of_rank"),
    ({"world_size": 4, "node_of_rank": [False, True, False, True]}, "node_of_rank"),
    ({"world_size": 4, "node_of_rank": 0}, "node_of_rank"),
    (
        {"world_size": 4, "node_of_rank": [0, 1, 0, 1], "node_sizes": [1, 3]},
        "were both given; give one of them",
    ),
    # Names.
    (
        {"world_size": 8, "extra_axes": {"tensor": 2}},
        "extra axis 'tensor' must be a lower-case identifier other than data, dp, sequence, sp, tensor, tp",
    ),
    ({"world_size": 8, "extra_axes": {"tp": 2}}, "extra axis 'tp' must be a lower-case identifier"),
    ({"world_size": 8, "extra_axes": {"Pipeline": 2}}, "extra axis 'Pipeline' must be a lower-case"),
    ({"world_size": 8, "extra_axes": {"pipe-line": 2}}, "extra axis 'pipe-line' must be a lower-case"),
    ({"world_size": 8, "extra_axes": {"": 2}}, "extra axis '' must be a lower-case identifier"),
    ({"world_size": 8, "extra_axes": {2: 2}}, "extra axis 2 must be a lower-case identifier"),
    (
        {"world_size": 8, "extra_axes": {"weight_transfer": 2}},
        "extra axis 'weight_transfer' would take the built-in mode WEIGHT_TRANSFER; choose another name",
    ),
    ({"world_size": 8, "extra_axes": {"global": 2}}, "would take the built-in mode GLOBAL"),
    (
        {"world_size": 8, "composed": {"DATA_PARALLEL": ("data",)}},
        "composed mode 'DATA_PARALLEL' must be a new name; taken are DATA_PARALLEL, GLOBAL, INTER_NODE",
    ),
    ({"world_size": 8, "composed": {"WEIGHT_TRANSFER": ("data",)}}, "must be a new name"),
    ({"world_size": 8, "composed": {"": ("data",)}}, "composed mode '' must be a new name"),
    ({"world_size": 8, "composed": {1: ("data",)}}, "composed mode 1 must be a new name"),
    (
        {**FULL, "composed": {"PIPELINE": ("tensor",)}},
        "composed mode 'PIPELINE' must be a new name",
    ),
    (
        {"world_size": 8, "composed": {"MODEL": ("tensor", "pipeline")}},
        "composed['MODEL']=('tensor', 'pipeline') must name different axes out of tensor, sequence, data",
    ),
    ({"world_size": 8, "composed": {"MODEL": ("tp",)}}, "must name different axes out of tensor"),
    ({"world_size": 8, "composed": {"MODEL": ("tensor", "tensor")}}, "must name different axes out of"),
    ({"world_size": 8, "composed": {"MODEL": ()}}, "composed['MODEL']=() must name different axes out of"),
    ({"world_size": 8, "composed": {"MODEL": 3}}, "composed"),
    ({"world_size": 8, "composed": ["MODEL"]}, "composed"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_LAYOUTS, ids=[str(bad) for bad, _ in BAD_LAYOUTS])
def test_a_bad_layout_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Law 5: what does not fit is an error that says what would."""
    with pytest.raises(LayoutError, match=re.escape(message)):
        ParallelLayout(**arguments)


def test_a_layout_error_is_a_value_error() -> None:
    assert issubclass(LayoutError, ValueError)
    assert issubclass(LayoutError, GroupsError)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (8, "rank=8 is out of range; the world has ranks 0 to 7"),
        (-1, "rank=-1 is out of range; the world has ranks 0 to 7"),
        (True, "rank=True is a bool; it must be an int"),
        (1.0, "rank=1.0 is a float; it must be an int"),
        ("1", "rank='1' is a str; it must be an int"),
    ],
)
@pytest.mark.parametrize("scattered", [False, True])
def test_a_rank_outside_the_world_is_refused(rank: Any, message: str, scattered: bool) -> None:
    """Law 5: ranks out of range are errors."""
    layout = ParallelLayout(8, 2, node_of_rank=[0, 1] * 4 if scattered else None)
    calls = [
        layout.coordinates,
        layout.node,
        layout.node_local_rank,
        *(lambda r, m=mode: layout.ranks_in_group(m, r) for mode in layout.modes),
    ]
    for call in calls:
        with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
            call(rank)


@pytest.mark.parametrize("mode", ["WEIGHT_TRANSFER", "tensor_parallel", "", None, 3])
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    """WEIGHT_TRANSFER is given by ranks, so no layout has it."""
    layout = ParallelLayout(8)
    message = (
        f"^the layout has no mode {mode!r}; its modes are GLOBAL, INTRA_NODE, INTER_NODE, "
        "TRAIN_DATA_PARALLEL, DATA_PARALLEL, SEQUENCE_PARALLEL, TENSOR_PARALLEL$"
    )
    for call in (layout.groups, layout.axes_of, lambda m: layout.ranks_in_group(m, 0)):
        with pytest.raises(LayoutError, match=message):
            call(mode)


@pytest.mark.parametrize(
    ("coordinates", "message"),
    [
        ({}, "missing: data, tensor, unknown: none"),
        ({"data": 0}, "missing: tensor, unknown: none"),
        ({"data": 0, "tensor": 0, "pipeline": 0}, "missing: none, unknown: pipeline"),
        ({"data": 4, "tensor": 0}, "data=4 is out of range; the axis goes from 0 to 3"),
        ({"data": 0, "tensor": -1}, "tensor=-1 is out of range; the axis goes from 0 to 1"),
        ({"data": 0, "tensor": 0, "sequence": 1}, "sequence=1 is out of range; the axis goes from 0 to 0"),
        ({"data": True, "tensor": 0}, "data=True is a bool; it must be an int"),
    ],
)
def test_bad_coordinates_are_refused(coordinates: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ParallelLayout(8, tensor_parallel_size=2).rank(**coordinates)


def test_any_legal_axis_name_works_as_a_coordinate() -> None:
    layout = ParallelLayout(4, extra_axes={"self": 2}, order="self-tp-sp-dp")
    assert [layout.rank(**layout.coordinates(rank)) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "ranks is empty; a group has at least one rank"),
        ([0, 4, 9], "ranks=0,4,9 holds 9, but the world has ranks 0 to 7"),
        ([0, -1, 9], "ranks=0,-1,9 holds -1,9, but the world has ranks 0 to 7"),
        ([0, 1, 0, 1, 2], "ranks=0,1,0,1,2 repeats 0,1; each rank may stand once"),
        ([0, True], "ranks=True is a bool; it must be an int"),
        ([0, 1.0], "ranks=1.0 is a float; it must be an int"),
        ([0, None], "ranks=None is a NoneType; it must be an int"),
        ("01", "ranks must be a list of world ranks, got '01'"),
        (3, "ranks must be a list of world ranks, got 3"),
    ],
)
def test_bad_rank_lists_are_refused(ranks: Any, message: str) -> None:
    """Law 5: ranks out of range, repeated or empty are errors."""
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        check_ranks(ranks, 8)


def test_a_rank_list_keeps_its_order() -> None:
    """Law 5: a rank list given out of order keeps its order."""
    assert check_ranks((7, 0, 3), 8) == [7, 0, 3]
    assert check_ranks(range(3), 8) == [0, 1, 2]


def test_a_size_may_be_checked_without_a_world() -> None:
    assert check_size("heads", 6) == 6
    with pytest.raises(LayoutError, match=r"^heads=6 does not divide world_size=8; sizes that do: 1, 2, 4"):
        check_size("heads", 6, 8)
