from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pool_functions as functions
import pytest
import torch
from pool import MAX_RANKS, TORCHRUN, RankError, RankFailure, RankPool

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_results_come_by_rank_from_a_real_all_reduce(run_ranks: Run, world_size: int) -> None:
    total = torch.tensor([world_size * (world_size - 1) / 2, world_size])
    results = run_ranks(functions.all_reduce, world_size)
    assert [(rank, size) for rank, size, _ in results] == [(rank, world_size) for rank in range(world_size)]
    for _, _, value in results:
        torch.testing.assert_close(value, total, rtol=0, atol=0)


def test_workers_are_reused_across_tasks_and_sizes(rank_pool: RankPool) -> None:
    pids = rank_pool.run(functions.pid, 4)
    assert len(set(pids) | {os.getpid()}) == 5
    assert rank_pool.run(functions.pid, 2) == pids[:2]
    assert rank_pool.run(functions.pid, 4) == pids == rank_pool.pids[:4]


def test_arguments(run_ranks: Run) -> None:
    assert run_ranks(functions.add, 2, 1, 2, scale=10) == [30, 30]
    assert run_ranks(functions.add, 2, 1, per_rank=[10, 20]) == [11, 21]
    tensor = run_ranks(functions.add, 2, torch.ones(2), per_rank=[torch.zeros(2), torch.ones(2)])
    assert [value.tolist() for value in tensor] == [[1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    ("world_size", "arguments"), [(0, {}), (MAX_RANKS + 1, {}), (2, {"nodes": [1]}), (2, {"per_rank": []})]
)
def test_a_wrong_shape_is_refused(run_ranks: Run, world_size: int, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"world_size|ranks"):
        run_ranks(functions.pid, world_size, **arguments)


def test_each_task_has_a_fresh_store(run_ranks: Run) -> None:
    assert run_ranks(functions.swap_key, 2, "key") == [False, False]
    assert run_ranks(functions.swap_key, 2, "key") == [False, False]


def test_environment_is_that_of_torchrun(run_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_THE_TEST", "yes")
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]
    results = run_ranks(functions.environment, 2, *names, "FROM_THE_TEST")
    for rank, result in enumerate(results):
        assert result == dict(
            zip([*names, "FROM_THE_TEST"], [f"{rank}", f"{rank}", "2", "2", "0", "1", "yes"], strict=True)
        )


def test_torchrun_itself_gives_the_same_environment(run_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:  # in case that torchrun runs the tests
        monkeypatch.delenv(name, raising=False)
    # One short write, which no other rank's can come into.
    script = (
        "import json, os, sys\n"
        "os.write(1, json.dumps([os.environ[name] for name in sys.argv[1:]]).encode() + b'\\n')"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command = [*torchrun, sys.executable, "-c", script, *TORCHRUN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    real = sorted(json.loads(line) for line in done.stdout.splitlines())  # by RANK, which comes first
    ours = run_ranks(functions.environment, 2, *TORCHRUN)
    for theirs, own in zip(real, ours, strict=True):
        for name, value in zip(TORCHRUN, theirs, strict=True):
            if name in {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}:
                assert own[name], name
            else:
                assert own[name] == value, name


def test_nodes(run_ranks: Run) -> None:
    names = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE"]
    results = run_ranks(functions.environment, 4, *names, nodes=[3, 1])
    assert [list(result.values()) for result in results] == [
        ["0", "0", "3", "0", "2", "4"],
        ["1", "1", "3", "0", "2", "4"],
        ["2", "2", "3", "0", "2", "4"],
        ["3", "0", "1", "1", "2", "4"],
    ]


def test_env_adds_and_removes(run_ranks: Run) -> None:
    env = {"EXTRA": "1", "LOCAL_RANK": None}
    names = ["EXTRA", "LOCAL_RANK", "RANK"]
    assert run_ranks(functions.environment, 1, *names, env=env) == [
        {"EXTRA": "1", "LOCAL_RANK": None, "RANK": "0"}
    ]
    assert run_ranks(functions.environment, 1, *names) == [{"EXTRA": None, "LOCAL_RANK": "0", "RANK": "0"}]


def test_gloo_connects_lazily_unless_told(run_ranks: Run) -> None:
    names = ["TORCH_GLOO_LAZY_INIT"]
    assert run_ranks(functions.environment, 1, *names) == [{"TORCH_GLOO_LAZY_INIT": "1"}]
    assert run_ranks(functions.environment, 1, *names, lazy=False) == [{"TORCH_GLOO_LAZY_INIT": None}]
    lazy, eager = run_ranks(functions.sockets, 4), run_ranks(functions.sockets, 4, lazy=False)
    assert all(few < many for few, many in zip(lazy, eager, strict=True))


def test_a_task_leaves_nothing_behind(run_ranks: Run, rank_pool: RankPool) -> None:
    before = run_ranks(functions.surroundings, 2)
    pids = rank_pool.pids
    run_ranks(functions.disturb, 2)
    after = run_ranks(functions.surroundings, 2)
    assert rank_pool.pids == pids
    directories = [{result.pop("cwd") for result in results} for results in (before, after)]
    assert before == after
    assert after[0] == after[1]
    assert after[0] == {
        "files": [],
        "left_behind": None,
        "dtype": torch.float32,
        "deterministic": False,
        "seeds": (0, after[0]["seeds"][1]),
        "group": False,
        "threads": 1,
    }
    # The ranks of one task share a directory, which is gone after it; two tasks do not.
    assert [len(found) for found in directories] == [1, 1]
    assert len(directories[0] | directories[1]) == 2
    assert not any(Path(path).exists() for path in directories[0] | directories[1])


def test_a_context_left_running_is_destroyed(run_ranks: Run) -> None:
    for _ in range(2):
        assert run_ranks(functions.start_context, 2) == [(False, True, True)] * 2


def test_a_rank_starts_processes_as_the_platform_does(run_ranks: Run) -> None:
    # Forked from a fork server, a worker would else start a DataLoader's processes from there too: slowly.
    assert run_ranks(functions.load_with_workers, 2) == [(multiprocessing.get_start_method(), [1, 5])] * 2


def test_an_equal_mesh_of_a_past_task_is_not_used(run_ranks: Run) -> None:
    expected = torch.arange(8.0).reshape(2, 4) @ torch.arange(8.0).reshape(4, 2)
    names = []
    for spare_groups in (3, 0):
        results = run_ranks(functions.product_on_mesh, 4, spare_groups)
        names.append(results[0][1])
        for product, _ in results:
            torch.testing.assert_close(product, expected, rtol=0, atol=0)
    assert names[0] != names[1]


def test_a_warning_is_an_error_as_in_the_parent(run_ranks: Run) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(functions.warn, 1, UserWarning)
    assert failure.value.exceptions == {0: "UserWarning: take care"}


def test_a_filter_is_heeded() -> None:
    pool = RankPool([("error", "", Warning, "", 0), ("ignore", "take", UserWarning, "", 0)])
    try:
        went_on, error = pool.run(
            functions.warn, 2, per_rank=[UserWarning, DeprecationWarning], expect_errors=True
        )
        pids = pool.pids
    finally:
        pool.close()
    assert went_on == "went on"
    assert (error.type_name, error.message) == ("DeprecationWarning", "take care")
    assert pool.pids == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_rank_that_raises(rank_pool: RankPool) -> None:
    before, start = rank_pool.run(functions.pid, 4), time.monotonic()
    with pytest.raises(RankFailure) as failure:
        rank_pool.run(functions.raise_on, 4, 2)
    assert time.monotonic() - start < 10  # of the 60 allowed
    found = failure.value
    assert found.exceptions == {2: "ValueError: the cause on rank 2"}
    assert sorted(found.tracebacks) == [0, 1, 2, 3]
    assert 'raise ValueError(f"the cause on rank {rank}")' in found.tracebacks[2]
    for rank in (0, 1, 3):
        assert found.states[rank] == "hanging (1 s after rank 2 raised)"
        assert "in all_reduce" in found.tracebacks[rank]
        assert "in raise_on" in found.tracebacks[rank]
    lines = str(found).splitlines()
    assert lines[0].startswith(
        "pool_functions.raise_on at world size 4: rank 2 raised ValueError: the cause on rank 2; "
    )
    assert [line.split()[2] for line in lines if line.startswith("----- rank")] == ["0", "1", "2", "3"]
    assert set(rank_pool.run(functions.pid, 4)).isdisjoint(before)


def test_the_cause_may_follow_its_echoes(run_ranks: Run) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(functions.raise_late, 2, 1)
    assert failure.value.exceptions == {0: "ConnectionError: an echo", 1: "ValueError: the cause"}


def test_a_rank_that_hangs(rank_pool: RankPool) -> None:
    before, start = rank_pool.run(functions.pid, 2), time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 hanging") as failure:
        rank_pool.run(functions.hang_on, 2, 1, timeout=1.0, expect_errors=True)
    assert 1 <= time.monotonic() - start < 10
    assert failure.value.states == {0: "passed", 1: "hanging (after 1 s)"}
    assert failure.value.exceptions == {}
    stack = failure.value.tracebacks[1]
    source = Path(functions.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "the line that hangs" in text)
    assert f"line {line} in hang_on" in stack
    assert stack in str(failure.value) + "\n"
    assert set(rank_pool.run(functions.pid, 2)).isdisjoint(before)


@pytest.mark.parametrize(
    ("code", "state"), [(3, "died with exit code 3"), (-signal.SIGKILL, "died of SIGKILL")]
)
def test_a_rank_that_dies(run_ranks: Run, code: int, state: str) -> None:
    with pytest.raises(RankFailure, match=f"rank 1 {state}") as failure:
        run_ranks(functions.exit_on, 2, 1, code, expect_errors=True)
    assert failure.value.states == {0: "passed", 1: state}
    assert run_ranks(functions.add, 2, 1, 2) == [3, 3]


def test_a_worker_that_dies_between_tasks_is_replaced(rank_pool: RankPool) -> None:
    before = rank_pool.run(functions.pid, 2)
    os.kill(before[1], signal.SIGKILL)
    rank_pool._workers[1].process.join(5)
    assert set(rank_pool.run(functions.pid, 2)).isdisjoint(before)


def test_expected_errors_keep_the_pool(rank_pool: RankPool) -> None:
    before = rank_pool.run(functions.pid, 4)
    results = rank_pool.run(functions.raise_or_add, 4, per_rank=[1, -1, 3, -3], expect_errors=True)
    assert (results[0], results[2]) == (2, 4)
    for rank in (1, 3):
        error = results[rank]
        assert isinstance(error, RankError)
        assert (error.type_name, error.message, error.module) == ("KeyError", f"-{rank}", "builtins")
        assert "raise KeyError(value)" in error.traceback
    assert rank_pool.run(functions.pid, 4) == before


def test_a_result_that_cannot_be_pickled_is_an_error(run_ranks: Run) -> None:
    (error,) = run_ranks(functions.unpicklable, 1, expect_errors=True)
    assert "pickle" in error.message


def test_lightning_is_preloaded(run_ranks: Run) -> None:
    for name in ("pytorch_lightning", "lightning.pytorch", "torch.distributed.tensor.parallel"):
        assert run_ranks(functions.loaded, 1, name) == [True]
