"""Whether every group works on the machines at hand: the steps of ``rlightning-groups check``.

The ranks start the context, ping each other over plain TCP, and then try each distinct group in turn. They
meet in the store between the stages, which costs each rank a handful of operations whatever the world, and
where a rank that does not come is left behind by name instead of being waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, ProcessGroup

from rlightning_groups import _torch_compat
from rlightning_groups._diagnosis import (
    BROKEN,
    OK,
    SLOW,
    Observed,
    Outcome,
    Place,
    Report,
    rounds,
    unreachable,
)
from rlightning_groups._probe import Address, Answerer, Contact, do_nothing, own_host, peers_of, probe
from rlightning_groups._torch_compat import PrefixStore, Store
from rlightning_groups.context import ParallelContext, get_global_rank, get_group
from rlightning_groups.errors import AgreementError, ContextError, GroupsError
from rlightning_groups.modes import ParallelMode

_LEAVING_SECONDS = 2.0
_LONGEST = 300
_PINGS = 3  # for each measurement asked for, because a ping is short and easily disturbed
_LISTENING = "starting up"
_PINGING = "pinging its peers"


@dataclass(frozen=True)
class Options:
    """What the command was asked for.

    Attributes:
        tensor_parallel_size: as for ``ParallelContext.initialize``.
        sequence_parallel_size: likewise.
        order: likewise.
        backend: likewise.
        timeout: seconds that a rank has for each step.
        sizes: bytes of the messages.
        repeat: how often each thing is measured.
        slow_factor: how many times what is usual counts as slow.
        strict: whether something slow is a failure.
        as_json: whether to write JSON instead of a table.
    """

    tensor_parallel_size: int
    sequence_parallel_size: int
    order: str
    backend: str | None
    timeout: float
    sizes: Sequence[int]
    repeat: int
    slow_factor: float
    strict: bool
    as_json: bool


def check(options: Options, out: TextIO, before: Callable[[str], None] = do_nothing) -> int:
    """Start the context and see whether every group works; every rank of the world calls it.

    Args:
        options: what the command was asked for.
        out: where the first rank writes the report.
        before: called with the name of a stage before its work; tests put their faults there.

    Returns:
        The exit code, equal on all ranks: 0 if all is well, 1 if something is slow and that counts, 2 if
        something is broken.
    """
    try:
        ParallelContext().initialize(
            options.tensor_parallel_size,
            options.sequence_parallel_size,
            order=options.order,
            backend=options.backend,
            timeout=options.timeout,
        )
    except (GroupsError, RuntimeError, ValueError, OSError) as error:
        _say_not_started(error, options, out)
        return BROKEN
    ranks = _Check(options, out, before)
    try:
        return ranks.run()
    except (GroupsError, RuntimeError, OSError) as error:
        lost = isinstance(error, DistNetworkError)
        why = f"the ranks' store is gone, which {_store_server()} served" if lost else _first_line(error)
        print(f"rank {get_global_rank()} cannot go on: {why}", file=sys.stderr, flush=True)
        if not lost:
            ranks.linger()
        return BROKEN


def _say_not_started(error: Exception, options: Options, out: TextIO) -> None:
    """Say why the context did not start: what the ranks agreed on once, what one found by itself there."""
    rank = os.environ.get("RANK", "0")
    agreed = isinstance(error, AgreementError)
    if rank == "0" and options.as_json:
        print(json.dumps({"verdict": "broken", "error": str(error)}), file=out, flush=True)
    if rank == "0" or not agreed or re.match(r"ranks? 0\b", str(error)):  # nobody else to say it
        who = "" if agreed else f"rank {rank}: "
        lost = isinstance(error.__cause__, DistNetworkError)
        more = f" It is served by {_store_server()}" if lost else ""
        print(f"{who}the groups cannot be made: {error}{more}", file=sys.stderr, flush=True)


def _store_server() -> str:
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return "torchrun on the first node" if by_agent else "rank 0"


class _Meetings:
    """Where the ranks come together between the stages, and leave behind those that do not come.

    Each meeting costs a rank four or five operations of the store. The last to come, or the first to lose
    patience, says who is absent.

    Args:
        store: a store of this check's own.
        rank: this process's world rank.
        world_size: number of processes.
        patience: seconds from one meeting to the end of the next.

    Attributes:
        present: the ranks that came to the last meeting.
        absent: the others, with the stage that they did not come out of.
    """

    def __init__(self, store: Store, rank: int, world_size: int, patience: float) -> None:
        self.present = list(range(world_size))
        self.absent: dict[int, str] = {}
        self._store, self._rank, self._patience = store, rank, patience
        self._begin = time.monotonic()

    def meet(self, stage: str, said: Any, judge: Callable[[Mapping[int, Any]], Any] | None = None) -> Any:
        """Say something after a stage, and wait until every rank has.

        Args:
            stage: what the ranks come from.
            said: anything that JSON takes.
            judge: what to tell all ranks, made of what each said; called on one rank.

        Returns:
            What ``judge`` made.

        Raises:
            ContextError: this rank came so late that the others have gone on.
        """
        here = PrefixStore(stage, self._store)
        here.append("said", json.dumps([self._rank, said]) + "\n")  # type: ignore[attr-defined]  # not in the stubs
        if here.add("count", 1) == len(self.present):
            self._decide(here, judge)
        left = self._begin + self._patience - time.monotonic()
        try:
            # A wait of less than a millisecond is taken for one without end.
            here.wait(["verdict"], timedelta(seconds=max(left, 1e-3)))
        except DistNetworkError:
            raise
        except RuntimeError:
            self._decide(here, judge)
            here.wait(["verdict"], timedelta(seconds=self._patience))
        verdict = json.loads(here.get("verdict"))
        self._begin = time.monotonic()
        if self._rank in verdict["absent"]:
            raise ContextError(f"it came out of {stage} so late that the other ranks have gone on without it")
        self.absent.update(dict.fromkeys(verdict["absent"], stage))
        self.present = [rank for rank in self.present if rank not in self.absent]
        return verdict["told"]

    def _decide(self, here: Store, judge: Callable[[Mapping[int, Any]], Any] | None) -> None:
        if here.add("decided", 1) > 1:
            return
        said = _read(here)
        absent = [rank for rank in self.present if rank not in said]
        here.set("verdict", json.dumps({"absent": absent, "told": judge(said) if judge else None}))

    def said(self, stage: str) -> dict[int, Any]:
        """What each rank said after a stage.

        Args:
            stage: one that the ranks have met after.
        """
        return _read(PrefixStore(stage, self._store))


def _read(here: Store) -> dict[int, Any]:
    return dict(json.loads(line) for line in here.get("said").decode().splitlines())


class _Check:
    """One rank's part in the check.

    Args:
        options: what the command was asked for.
        out: where the first rank writes the report.
        before: called with the name of a stage before its work.
    """

    def __init__(self, options: Options, out: TextIO, before: Callable[[str], None]) -> None:
        context = ParallelContext()
        self._options, self._out, self._before = options, out, before
        self._layout, self._rank = context.layout, get_global_rank()
        self._backend = dist.get_backend(get_group(ParallelMode.GLOBAL))
        self._store = PrefixStore("check", context.store)
        self._meetings = _Meetings(self._store, self._rank, self._layout.world_size, 2 * options.timeout)
        self._without_address: list[int] = []

    def run(self) -> int:
        """Take every step, have one rank report, and leave together."""
        bad_pairs = self._ping()
        for mode, groups in rounds(self._layout).items():
            mine = next((group for group in groups if self._rank in group), None)
            outcome = self._try(mode, mine, bad_pairs) if mine else None
            self._meetings.meet(_stage(mode), outcome and asdict(outcome))
        code = self._report()
        self._leave()
        return code

    # Pings.

    def _ping(self) -> list[tuple[int, int]]:
        """Ping the peers while they ping this rank; returns the pairs that do not reach each other."""
        answerer: Answerer | None = None
        try:
            try:
                host = own_host(self._backend, self._layout.node_count > 1)
                answerer = Answerer(host, self._rank, self._before)
                said = [socket.gethostname(), [answerer.address.host, answerer.address.port], None]
            except OSError as error:
                said = [socket.gethostname(), None, str(error)]
            self._store.set(f"address/{self._rank}", json.dumps(said[1]))
            self._without_address = self._meetings.meet(_LISTENING, said, _without_address)
            peers = [rank for rank in peers_of(self._layout, self._rank) if rank not in self._meetings.absent]
            known = self._store.multi_get([f"address/{rank}" for rank in peers]) if peers else []
            found = {rank: json.loads(text) for rank, text in zip(peers, known, strict=True)}
            addresses = {rank: Address(*address) for rank, address in found.items() if address}
            self._before("probe")
            contacts = probe(addresses, _PINGS * self._options.repeat, self._options.timeout)
            return [
                (one, other)
                for one, other in self._meetings.meet(
                    _PINGING, [list(vars(contact).values()) for contact in contacts], _bad_pairs
                )
            ]
        finally:
            if answerer is not None:
                answerer.close()

    # Groups.

    def _try(self, mode: str, ranks: Sequence[int], bad_pairs: Sequence[tuple[int, int]]) -> Outcome:
        """All-reduce over one group, unless it is known to hang."""
        absent = [rank for rank in ranks if rank in self._meetings.absent]
        cut = next((pair for pair in bad_pairs if set(pair) <= set(ranks)), None)
        lonely = [rank for rank in ranks if rank in self._without_address]
        if absent:
            return Outcome(skipped=f"because rank {absent[0]} is gone")
        if lonely:
            return Outcome(skipped=f"because rank {lonely[0]} has no address")
        if cut:
            return Outcome(skipped=f"because rank {cut[0]} does not reach rank {cut[1]}")
        try:
            return self._measure(get_group(mode), ranks)
        except RuntimeError as error:
            return Outcome(error=_first_line(error))

    def _measure(self, group: ProcessGroup, ranks: Sequence[int]) -> Outcome:
        device = _device(self._backend)
        # Each rank's summand stands in a place of its own, so a wrong sum tells whose it is.
        code = torch.zeros(len(ranks), dtype=torch.int64, device=device)
        code[group.rank()] = self._rank + 1
        self._all_reduce(code, group)
        wrong = [(r, r + 1, got) for r, got in zip(ranks, code.tolist(), strict=True) if got != r + 1]
        if wrong:
            return Outcome(wrong=wrong)
        seconds: list[list[float]] = []
        left = self._options.timeout / 2
        for size in self._options.sizes:
            if left <= 0:
                break
            x = torch.ones(size // 4, device=device)
            longest = torch.tensor(self._all_reduce(x, group), dtype=torch.float64, device=device)
            if not bool((x == len(ranks)).all()):
                return Outcome(error=f"a sum of ones over {size} bytes is not {len(ranks)} everywhere")
            self._reduce(longest, group, dist.ReduceOp.MAX)  # all ranks must repeat equally often
            once = max(float(longest), 1e-6)
            times = min(self._options.repeat, int(left / once))
            seconds.append([self._all_reduce(x.zero_(), group) for _ in range(times)])
            left -= once * (times + 1)
        return Outcome(seconds=seconds)

    def _all_reduce(self, x: Tensor, group: ProcessGroup) -> float:
        """Sum in place; returns the seconds that this rank was inside."""
        self._before("collective")
        _settle(x)
        begin = time.perf_counter()
        self._reduce(x, group, dist.ReduceOp.SUM)
        _settle(x)
        return time.perf_counter() - begin

    def _reduce(self, x: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
        work = dist.all_reduce(x, op=op, group=group, async_op=True)
        # Gloo's own timeout is for each connection, and one operation may wait for several.
        work.wait(timedelta(seconds=self._options.timeout))

    # The end.

    def _report(self) -> int:
        """Have the first rank that is there write the report; returns the exit code."""
        if self._rank == min(self._meetings.present):
            report = Report(self._observed())
            if self._options.as_json:
                print(json.dumps(report.to_json()), file=self._out, flush=True)
            else:
                print(report.table(), file=self._out, flush=True)
            code = report.verdict if report.verdict != SLOW or self._options.strict else OK
            self._store.set("code", str(code))
            return code
        try:
            self._store.wait(["code"], timedelta(seconds=2 * self._options.timeout))
        except DistNetworkError:
            raise
        except RuntimeError:
            raise ContextError(f"rank {min(self._meetings.present)} did not write the report") from None
        return int(self._store.get("code"))

    def _observed(self) -> Observed:
        said, layout = self._meetings.said, self._layout
        places = {
            rank: Place(host, Address(*address) if address else None, error)
            for rank, (host, address, error) in said(_LISTENING).items()
        }
        return Observed(
            layout=layout,
            backend=self._backend,
            timeout=self._options.timeout,
            sizes=self._options.sizes,
            slow_factor=self._options.slow_factor,
            places=places,
            contacts=_contacts(said(_PINGING)),
            absent=self._meetings.absent,
            outcomes={
                mode: {rank: Outcome(**outcome) for rank, outcome in said(_stage(mode)).items() if outcome}
                for mode in rounds(layout)
            },
        )

    def linger(self) -> None:
        """Let the other ranks finish without this one, where it may be the one that serves the store."""
        if self._rank == 0:
            stages = 2 + len(rounds(self._layout))
            with contextlib.suppress(RuntimeError):
                self._store.wait(["code"], timedelta(seconds=stages * 2 * self._options.timeout))
                self._leave()

    def _leave(self) -> None:
        """Rank 0 goes last: it may be the one that serves the store."""
        self._store.add("left", 1)
        deadline = time.monotonic() + _LEAVING_SECONDS
        while self._rank == 0 and time.monotonic() < deadline:
            if self._store.add("left", 0) >= len(self._meetings.present):
                break
            time.sleep(0.01)


def _stage(mode: str) -> str:
    return f"the all-reduces of {mode}"


def _contacts(said: Mapping[int, Any]) -> dict[int, list[Contact]]:
    return {rank: [Contact(*fields) for fields in mine] for rank, mine in said.items()}


def _without_address(said: Mapping[int, Any]) -> list[int]:
    return [rank for rank, (_, address, _) in said.items() if address is None]


def _bad_pairs(said: Mapping[int, Any]) -> list[tuple[int, int]]:
    return unreachable(_contacts(said))


def _device(backend: str) -> str:
    return "cpu" if backend in ("gloo", "mpi") else _torch_compat.accelerator_type() or "cpu"


def _settle(x: Tensor) -> None:
    if x.device.type != "cpu":
        torch.accelerator.synchronize()


def _first_line(error: BaseException) -> str:
    """An error's first line, without the place in the backend's source that it begins with."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+:\d+\]\s*", "", lines[0])[:_LONGEST].rstrip("!. ")
