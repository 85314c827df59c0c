"""The start-up agreement, with threads for ranks and a store inside the process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rlightning_groups.agreement import Agreement, Statement, agree
from rlightning_groups.errors import AgreementError

SETTINGS = {"tensor_parallel_size": "2", "order": "tp-sp-dp"}
PATIENCE = 10.0  # far beyond what any of this takes; who is not back by then hangs


class CountingStore(dist.Store):
    """One rank's way to the common store, counting its operations and the bytes it moves."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def _count(self, call: str, *data: Any) -> None:
        self.calls[call] += 1
        self.bytes += sum(len(item) for item in data)

    def set(self, key: str, value: Any) -> None:
        self._count("set", value)
        self.store.set(key, bytes(value).decode())

    def append(self, key: str, value: Any) -> None:
        self._count("append", value)
        self.store.append(key, bytes(value).decode())

    def get(self, key: str) -> bytes:
        value = self.store.get(key)
        self._count("get", value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._count("add")
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._count("check")
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=5)) -> None:
        self._count("wait")
        self.store.wait(keys, timeout)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the name that torch's binding looks for
        self._count("delete")
        return self.store.delete_key(key)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._count("compare_set", desired)
        return self.store.compare_set(key, bytes(expected).decode(), bytes(desired).decode())

    compareSet = compare_set  # noqa: N815 - as above


def statement(node: str = "here", lists: Sequence[Sequence[int] | None] = (), **settings: str) -> Statement:
    return Statement({**SETTINGS, **settings}, node, lists)


def agree_all(
    statements: Sequence[Statement | None],
    stores: dist.Store | Sequence[dist.Store],
    timeout: float = 10.0,
    before: Callable[[int], Any] = lambda rank: None,
) -> list[Agreement | str]:
    """Each rank's agreement, or the text of its AgreementError; a rank whose statement is None stays away."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        store = stores if isinstance(stores, dist.Store) else stores[rank]
        before(rank)
        try:
            results[rank] = agree(store, rank, len(statements), statements[rank], timedelta(seconds=timeout))
        except AgreementError as error:
            results[rank] = str(error)
        except Exception as error:
            results[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True)
        for rank, said in enumerate(statements)
        if said is not None
    ]
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"hanging; the others: {results}"
    return [results.get(rank, "stayed away") for rank in range(len(statements))]


@pytest.mark.parametrize("world_size", [1, 2, 8, 32])
def test_equal_ranks_agree(world_size: int) -> None:
    store = dist.HashStore()
    for number in range(3):
        results = agree_all([statement()] * world_size, store)
        assert results == [Agreement(number, ((0, world_size),))] * world_size


@pytest.mark.parametrize(
    ("nodes", "runs"),
    [
        ("aaaa", ((0, 4),)),
        ("aaab", ((0, 3), (1, 1))),
        ("zaaa", ((0, 1), (1, 3))),
        ("abab", ((0, 1), (1, 1), (0, 1), (1, 1))),
        ("abba", ((0, 1), (1, 2), (0, 1))),
        ("bcbaac", ((0, 1), (1, 1), (0, 1), (2, 2), (1, 1))),
    ],
)
def test_nodes_are_runs_of_consecutive_ranks(nodes: str, runs: tuple[tuple[int, int], ...]) -> None:
    """Law 8: node membership comes from the ranks themselves, scattered or not."""
    results = agree_all([statement(node=node) for node in nodes], dist.HashStore())
    assert results == [Agreement(0, runs)] * len(nodes)


def measured(world_size: int) -> list[CountingStore]:
    """Each rank's traffic in a second round, which also clears away the first."""
    store = dist.HashStore()
    agree_all([statement()] * world_size, store)
    counting = [CountingStore(store) for _ in range(world_size)]
    results = agree_all([statement()] * world_size, counting)
    assert results == [Agreement(1, ((0, world_size),))] * world_size
    return counting


