"""What the ranks of a check found out, put together: who is broken or slow, as a table and as JSON.

Pure arithmetic over what the ranks said, so any job of any size can be diagnosed without running it.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlightning_groups._probe import Address, Contact
from rlightning_groups.agreement import name_ranks
from rlightning_groups.layout import ParallelLayout

OK, SLOW, BROKEN = 0, 1, 2
_VERDICTS = ("ok", "slow", "broken")
_SLOW_ROUND_TRIP = 2e-3  # differences below these are noise, whatever the factor
_LATE = 20e-3
_SLOW_REDUCE = 10e-3
_SHOWN = 20
_HINT = (
    "ranks that answer each other's pings cannot all-reduce: the backend may take another interface, or "
    "another port is blocked; set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the interface of the "
    "addresses above"
)

_Group = tuple[int, ...]
_Pair = tuple[int, int]


@dataclass(frozen=True)
class Place:
    """Where a rank listens.

    Attributes:
        host: the name of its host.
        address: the address, or ``None``.
        error: why there is none.
    """

    host: str
    address: Address | None = None
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How one rank fared in one group.

    Attributes:
        skipped: why nothing was tried.
        error: what the all-reduce raised.
        wrong: (world rank, expected, got) of the summands that arrived wrong.
        seconds: how long each all-reduce took, by the index of the message's size.
    """

    skipped: str | None = None
    error: str | None = None
    wrong: Sequence[Sequence[int]] = ()
    seconds: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Observed:
    """All that the ranks of a check said.

    Attributes:
        layout: who sits where.
        backend: torch backend of the groups.
        timeout: of each step, in seconds.
        sizes: bytes of the messages.
        slow_factor: how many times what is usual counts as slow.
        places: where each rank listens.
        contacts: what each rank found out about its peers.
        absent: the ranks that did not come out of a stage, with the stage.
        outcomes: how each rank fared, by the mode whose turn it was.
    """

    layout: ParallelLayout
    backend: str
    timeout: float
    sizes: Sequence[int]
    slow_factor: float
    places: Mapping[int, Place]
    contacts: Mapping[int, Sequence[Contact]]
    absent: Mapping[int, str]
    outcomes: Mapping[str, Mapping[int, Outcome]]


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        verdict: ``SLOW`` or ``BROKEN``.
        what: ``"rank"``, ``"pair"`` or ``"group"``.
        ranks: the world ranks it is about.
        text: a sentence.
    """

    verdict: int
    what: str
    ranks: Sequence[int]
    text: str


@dataclass
class GroupReport:
    """One distinct group.

    Attributes:
        modes: the modes that share it.
        ranks: its world ranks.
        nodes: how many nodes it spans.
        seconds: of one all-reduce, by size; ``None`` where it was not measured.
        verdict: ``OK``, ``SLOW`` or ``BROKEN``.
    """

    modes: Sequence[str]
    ranks: Sequence[int]
    nodes: int
    seconds: Sequence[float | None]
    verdict: int = OK

    def bandwidth(self, size: int, index: int) -> tuple[float, float] | None:
        """Bytes per second: message by time, and what each link carries, 2(n-1)/n of it."""
        seconds = self.seconds[index]
        if seconds is None:
            return None
        return size / seconds, size / seconds * 2 * (len(self.ranks) - 1) / len(self.ranks)


def rounds(layout: ParallelLayout) -> dict[str, list[_Group]]:
    """The groups to try when each mode's turn comes: each distinct one of several ranks once.

    Args:
        layout: who sits where.

    Returns:
        Modes in an order in which all ranks can take them, with the groups that no earlier mode has.
    """
    seen: set[_Group] = set()
    result = {}
    for mode in layout.modes:
        new = [group for group in map(tuple, layout.groups(mode)) if len(group) > 1 and group not in seen]
        if new:
            result[mode] = new
            seen.update(new)
    return result


def unreachable(contacts: Mapping[int, Sequence[Contact]]) -> list[tuple[int, int]]:
    """The pairs of ranks of which one could not reach the other, the one that tried first.

    Args:
        contacts: what each rank found out about its peers.
    """
    return [(rank, c.peer) for rank, mine in sorted(contacts.items()) for c in mine if c.error is not None]


def late_by(seconds: Mapping[int, Sequence[float]], slow_factor: float) -> dict[int, float]:
    """The ranks that come late to the collectives of a group, with how late they come.

    The ranks that come in time wait inside the collective for the one that does not, so how long each was
    inside tells how much later it came than the one that came first; no clocks need to agree.

    Args:
        seconds: how long each rank was inside of each collective.
        slow_factor: lateness up to this many times the collective's own time is usual.

    >>> late_by({0: [0.101, 0.102], 1: [0.001, 0.002], 2: [0.1, 0.1]}, slow_factor=5)
    {1: 0.1}
    """
    trials = min(map(len, seconds.values()), default=0)
    if not trials or len(seconds) < 2:
        return {}
    longest = [max(mine[trial] for mine in seconds.values()) for trial in range(trials)]
    usual = statistics.median(min(mine[trial] for mine in seconds.values()) for trial in range(trials))
    late = {
        rank: statistics.median(longest[trial] - mine[trial] for trial in range(trials))
        for rank, mine in seconds.items()
    }
    bound = _lower_quartile(late.values()) + max(_LATE, slow_factor * usual)
    return {rank: round(by, 6) for rank, by in late.items() if by > bound}


@dataclass
class Report:
    """The diagnosis.

    Args:
        observed: what the ranks said.

    Attributes:
        findings: what is not as it should be, the worst first.
        groups: each distinct group of several ranks.
        hint: what to look at first, if there is something to say.
    """

    observed: Observed
    findings: list[Finding] = field(init=False)
    groups: list[GroupReport] = field(init=False)
    hint: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.groups = self._measured_groups()
        self.findings = [
            *self._absent(),
            *self._without_address(),
            *self._cut_off(),
            *self._broken_groups(),
            *self._slow_contacts(),
            *self._late_ranks(),
            *self._slow_groups(),
        ]

    @property
    def verdict(self) -> int:
        """The worst of the findings."""
        return max((finding.verdict for finding in self.findings), default=OK)

    # Broken.

    def _absent(self) -> Iterable[Finding]:
        absent = self.observed.absent
        for stage in dict.fromkeys(absent.values()):
            ranks = [rank for rank in absent if absent[rank] == stage]
            text = (
                f"{self._name(*ranks)} did not finish {stage} within {2 * self.observed.timeout:g} s: "
                f"dead, stopped, or cut off from the ranks' store"
            )
            yield Finding(BROKEN, "rank", ranks, text)

    def _without_address(self) -> Iterable[Finding]:
        for rank, place in sorted(self.observed.places.items()):
            if place.error is not None:
                text = f"rank {rank} has no address to be reached at: {place.error}"
                yield Finding(BROKEN, "rank", [rank], text)

    def _cut_off(self) -> Iterable[Finding]:
        """Calls that failed, put on as few as can be: a rank, a node, two nodes, else pair by pair."""
        node, absent = self.observed.layout.node, self.observed.absent
        calls = {
            (rank, contact.peer): contact.error
            for rank, mine in sorted(self.observed.contacts.items())
            for contact in mine
            if rank not in absent and contact.peer not in absent
        }
        failed = {call: error for call, error in calls.items() if error is not None}
        left = dict(failed)
        to_rank, from_afar, to_node, between_nodes = _Calls(), _Calls(), _Calls(), _Calls()
        for call in calls:
            here, there = map(node, call)
            to_rank.add(call[1], call, call[0])
            if here != there:
                from_afar.add(call[1], call, call[0])
                to_node.add(there, call, here)
                between_nodes.add((min(here, there), max(here, there)), call, frozenset(call))

        def claim(kind: _Calls, key: Hashable) -> str | None:
            """Why all calls of a kind failed, if they came from several sides and are not told yet."""
            mine = kind.calls.get(key, [])
            if len(kind.sides.get(key, ())) < 2 or not left.keys() & mine or not failed.keys() >= set(mine):
                return None
            for one, other in mine:
                left.pop((one, other), None)
                left.pop((other, one), None)
            return f"{failed[mine[0]]} ({name_ranks(sorted({caller for caller, _ in mine}))} tried)"

        reached = sorted({peer for _, peer in failed})
        for rank in reached:
            if why := claim(to_rank, rank):
                text = f"nobody reaches {self._name(rank, port=True)}: {why}"
                yield Finding(BROKEN, "rank", [rank], text)
        for number in sorted(set(map(node, reached))):
            if why := claim(to_node, number):
                ranks = sorted({peer for _, peer in to_node.calls[number]})
                text = f"no other node reaches node {number}, {self._name(*ranks)}: {why}"
                yield Finding(BROKEN, "rank", ranks, text)
        for sides, mine in between_nodes.calls.items():
            if why := claim(between_nodes, sides):
                ranks = sorted({rank for call in mine for rank in call})
                names = [
                    f"node {side}, {self._name(*(rank for rank in ranks if node(rank) == side))},"
                    for side in sides
                ]
                text = f"{' and '.join(names)} do not reach each other: {why}"
                yield Finding(BROKEN, "pair", ranks, text)
        for rank in reached:
            if why := claim(from_afar, rank):
                text = f"nobody on another node reaches {self._name(rank, port=True)}: {why}"
                yield Finding(BROKEN, "rank", [rank], text)
        for one, other in left:
            both = (other, one) in left
            if not both or one < other:
                ends = self._name(one, port=True), self._name(other, port=True)
                text = (
                    f"{ends[0]} and {ends[1]} do not reach each other"
                    if both
                    else f"{ends[0]} does not reach {ends[1]}"
                )
                yield Finding(BROKEN, "pair", [one, other], f"{text}: {left[one, other]}")

    def _broken_groups(self) -> Iterable[Finding]:
        for report in self.groups:
            outcomes = self._outcomes(report)
            skipped = next((o.skipped for o in outcomes.values() if o.skipped), None)
            wrong = next((o.wrong for o in outcomes.values() if o.wrong), None)
            failed = {rank: o.error for rank, o in outcomes.items() if o.error}
            absent = [rank for rank in report.ranks if rank in self.observed.absent]
            if skipped is not None:
                text = f"not tried, {skipped}"
            elif absent:
                text = f"{name_ranks(absent)} went away"
            elif failed:
                # Most ranks only see that nothing comes; the one that knows more has more to say.
                rank = max(failed, key=lambda rank: (len(failed[rank] or ""), -rank))
                ranks = name_ranks(list(failed))
                text = f"the all-reduce failed on {ranks}, on rank {rank} with: {failed[rank]}"
                self.hint = _HINT
            elif wrong is not None:
                said = ", ".join(
                    f"rank {rank}'s summand was lost" if got == 0 else f"rank {rank}'s {should} became {got}"
                    for rank, should, got in wrong
                )
                text = f"the all-reduce gave a wrong sum: {said}"
            else:
                continue
            report.verdict = BROKEN
            yield Finding(BROKEN, "group", report.ranks, f"{self._title(report)}: {text}")

    # Slow.

    def _slow_contacts(self) -> Iterable[Finding]:
        """Ranks whose paths are slow, and slow paths between ranks whose others are not.

        A path's time has a share of each end, so a rank is judged by the better of its paths: one slow peer
        does not make it slow.
        """
        slow_paths: set[tuple[int, int]] = set()
        for crossing in (False, True):
            paths = self._paths(crossing)
            of_rank: dict[int, list[float]] = {}
            for pair, seconds in paths.items():
                for rank in pair:
                    of_rank.setdefault(rank, []).append(seconds)
            typical = {rank: _lower_quartile(mine) for rank, mine in of_rank.items()}
            usual = statistics.median_low(typical.values()) if typical else 0.0
            slow = {rank for rank, t in typical.items() if self._is_slow(t, usual, _SLOW_ROUND_TRIP)}
            beside = f"where {_time(usual)} is usual {'between nodes' if crossing else 'within a node'}"
            for ranks in self._by_node(slow, typical):
                took = _time(max(typical[rank] for rank in ranks))
                text = f"{self._name(*ranks)}: round trips take {took}, {beside}"
                yield Finding(SLOW, "rank", ranks, text)
            for pair, seconds in sorted(paths.items()):
                if self._is_slow(seconds, usual, _SLOW_ROUND_TRIP):
                    slow_paths.add(pair)
                    if not slow & set(pair):
                        names = " and ".join(self._name(rank) for rank in pair)
                        text = f"{names}: a round trip takes {_time(seconds)}, {beside}"
                        yield Finding(SLOW, "pair", pair, text)
        for report in self.groups:
            members = set(report.ranks)
            if report.verdict == OK and any(members.issuperset(pair) for pair in slow_paths):
                report.verdict = SLOW

    def _paths(self, crossing: bool) -> dict[tuple[int, int], float]:
        """The slower direction of each pair of one node, or of two."""
        node = self.observed.layout.node
        found: dict[tuple[int, int], float] = {}
        for rank, mine in self.observed.contacts.items():
            for contact in mine:
                if contact.round_trip is not None and (node(rank) != node(contact.peer)) == crossing:
                    pair = (min(rank, contact.peer), max(rank, contact.peer))
                    found[pair] = max(contact.round_trip, found.get(pair, 0.0))
        return found

    def _is_slow(self, seconds: float, usual: float, floor: float) -> bool:
        return seconds > self.observed.slow_factor * usual and seconds - usual > floor

    def _by_node(self, slow: Iterable[int], measured: Iterable[int]) -> Iterable[list[int]]:
        """Slow ranks one by one, but together where all of a node are."""
        node = self.observed.layout.node
        of_node: dict[int, list[int]] = {}
        for rank in sorted(slow):
            of_node.setdefault(node(rank), []).append(rank)
        for number, members in of_node.items():
            whole = members == sorted(rank for rank in measured if node(rank) == number)
            yield from [members] if whole else [[rank] for rank in members]

    def _late_ranks(self) -> Iterable[Finding]:
        """Ranks that come late to collectives; not in groups with slow paths, which look alike."""
        late: dict[int, list[tuple[float, GroupReport]]] = {}
        for report in self.groups:
            if report.verdict == OK:
                seconds = {rank: o.seconds[0] for rank, o in self._outcomes(report).items() if o.seconds}
                for rank, by in late_by(seconds, self.observed.slow_factor).items():
                    late.setdefault(rank, []).append((by, report))
                    report.verdict = SLOW
        for rank, groups in sorted(late.items()):
            most = _time(max(by for by, _ in groups))
            titles = "; ".join(self._title(report) for _, report in groups)
            text = f"{self._name(rank)} comes to collectives {most} after the others: {titles}"
            yield Finding(SLOW, "rank", [rank], text)

    def _slow_groups(self) -> Iterable[Finding]:
        """Groups that are slow beside others of their mode, where no rank and no path explains it."""
        by_kind: dict[tuple[str, int, bool], list[GroupReport]] = {}
        for report in self.groups:
            key = (report.modes[0], len(report.ranks), report.nodes > 1)
            by_kind.setdefault(key, []).append(report)
        for alike in by_kind.values():
            for index, size in enumerate(self.observed.sizes):
                times = {id(report): report.seconds[index] for report in alike}
                known = [seconds for seconds in times.values() if seconds is not None]
                usual = statistics.median_low(known) if known else 0.0
                for report in alike:
                    seconds = times[id(report)]
                    if seconds and report.verdict == OK and self._is_slow(seconds, usual, _SLOW_REDUCE):
                        report.verdict = SLOW
                        took = f"{bytes_text(size)} take {_time(seconds)}, where {_time(usual)} is usual"
                        yield Finding(SLOW, "group", report.ranks, f"{self._title(report)}: {took}")

    # The groups.

    def _measured_groups(self) -> list[GroupReport]:
        layout = self.observed.layout
        modes: dict[_Group, list[str]] = {}
        turn: dict[_Group, str] = {group: mode for mode, new in rounds(layout).items() for group in new}
        for mode in layout.modes:
            for group in map(tuple, layout.groups(mode)):
                if group in turn:
                    modes.setdefault(group, []).append(mode)
        reports = []
        for group in turn:
            nodes = len({layout.node(rank) for rank in group})
            report = GroupReport(modes[group], group, nodes, [None] * len(self.observed.sizes))
            outcomes = self._outcomes(report)
            if len(outcomes) == len(group):
                report.seconds = [
                    _of_the_last(
                        [o.seconds[index] if index < len(o.seconds) else () for o in outcomes.values()]
                    )
                    for index in range(len(self.observed.sizes))
                ]
            reports.append(report)
        return reports

    def _outcomes(self, report: GroupReport) -> dict[int, Outcome]:
        turn = self.observed.outcomes.get(report.modes[0], {})
        return {rank: turn[rank] for rank in report.ranks if rank in turn}

    # Saying it.

    def _name(self, *ranks: int, port: bool = False) -> str:
        """``rank 3 (10.0.0.3)``, with the addresses where they are few."""
        places = [self.observed.places[rank] for rank in ranks if rank in self.observed.places]
        addresses = dict.fromkeys(place.address for place in places if place.address is not None)
        told = dict.fromkeys(str(one) if port and len(ranks) == 1 else one.host for one in addresses)
        return f"{name_ranks(ranks)} ({', '.join(told)})" if 0 < len(told) <= 2 else name_ranks(ranks)

    @staticmethod
    def _title(report: GroupReport) -> str:
        return f"{', '.join(report.modes)} of {name_ranks(report.ranks)}"

    def table(self) -> str:
        """The diagnosis for people: a table by mode, and a line for each finding."""
        observed = self.observed
        lines = [f"{observed.layout}; {observed.backend}, answers within {observed.timeout:g} s"]
        for crossing, where in ((False, "within a node"), (True, "between nodes")):
            if times := list(self._paths(crossing).values()):
                usual, worst = _time(statistics.median(times)), _time(max(times))
                pairs = f"{len(times)} pair{'s' if len(times) > 1 else ''}"
                lines.append(f"round trips {where}: {pairs}, median {usual}, slowest {worst}")
        lines += ["", *_columns(self._rows()), ""]
        if self.groups:
            latency = f"of the slowest group: latency of {bytes_text(observed.sizes[0])}"
            rates = "; bandwidth as bytes by time, and on each link" if observed.sizes[1:] else ""
            lines.append(latency + rates)
        for verdict in (BROKEN, SLOW):
            found = [finding for finding in self.findings if finding.verdict == verdict]
            lines += [f"{_VERDICTS[verdict]}: {finding.text}" for finding in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"{_VERDICTS[verdict]}: {len(found) - _SHOWN} more, which --json lists")
        lines += [f"hint: {self.hint}"] if self.hint else []
        lines.append(
            ("every group works", "every group works, some slowly", "not every group works")[self.verdict]
        )
        return "\n".join(lines)

    def _rows(self) -> list[list[str]]:
        observed = self.observed
        rows = [
            ["mode", "groups", "size", "nodes", "latency", *map(bytes_text, observed.sizes[1:]), "verdict"]
        ]
        by_ranks = {tuple(report.ranks): report for report in self.groups}
        named: dict[tuple[_Group, ...], str] = {}
        for mode in observed.layout.modes:
            groups = tuple(map(tuple, observed.layout.groups(mode)))
            lengths = sorted({len(group) for group in groups})
            size = "-".join(dict.fromkeys([str(lengths[0]), str(lengths[-1])]))
            start = [mode, str(len(groups)), size]
            reports = [by_ranks[group] for group in groups if group in by_ranks]
            blank = ["-"] * (len(observed.sizes) + 1)
            if not reports:
                rows.append([*start, *blank, "nothing to try"])
            elif groups in named:
                rows.append([*start, *blank, f"as {named[groups]}"])
            else:
                named[groups] = mode
                rows.append([*start, str(max(r.nodes for r in reports)), *self._cells(reports)])
        return rows

    def _cells(self, reports: Sequence[GroupReport]) -> list[str]:
        cells = []
        for index, size in enumerate(self.observed.sizes):
            known = [report for report in reports if report.seconds[index] is not None]
            worst = max(known, key=lambda report: report.seconds[index] or 0.0, default=None)
            if worst is None:
                cells.append("-")
            elif index == 0:
                cells.append(_time(worst.seconds[0] or 0.0))
            else:
                both = worst.bandwidth(size, index)
                assert both is not None
                cells.append(_rates(*both))
        counts = {verdict: sum(report.verdict == verdict for report in reports) for verdict in (BROKEN, SLOW)}
        told = [
            _VERDICTS[verdict] if count == len(reports) else f"{count} of {len(reports)} {_VERDICTS[verdict]}"
            for verdict, count in counts.items()
            if count
        ]
        return [*cells, ", ".join(told) or "ok"]

    def to_json(self) -> dict[str, Any]:
        """The diagnosis for machines; times in seconds, bandwidths in bytes per second."""
        observed, layout = self.observed, self.observed.layout
        groups = []
        for report in self.groups:
            messages = []
            for index, size in enumerate(observed.sizes):
                both = report.bandwidth(size, index) or (None, None)
                values = {"seconds": report.seconds[index], "algorithm": both[0], "bus": both[1]}
                messages.append({"bytes": size, **values})
            about = {"modes": list(report.modes), "ranks": list(report.ranks), "nodes": report.nodes}
            groups.append({**about, "verdict": _VERDICTS[report.verdict], "messages": messages})
        ranks = [
            {
                "rank": rank,
                "node": layout.node(rank),
                "host": place.host if place else None,
                "address": str(place.address) if place and place.address else None,
                "error": place.error if place else None,
                "absent_since": observed.absent.get(rank),
                "peers": [vars(contact) for contact in observed.contacts.get(rank, ())],
            }
            for rank in range(layout.world_size)
            for place in [observed.places.get(rank)]
        ]
        return {
            "verdict": _VERDICTS[self.verdict],
            "layout": {**layout.sizes, "order": layout.order, "nodes": layout.node_count},
            "backend": observed.backend,
            "findings": [
                {"verdict": _VERDICTS[f.verdict], "what": f.what, "ranks": list(f.ranks), "text": f.text}
                for f in self.findings
            ],
            "hint": self.hint,
            "groups": groups,
            "ranks": ranks,
        }


@dataclass
class _Calls:
    """Calls by what they have in common, with the sides that they came from."""

    calls: dict[Any, list[_Pair]] = field(default_factory=dict)
    sides: dict[Any, set[Any]] = field(default_factory=dict)

    def add(self, key: Hashable, call: _Pair, side: Hashable) -> None:
        self.calls.setdefault(key, []).append(call)
        self.sides.setdefault(key, set()).add(side)


def bytes_text(size: int) -> str:
    """A number of bytes as people write it.

    Args:
        size: number of bytes.

    >>> bytes_text(1024), bytes_text(1 << 24), bytes_text(1000)
    ('1KiB', '16MiB', '1000B')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"


def _lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def _of_the_last(seconds: Sequence[Sequence[float]]) -> float | None:
    """What one collective takes: the last to come waits for nobody, so the shortest time of any rank."""
    trials = min(map(len, seconds))
    if not trials:
        return None
    return statistics.median(min(mine[trial] for mine in seconds) for trial in range(trials))


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _rates(*rates: float) -> str:
    unit, name = (1e9, "GB/s") if min(rates) >= 1e9 else (1e6, "MB/s")
    return f"{'/'.join(f'{rate / unit:.3g}' for rate in rates)} {name}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
