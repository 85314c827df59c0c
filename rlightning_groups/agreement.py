"""Before any group exists, all ranks compare what they were asked for.

The ranks talk through the rendezvous store only. Each rank does a fixed number of store operations, so
the whole comparison costs O(world) however many ranks there are, and the last rank to arrive decides, so
nobody waits for a rank that does nothing but collect.

What a rank was asked for travels as a digest; the text behind a digest is stored once per distinct
answer. A healthy job of any size therefore stores it once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError

from rlightning_groups._torch_compat import PrefixStore, Store
from rlightning_groups.errors import AgreementError

_PREFIX = "rlightning_groups/agreement"
_FAILURE = "failed before it could say"
_SHOWN_RANKS = 16
_LEAVING_SECONDS = 2.0
# (rank, digest of its settings, node, [digest, length, text] of each extra group's list)
_Record = tuple[int, str, str, Sequence[Sequence[Any] | None]]


@dataclass(frozen=True)
class Statement:
    """What one rank was asked for.

    Attributes:
        settings: everything that must be equal on all ranks, name to printed value.
        node: name of the node this rank runs on; ranks with equal names share a node.
        lists: for each extra group, the ranks this rank plans it with, or ``None`` outside of it.
        failure: why this rank cannot go on, if it cannot; all ranks then end with this text.
    """

    settings: Mapping[str, str]
    node: str
    lists: Sequence[Sequence[int] | None] = ()
    failure: str | None = None


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on.

    Attributes:
        round: how many rounds, failed ones included, this store has seen before; names made from it are new.
        nodes: runs of (node, number of consecutive ranks on it), nodes counted from 0.
    """

    round: int
    nodes: tuple[tuple[int, int], ...]


def agree(
    store: Store,
    rank: int,
    world_size: int,
    statement: Statement,
    timeout: timedelta,
    call: str = "initialize",
    members: Sequence[int] | None = None,
) -> Agreement:
    """Compare this rank's statement with the other ranks'; every rank of the world, or of a group, calls it.

    Args:
        store: a store that all ranks share.
        rank: this process's world rank.
        world_size: number of processes that take part.
        statement: what this rank was asked for.
        timeout: how long to wait for ranks that have not called.
        call: what the ranks call, for the message.
        members: world ranks of those that take part, where these are not all; the store is theirs alone.

    Returns:
        The agreement, equal on all ranks.

    Raises:
        AgreementError: ranks differ, a rank failed, or a rank did not come within ``timeout``. The message
            is the same on all ranks and names the ranks and both values.
    """
    store = PrefixStore(_PREFIX, store)
    deadline = time.monotonic() + timeout.total_seconds()
    round_ = store.add("round", 0)
    here = PrefixStore(str(round_), store)

    said = dict(statement.settings)
    if statement.failure is not None:
        said = {_FAILURE: statement.failure}
    text = json.dumps(said)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    here.set(f"settings/{digest}", text)
    lists = [
        None if ranks is None else [_digest(ranks), len(ranks), _short(ranks)] for ranks in statement.lists
    ]
    record = json.dumps([rank, digest, statement.node, lists])
    here.append("records", record + "\n")  # type: ignore[attr-defined]  # missing from torch's stubs

    if here.add("recorded", 1) == world_size:
        _decide(store, round_, lambda records: _judge(here, records))
        if round_:
            # Every rank has read the last round's verdict, or it would not be in this one.
            for key in ("decided", "verdict", "left"):
                PrefixStore(str(round_ - 1), store).delete_key(key)
    try:
        # A wait of less than a millisecond is taken for one without end.
        here.wait(["verdict"], max(timedelta(milliseconds=1), timedelta(seconds=deadline - time.monotonic())))
    except DistNetworkError:
        raise
    except RuntimeError:
        expected = range(world_size) if members is None else members
        _decide(store, round_, lambda records: {"error": _missing(records, expected, timeout, call)})
    verdict = json.loads(here.get("verdict"))
    if verdict["error"] is not None:
        _leave(here, rank, verdict["present"])
        raise AgreementError(verdict["error"])
    return Agreement(round_, tuple((node, count) for node, count in verdict["nodes"]))