def test_traffic_is_linear_in_the_world() -> None:
    """Law 4: a fixed number of store operations per rank, O(world) bytes in total."""
    small, middle, large = measured(2), measured(8), measured(32)
    counts = [{sum(store.calls.values()) for store in stores} for stores in (small, middle, large)]
    assert counts[0] == counts[1] == counts[2]
    assert min(counts[0]) <= 8  # the usual rank
    assert max(counts[0]) <= 24  # the one that decides and clears away
    totals = [sum(store.bytes for store in stores) for stores in (small, middle, large)]
    assert totals[2] < 4 * 1.3 * totals[1]
    # All but the rank that decides: their own traffic does not grow either (rank numbers get longer).
    usual = [sorted(store.bytes for store in stores)[0] for stores in (small, large)]
    assert usual[1] <= usual[0] + 16


HEADER = "the ranks of this job were started with different settings:"


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {3: {"tensor_parallel_size": "4"}},
            ["  tensor_parallel_size: 2 on ranks 0-2,4-7; 4 on rank 3"],
        ),
        (
            {0: {"order": "dp-sp-tp"}, 5: {"order": "sp-tp-dp", "tensor_parallel_size": "1"}},
            [
                "  tensor_parallel_size: 2 on ranks 0-4,6-7; 1 on rank 5",
                "  order: dp-sp-tp on rank 0; tp-sp-dp on ranks 1-4,6-7; sp-tp-dp on rank 5",
            ],
        ),
        ({7: {"torch": "2.6"}}, ["  torch: (not given) on ranks 0-6; 2.6 on rank 7"]),
    ],
    ids=["one", "two", "one more"],
)
def test_ranks_that_differ_are_named(changes: dict[int, dict[str, str]], lines: list[str]) -> None:
    """Law 4: on every rank, with both values."""
    begin = time.monotonic()
    results = agree_all([statement(**changes.get(rank, {})) for rank in range(8)], dist.HashStore())
    assert time.monotonic() - begin < 5
    assert set(results) == {"\n".join([HEADER, *lines])}


def test_long_lists_of_ranks_are_cut() -> None:
    settings = [statement(order=("tp-sp-dp", "dp-sp-tp")[rank % 2]) for rank in range(40)]
    (message,) = set(agree_all(settings, dist.HashStore()))
    evens = ",".join(map(str, range(0, 32, 2)))
    odds = ",".join(map(str, range(1, 33, 2)))
    assert message == (
        f"{HEADER}\n  order: tp-sp-dp on ranks {evens},... (20 in all); "
        f"dp-sp-tp on ranks {odds},... (20 in all)"
    )


def test_a_rank_that_failed_is_told_to_all() -> None:
    """Law 4: nobody waits for a rank that cannot start."""
    statements = [statement()] * 2 + [
        Statement(SETTINGS, "here", failure="LayoutError: no"),
        Statement(SETTINGS, "here", failure="TypeError: never"),
        Statement({}, "here", failure="LayoutError: no"),
    ]
    begin = time.monotonic()
    results = agree_all(statements, dist.HashStore())
    assert time.monotonic() - begin < 5
    assert set(results) == {
        "some ranks could not start, so none of them does:\n"
        "  ranks 2,4: LayoutError: no\n"
        "  rank 3: TypeError: never"
    }


def test_all_ranks_that_failed_alike_fail() -> None:
    results = agree_all([Statement(SETTINGS, "here", failure="LayoutError: no")] * 3, dist.HashStore())
    assert set(results) == {"some ranks could not start, so none of them does:\n  ranks 0-2: LayoutError: no"}


@pytest.mark.parametrize(
    "lists",
    [
        [[[0, 1]], [[0, 1]], [[2]], [None]],
        [[[0, 1], [3, 0]], [[0, 1], None], [None, None], [None, [3, 0]]],
        [[], [], [], []],
    ],
    ids=str,
)
def test_lists_that_fit(lists: list[Any]) -> None:
    results = agree_all([statement(lists=own) for own in lists], dist.HashStore())
    assert results == [Agreement(0, ((0, 4),))] * 4


