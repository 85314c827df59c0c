"""Who failed first: ranks that end with an error tell the others, so that nobody takes an echo for the cause.

A rank that dies takes its peers along: their collectives end with a message of the backend's that names
neither mode nor rank. Each rank that ends with an error therefore leaves a record in the store, and one whose
error came out of a collective looks there for the error that began it, or for ranks that left no record.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.distributed import ProcessGroup, get_process_group_ranks

from rlightning_groups._torch_compat import PrefixStore, Store
from rlightning_groups.agreement import name_ranks
from rlightning_groups.context import ParallelContext, get_global_rank, is_initialized
from rlightning_groups.errors import GroupsError
from rlightning_groups.launch import node_name

__all__ = ["announce", "explain", "is_echo", "note"]

_excepthook = None  # what was there before ours, once ours is
_NOTED = "_rlightning_groups_noted"
_WAIT_SECONDS = 3.0
_LONGEST = 600
# What gloo, NCCL and the store say when another rank is gone, late, or speaks of something else.
_ECHO = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|wait timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class _Record:
    """What a rank said when it ended with an error."""

    rank: int
    echo: bool
    text: str


def announce() -> None:
    """Leave word in the store which process this rank is, and have errors that nobody catches explained."""
    store = PrefixStore("processes", ParallelContext().store)
    store.set(str(get_global_rank()), f"{os.getpid()} {node_name()}")
    global _excepthook
    if _excepthook is None:
        _excepthook, sys.excepthook = sys.excepthook, _note_uncaught


def note(error: BaseException) -> None:
    """Add to an error's message what :func:`explain` finds out; once for each error.

    Args:
        error: what ended this rank.
    """
    if getattr(error, _NOTED, False):
        return
    with contextlib.suppress(AttributeError):
        setattr(error, _NOTED, True)
    if (told := explain(error)) is not None:
        first, *others = error.args or ("",)
        error.args = (f"{first}\n{told}", *others)


def _note_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    note(error)
    (_excepthook or sys.__excepthook__)(kind, error, traceback)


def is_echo(error: BaseException) -> bool:
    """Whether an error says that a collective ended because of another rank.

    Args:
        error: what ended this rank.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _ECHO.search(str(error)) is not None


def explain(error: BaseException, wait: float = _WAIT_SECONDS) -> str | None:
    """Tell the other ranks why this one ends, and find out whose error began it; no collective.

    Args:
        error: what ended this rank.
        wait: how many seconds a rank whose error is an echo waits for the others to say what happened.

    Returns:
        For an echo, what is known: the collective's mode and ranks, the first error of another rank, or the
        ranks whose process is gone or that said nothing. ``None`` for an error of this rank's own, and
        without a context.
    """
    if not is_initialized():
        return None
    echo, rank = is_echo(error), get_global_rank()
    # Looking into a frame ties its variables to the error, and with them a model that is to be used again.
    group = _group_in(error.__traceback__) if echo else None
    try:
        store = PrefixStore("failures", ParallelContext().store)
        text = f"{type(error).__name__}: {error}"[:_LONGEST]
        store.append("records", json.dumps([rank, echo, text]) + "\n")  # type: ignore[attr-defined]
        if not echo:
            return None
        who = _who(store, rank, group, wait)
    except (RuntimeError, GroupsError):
        who = "the ranks' store is gone, and with it the rank that served it"
    if group is None:
        return who
    return f"in a collective over {group.group_desc} ({name_ranks(get_process_group_ranks(group))}): {who}"


def _who(store: Store, rank: int, group: ProcessGroup | None, wait: float) -> str:
    everyone = set(range(ParallelContext().layout.world_size)) - {rank}
    deadline = time.monotonic() + wait
    while True:
        records = [_Record(*json.loads(line)) for line in store.get("records").decode().splitlines()]
        causes = [record for record in records if not record.echo and record.rank != rank]
        silent = sorted(everyone - {record.rank for record in records})
        states = {other: _state_of(other) for other in silent}
        if causes or not silent or any(states.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if causes:
        others = sorted({record.rank for record in causes} - {causes[0].rank})
        more = f" ({name_ranks(others)} failed as well)" if others else ""
        return f"rank {causes[0].rank} had failed: {causes[0].text}{more}"
    for state in ("has ended", "is stopped"):
        if there := [other for other in silent if states[other] == state]:
            return f"the process of {name_ranks(there)} {state}; see what it printed last"
    if group is not None:  # the others wait for this one, and will say so later
        silent = [other for other in silent if other in get_process_group_ranks(group)] or silent
    if silent:
        return f"{name_ranks(silent)} said nothing within {wait:g} s: late, stopped, or gone"
    return "no rank says that it failed by itself"


def _state_of(rank: int) -> str | None:
    """What became of a rank's process, where it runs on this node and left word."""
    store = PrefixStore("processes", ParallelContext().store)
    if not store.check([str(rank)]):
        return None
    pid, _, node = store.get(str(rank)).decode().partition(" ")
    if node != node_name():
        return None
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "has ended" if Path("/proc/self").exists() else None
    return {"Z": "has ended", "X": "has ended", "T": "is stopped"}.get(state)


def _group_in(traceback: TracebackType | None) -> ProcessGroup | None:
    """The group of the innermost call that an error came out of, where a frame still holds it."""
    found = None
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, ProcessGroup):
                found = value
        traceback = traceback.tb_next
    return found