def _decide(store: Store, round_: int, judge: Callable[[Sequence[_Record]], dict[str, Any]]) -> None:
    """Publish a round's verdict, unless another rank does, and open the next round."""
    here = PrefixStore(str(round_), store)
    if here.add("decided", 1) > 1:
        return
    records = sorted(json.loads(line) for line in here.get("records").decode().splitlines())
    verdict = judge(records)
    verdict["present"] = len(records)
    digests = {digest for _, digest, _, _ in records}
    # The next round is open before anybody can have read this verdict and come again.
    store.add("round", 1)
    here.set("verdict", json.dumps(verdict))
    for key in ("records", "recorded", *(f"settings/{digest}" for digest in digests)):
        here.delete_key(key)


def _leave(here: Store, rank: int, present: int) -> None:
    """After an error, rank 0 goes last: it may be the one that serves the store."""
    here.add("left", 1)
    deadline = time.monotonic() + _LEAVING_SECONDS
    while rank == 0 and here.add("left", 0) < present and time.monotonic() < deadline:
        time.sleep(0.01)


def _judge(store: Store, records: Sequence[_Record]) -> dict[str, Any]:
    digests = sorted({digest for _, digest, _, _ in records})
    texts = {digest: json.loads(store.get(f"settings/{digest}")) for digest in digests}
    error = _compare(records, texts) or _compare_lists(records)
    if error is not None:
        return {"error": error}
    numbers: dict[str, int] = {}
    nodes = [numbers.setdefault(node, len(numbers)) for _, _, node, _ in records]
    return {"error": None, "nodes": [[node, len(list(run))] for node, run in itertools.groupby(nodes)]}


def _compare(
    records: Sequence[tuple[int, str, str, object]], texts: Mapping[str, Mapping[str, str]]
) -> str | None:
    """The message for settings that differ, or ``None`` when all are equal."""
    if len(texts) == 1 and _FAILURE not in next(iter(texts.values())):
        return None
    failed = [(rank, texts[digest][_FAILURE]) for rank, digest, _, _ in records if _FAILURE in texts[digest]]
    if failed:
        lines = [
            f"  {name_ranks([rank for rank, other in failed if other == text])}: {text}"
            for text in dict.fromkeys(text for _, text in failed)
        ]
        return "\n".join(["some ranks could not start, so none of them does:", *lines])
    lines = []
    names = dict.fromkeys(name for text in texts.values() for name in text)
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, digest, _, _ in records:
            values.setdefault(texts[digest].get(name, "(not given)"), []).append(rank)
        if len(values) > 1:
            parts = [f"{value} on {name_ranks(ranks)}" for value, ranks in values.items()]
            lines.append(f"  {name}: " + "; ".join(parts))
    return "\n".join(["the ranks of this job were started with different settings:", *lines])


def _compare_lists(records: Sequence[_Record]) -> str | None:
    """The message for extra groups whose members do not all plan the same ranks."""
    for index in range(len(records[0][3])):
        planned = [(rank, lists[index]) for rank, _, _, lists in records]
        claims = Counter(plan[0] for _, plan in planned if plan)
        if any(plan and claims[plan[0]] != plan[1] for _, plan in planned):
            said: dict[str, list[int]] = {}
            for rank, plan in planned:
                said.setdefault(plan[2] if plan else "no group", []).append(rank)
            told = "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in said.items())
            return (
                f"extra group number {index} is planned with different ranks by its own members: {told}. "
                f"Every rank in a group must be given the same list"
            )
    return None


def _missing(records: Sequence[_Record], expected: Sequence[int], timeout: timedelta, call: str) -> str:
    here = {rank for rank, _, _, _ in records}
    missing = [other for other in expected if other not in here]
    return (
        f"{name_ranks(missing)} did not call {call} within {timeout.total_seconds():g} s; "
        f"{len(here)} of {len(expected)} did. Start every rank, and see whether one of them ended with an "
        f"error of its own"
    )


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def _short(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks[:_SHOWN_RANKS]]
    return ",".join(shown if len(ranks) <= _SHOWN_RANKS else [*shown, f"... ({len(ranks)} in all)"])


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2,5``; long lists are cut.

    >>> name_ranks([0, 1, 2, 5])
    'ranks 0-2,5'
    """
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    cut = [*runs[:_SHOWN_RANKS], f"... ({len(ranks)} in all)"] if len(runs) > _SHOWN_RANKS else runs
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(cut)}"