@pytest.mark.parametrize(
    ("lists", "index", "named"),
    [
        ([[[0, 1]], [None], [None], [None]], 0, "0,1 on rank 0"),
        ([[[0, 1]], [[1, 0]], [None], [None]], 0, "0,1 on rank 0; 1,0 on rank 1"),
        ([[[0]], [[0, 1]], [None], [None]], 0, "0,1 on rank 1"),
        ([[None, [0, 3]], [None, None], [None, [2]], [None, [3]]], 1, "0,3 on rank 0"),
        ([[[0, 1, 2]], [[0, 1, 2]], [[1, 2]], [None]], 0, "0,1,2 on ranks 0-1; 1,2 on rank 2"),
    ],
    ids=str,
)
def test_lists_that_do_not_fit(lists: list[Any], index: int, named: str) -> None:
    """Law 4: an extra group is planned with the same list by each of its members."""
    (message,) = set(agree_all([statement(lists=own) for own in lists], dist.HashStore()))
    assert isinstance(message, str)
    assert message.startswith(f"extra group number {index} is planned with different ranks")
    assert named in message


def test_missing_ranks_are_named() -> None:
    """Law 4: no hang; whoever did not come within the timeout is named."""
    begin = time.monotonic()
    results = agree_all([statement(), None, None, statement(), None], dist.HashStore(), timeout=0.5)
    assert 0.5 <= time.monotonic() - begin < 5
    message = (
        "ranks 1-2,4 did not call initialize within 0.5 s; 2 of 5 did. Start every rank, and see whether one "
        "of them ended with an error of its own"
    )
    assert results == [message, "stayed away", "stayed away", message, "stayed away"]


def test_the_shortest_timeout_is_one() -> None:
    """To torch's stores a wait of 0 ms has no end."""
    results = agree_all([statement(), None], dist.HashStore(), timeout=0.0001)
    assert str(results[0]).startswith("rank 1 did not call initialize within")


def test_who_came_in_vain_counts_for_nothing() -> None:
    """After a round in which a rank was missing, the next one in which all come succeeds."""
    store = dist.HashStore()
    agree_all([statement(), statement(), None], store, timeout=0.3)
    results = agree_all([statement()] * 3, store, timeout=3)
    assert all(isinstance(result, Agreement) for result in results), results
    assert len(set(results)) == 1


def test_who_comes_too_late_does_not_go_on_alone() -> None:
    """The ranks that gave up have gone; the late one must not believe that all agreed."""
    store = dist.HashStore()
    delays = {2: 1.0}
    results = agree_all(
        [statement()] * 3, store, timeout=0.4, before=lambda rank: time.sleep(delays.get(rank, 0))
    )
    assert [isinstance(result, str) for result in results] == [True, True, True], results


def test_a_failed_round_is_over_for_the_next() -> None:
    store = dist.HashStore()
    agree_all([statement(), statement(order="dp-sp-tp")], store)
    assert agree_all([statement(order="dp-sp-tp")] * 2, store) == [Agreement(1, ((0, 2),))] * 2


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_store_does_not_fill_up(world_size: int) -> None:
    """Twenty rounds, every third of them failing, leave no more keys than the first few."""
    store = dist.HashStore()
    keys = []
    for number in range(20):
        odd = {"order": "dp-sp-tp"} if number % 3 == 0 and world_size > 1 else {}
        agree_all([statement(**odd), *[statement()] * (world_size - 1)], store)
        keys.append(store.num_keys())
    assert max(keys[4:]) <= max(keys[1:4])
    assert keys[-1] <= 8


def test_other_keys_of_the_store_are_left_alone() -> None:
    store = dist.HashStore()
    store.set("verdict", "mine")
    store.set("records", "mine too")
    agree_all([statement()] * 2, store)
    assert (store.get("verdict"), store.get("records")) == (b"mine", b"mine too")
