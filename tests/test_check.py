"""The check: what it says of healthy, missing, dead, late, slow and blocked ranks, and of what they said."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from network import Network, NoNamespacesError, enter, hosts, switch
from pool import TORCHRUN, start_fork_server

from rlightning_groups import _check, _probe, cli

FAST = ["check", "--timeout", "3", "--sizes", "1KiB,64KiB"]

# ------------------------------------------------------------------------------------------- on real ranks


def start_rank(
    arguments: list[str], environment: dict[str, str], namespace: str | None, fault: str | None, log: str
) -> None:
    """One rank of a job, in a process of its own."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT), number)
    if namespace is not None:
        enter(namespace)
    for name in (*TORCHRUN, "TORCH_GLOO_LAZY_INIT", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in environment.items() if value})
    torch.set_num_threads(1)
    before = partial(FAULTS[fault], itertools.count()) if fault else _probe.do_nothing
    with mock.patch.object(_check, "check", partial(_check.check, before=before)):
        cli.main(arguments)


def come_late(calls: Iterator[int], stage: str) -> None:
    if stage == "collective":
        time.sleep(0.1)


def answer_late(calls: Iterator[int], stage: str) -> None:
    if stage == "answer":
        time.sleep(0.1)


def die_in_a_collective(calls: Iterator[int], stage: str) -> None:
    if stage == "collective" and next(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def stop_in_a_collective(calls: Iterator[int], stage: str) -> None:
    if stage == "collective" and next(calls) == 3:
        os.kill(os.getpid(), signal.SIGSTOP)


def die_before_pinging(calls: Iterator[int], stage: str) -> None:
    if stage == "probe":
        os.kill(os.getpid(), signal.SIGKILL)


def lose_a_summand(calls: Iterator[int], stage: str) -> None:
    real = dist.all_reduce
    if stage == "collective" and next(calls) == 0:

        def all_reduce(x: torch.Tensor, **how: Any) -> Any:
            return real(x.zero_() if x.dtype == torch.int64 else x, **how)

        dist.all_reduce = all_reduce


FAULTS: dict[str, Callable[[Iterator[int], str], None]] = {
    function.__name__: function
    for function in (
        come_late,
        answer_late,
        die_in_a_collective,
        stop_in_a_collective,
        die_before_pinging,
        lose_a_summand,
    )
}


class Job:
    """What the ranks of a job left behind: exit codes and output by rank."""

    def __init__(self, codes: Mapping[int, int | None], log: Path) -> None:
        self.codes = dict(codes)
        self.out = {rank: Path(f"{log}-{rank}.out").read_text() for rank in codes}
        self.err = {rank: Path(f"{log}-{rank}.err").read_text() for rank in codes}

    def found(self) -> list[tuple[str, str, list[int]]]:
        return [(f["verdict"], f["what"], f["ranks"]) for f in json.loads(self.out[0])["findings"]]

    def texts(self) -> str:
        return "\n".join(finding["text"] for finding in json.loads(self.out[0])["findings"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def run_job(
    tmp_path: Path,
    *options: str,
    ranks: Sequence[int] = (0, 1, 2, 3),
    world_size: int = 4,
    faults: Mapping[int, str] | None = None,
    own_options: Mapping[int, Sequence[str]] | None = None,
    network: Network | None = None,
    places: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    limit: float = 25.0,
) -> Job:
    """Run the command on several ranks, ``places`` being their hosts in a network, and end all."""
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if network is not None:
        shared |= {"MASTER_ADDR": network.address(places[0]), "GLOO_SOCKET_IFNAME": "eth0"}
    shared |= environment or {}
    processes: dict[int, BaseProcess] = {}
    log = tmp_path / "rank"
    try:
        for rank in ranks:
            arguments = [*FAST, *options, *(own_options or {}).get(rank, ())]
            namespace = None if network is None else network.host(places[rank])
            fault = (faults or {}).get(rank)
            own = (arguments, {**shared, "RANK": str(rank)}, namespace, fault, f"{log}-{rank}")
            processes[rank] = context.Process(target=start_rank, args=own)
            processes[rank].start()
        deadline = time.monotonic() + limit
        sound = [process for rank, process in processes.items() if rank not in (faults or {})]
        for process in sound or processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for rank in faults or {}:
            processes[rank].join(1.0)
        return Job({rank: process.exitcode for rank, process in processes.items()}, log)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
            process.close()


def test_a_healthy_job(tmp_path: Path) -> None:
    job = run_job(tmp_path, "--tensor-parallel-size", "2", "--json", "--repeat", "3")
    assert job.codes == dict.fromkeys(range(4), 0), job.err
    assert [job.out[rank] for rank in (1, 2, 3)] == [""] * 3
    told = json.loads(job.out[0])
    assert [f for f in told["findings"] if f["verdict"] == "broken"] == []
    assert told["verdict"] in ("ok", "slow")  # of a machine that is busy with something else
    assert told["layout"] == {"data": 2, "sequence": 1, "tensor": 2, "order": "tp-sp-dp", "nodes": 1}
    groups = {tuple(group["ranks"]): group for group in told["groups"]}
    assert {ranks: group["modes"] for ranks, group in groups.items()} == {
        (0, 1, 2, 3): ["GLOBAL", "INTRA_NODE"],
        (0, 2): ["TRAIN_DATA_PARALLEL", "DATA_PARALLEL"],
        (1, 3): ["TRAIN_DATA_PARALLEL", "DATA_PARALLEL"],
        (0, 1): ["TENSOR_PARALLEL"],
        (2, 3): ["TENSOR_PARALLEL"],
    }
    for ranks, group in groups.items():
        for message, size in zip(group["messages"], (1024, 65536), strict=True):
            assert message["bytes"] == size
            assert 0 < message["seconds"] < 3
            assert message["algorithm"] == pytest.approx(size / message["seconds"])
            assert message["bus"] == pytest.approx(message["algorithm"] * 2 * (len(ranks) - 1) / len(ranks))
    for rank in told["ranks"]:
        assert rank["address"].startswith("127.0.0.1:")
        assert sorted(peer["peer"] for peer in rank["peers"]) == sorted({0, 1, 2, 3} - {rank["rank"]})
        assert all(0 < peer["round_trip"] < 1 and peer["connect"] > 0 for peer in rank["peers"])


def test_under_torchrun(tmp_path: Path) -> None:
    """The table, from the command line, on the store that torchrun serves."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-m", "rlightning_groups", *FAST]
    environment = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launcher, *endpoint, "--tensor-parallel-size", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=environment,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks = data 1 x sequence 1 x tensor 2, order tp-sp-dp, 1 node; gloo")
    rows = {line.split()[0]: line.split() for line in lines if line and line.split()[0].isupper()}
    assert rows["GLOBAL"][1:4] == ["1", "2", "1"]
    assert rows["TENSOR_PARALLEL"][-2:] == ["as", "GLOBAL"]
    assert rows["DATA_PARALLEL"][-3:] == ["nothing", "to", "try"]
    assert lines[-1].startswith("every group works")


def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    job = run_job(tmp_path, "--tensor-parallel-size", "2", "--json", "--strict", faults={2: "come_late"})
    assert set(job.codes.values()) == {1}, job.err
    assert job.found() == [("slow", "rank", [2])]
    text = job.texts()
    assert text.startswith("rank 2 (127.0.0.1) comes to collectives 1")
    assert "GLOBAL, INTRA_NODE of ranks 0-3; " in text
    assert text.endswith("TENSOR_PARALLEL of ranks 2-3")


def test_a_rank_that_answers_late(tmp_path: Path) -> None:
    job = run_job(tmp_path, "--json", faults={1: "answer_late"})
    assert set(job.codes.values()) == {0}, job.err
    assert job.found() == [("slow", "rank", [1])]
    took = re.match(r"rank 1 \(127\.0\.0\.1\): round trips take (\d+) ms, where ", job.texts())
    assert took
    assert 100 <= int(took[1]) < 450  # it answers one after the other, and three may ask at once


def test_a_rank_that_never_starts(tmp_path: Path) -> None:
    job = run_job(tmp_path, "--timeout", "1", ranks=(0, 1, 2))
    assert job.codes == {0: 2, 1: 2, 2: 2}
    assert "the groups cannot be made: rank 3 did not call initialize within 1 s; 3 of 4 did" in job.err[0]
    assert [job.out[0], job.err[1], job.err[2]] == ["", "", ""]


def test_a_rank_with_other_settings(tmp_path: Path) -> None:
    job = run_job(
        tmp_path, "--json", world_size=2, ranks=(0, 1), own_options={1: ["--tensor-parallel-size", "2"]}
    )
    assert job.codes == {0: 2, 1: 2}
    told = json.loads(job.out[0])
    assert told["verdict"] == "broken"
    assert "tensor_parallel_size: 1 on rank 0; 2 on rank 1" in told["error"]
    assert told["error"] in job.err[0]


@pytest.mark.parametrize(
    ("fault", "stage", "code"),
    [
        ("die_before_pinging", "pinging its peers", -signal.SIGKILL),
        ("die_in_a_collective", "the all-reduces of GLOBAL", -signal.SIGKILL),
        ("stop_in_a_collective", "the all-reduces of GLOBAL", None),
    ],
)
def test_a_rank_that_goes_away(tmp_path: Path, fault: str, stage: str, code: int | None) -> None:
    begin = time.monotonic()
    job = run_job(tmp_path, "--timeout", "1", "--json", "--tensor-parallel-size", "2", faults={2: fault})
    assert job.codes == {0: 2, 1: 2, 2: code, 3: 2}, job.err
    assert time.monotonic() - begin < 12
    text = job.texts()
    assert f"rank 2 (127.0.0.1) did not finish {stage} within 2 s" in text
    assert "TENSOR_PARALLEL of ranks 2-3: not tried, because rank 2 is gone" in text
    groups = {tuple(group["ranks"]): group["verdict"] for group in json.loads(job.out[0])["groups"]}
    assert {ranks for ranks, verdict in groups.items() if verdict == "broken"} == {
        (0, 1, 2, 3),
        (0, 2),
        (2, 3),
    }


def test_a_summand_that_is_lost(tmp_path: Path) -> None:
    job = run_job(tmp_path, "--json", ranks=(0, 1, 2), world_size=3, faults={1: "lose_a_summand"})
    assert set(job.codes.values()) == {2}, job.err
    assert job.found() == [("broken", "group", [0, 1, 2])]
    assert job.texts().endswith("the all-reduce gave a wrong sum: rank 1's summand was lost")


# ------------------------------------------------------------------------------------- on several hosts


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Network]:
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(hosts(3))
        except NoNamespacesError as error:
            pytest.skip(str(error))
        yield network
    assert network.left() == []


def test_a_blocked_path(tmp_path: Path, three_hosts: Network) -> None:
    """Two of three hosts do not see each other: their ranks are named, and the other groups are tried."""
    with switch(three_hosts, cut=[(1, 2)]):
        job = run_job(
            tmp_path, "--tensor-parallel-size", "2", "--json", network=three_hosts, places=(0, 0, 1, 2)
        )
    assert set(job.codes.values()) == {2}, job.err
    told = json.loads(job.out[0])
    assert told["layout"]["nodes"] == 3
    found = job.found()
    assert [ranks for _, what, ranks in found if what == "pair"] == [[2, 3]]
    assert not any(what == "rank" for _, what, _ in found)
    texts = job.texts()
    assert "rank 2 (10.77.0.2:" in texts
    assert "and rank 3 (10.77.0.3:" in texts
    assert "do not reach each other: no connection within 3 s" in texts
    assert "TENSOR_PARALLEL of ranks 2-3: not tried, because rank 2 does not reach rank 3" in texts
    verdicts = {tuple(group["ranks"]): group["verdict"] for group in told["groups"]}
    broken = {(0, 1, 2, 3), (0, 2, 3), (2, 3)}  # the second one is INTER_NODE
    assert {ranks for ranks, verdict in verdicts.items() if verdict == "broken"} == broken
    assert set(verdicts) - broken == {(0, 1), (0, 2), (1, 3)}


def test_a_blocked_port(tmp_path: Path, three_hosts: Network) -> None:
    """A firewall lets nobody in to one host, whose own calls go out: its rank is named."""
    with switch(three_hosts, closed=[2]):
        job = run_job(
            tmp_path, "--tensor-parallel-size", "2", "--json", network=three_hosts, places=(0, 0, 1, 2)
        )
    assert set(job.codes.values()) == {2}, job.err
    assert [(what, ranks) for _, what, ranks in job.found() if what != "group"] == [("rank", [3])]
    assert "nobody reaches rank 3 (10.77.0.3:" in job.texts()
    assert "no connection within 3 s (ranks 0-2 tried)" in job.texts()


def test_a_slow_path(tmp_path: Path, three_hosts: Network) -> None:
    """What one host sends comes 100 ms later: its rank is named, and none of its peers."""
    with switch(three_hosts, delays={2: 0.1}):
        job = run_job(
            tmp_path, "--json", "--strict", "--repeat", "3", network=three_hosts, places=(0, 0, 1, 2)
        )
    assert set(job.codes.values()) == {1}, job.err
    assert job.found() == [("slow", "rank", [3])]
    assert job.texts().startswith("rank 3 (10.77.0.3): round trips take 10")
    groups = {tuple(group["ranks"]): group for group in json.loads(job.out[0])["groups"]}
    assert groups[0, 1, 2, 3]["verdict"] == "slow"
    assert groups[0, 1]["verdict"] == "ok"
    assert groups[0, 1, 2, 3]["messages"][0]["seconds"] > 0.1
