"""Whatever goes wrong on one rank, the others end in time, and say which rank it was."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure, Report
from strategy_models import BATCH, LM, TENSOR, Run, new_trainer, strategy_of
from torch import Tensor

from rlightning_groups import AgreementError, ParallelContext, get_group
from rlightning_groups.collectives import barrier
from rlightning_groups.failures import explain, is_echo, note

TIMEOUT = 4.0  # of a collective
FAULTY = 1  # the rank that goes wrong, of data 2 x tensor 2
PHASES = (*("configure_model", "forward", "backward", "optimizer", "validation", "checkpoint", "teardown"),)
FAULTS = ("raise", "exit", "SIGKILL", "SIGTERM", "SIGSTOP", "skip", "shape")


def go_wrong(fault: str) -> None:
    """What happens on the faulty rank; its tensor peer is about to meet it in a collective."""
    if fault == "raise":
        raise ZeroDivisionError("a bug of the user's")
    if fault == "exit":
        sys.exit(3)
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
        time.sleep(0.5)


class Faulty(LM):
    """Meets its tensor peer in one more collective in each phase, unless something goes wrong there."""

    def __init__(self, phase: str, fault: str) -> None:
        super().__init__(tensor="dtensor", count=2 * BATCH)
        self.phase, self.fault = phase, fault

    def meet(self, phase: str) -> None:
        if phase == self.phase:
            wrong = dist.get_rank() == FAULTY
            if wrong:
                go_wrong(self.fault)
            if not (wrong and self.fault == "skip"):
                length = 3 if wrong and self.fault == "shape" else 2
                dist.all_reduce(torch.zeros(length), group=get_group(TENSOR))

    def configure_model(self) -> None:
        super().configure_model()
        self.meet("configure_model")

    def training_step(self, window: Tensor, index: int) -> Tensor:
        self.meet("forward")
        loss = super().training_step(window, index)
        loss.register_hook(lambda _: self.meet("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.meet("optimizer")

    def on_validation_start(self) -> None:
        self.meet("validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.meet("checkpoint")

    def teardown(self, stage: str) -> None:
        self.meet("teardown")


def run_into(phase: str, fault: str, path: str) -> float:
    model = Faulty(phase, fault)
    trainer = new_trainer(strategy_of(tensor_parallel_size=2, timeout=TIMEOUT), max_epochs=1)
    try:
        trainer.fit(model)
        trainer.save_checkpoint(path)
    except BaseException as error:
        note(error)  # as the interpreter does with an error that nobody catches
        raise
    return time.monotonic()


def others(run_ranks: Run, *arguments: str) -> RankFailure:
    """How the ranks ended; a stopped one never does by itself, and the start takes a while."""
    options: Any = {"timeout": 3 * TIMEOUT + 8, "expect_errors": True}
    try:
        results = run_ranks(run_into, 4, *arguments, **options)
    except RankFailure as failure:
        return failure
    return RankFailure("all reported", {rank: Report("raised", error=e) for rank, e in enumerate(results)})


def cells() -> list[tuple[str, str]]:
    """A few of the table's cells; all of them where ``RLIGHTNING_GROUPS_FULL_FAULTS`` is set."""
    if os.environ.get("RLIGHTNING_GROUPS_FULL_FAULTS"):
        return list(itertools.product(PHASES, FAULTS))
    return [
        ("configure_model", "SIGKILL"),
        ("forward", "raise"),
        ("backward", "exit"),
    ]


@pytest.mark.parametrize(("phase", "fault"), cells())
def test_the_others_end_in_time_and_say_who_it_was(
    run_ranks: Run, tmp_path: Path, phase: str, fault: str
) -> None:
    failure = others(run_ranks, phase, fault, str(tmp_path / "x.ckpt"))
    states = {rank: state for rank, state in failure.states.items() if rank != FAULTY}
    messages = {rank: message for rank, message in failure.exceptions.items() if rank != FAULTY}
    assert not any("hanging" in state for state in states.values()), failure
    if fault == "raise":
        told = "rank 1 had failed: ZeroDivisionError: a bug of the user's"
    elif fault == "exit":
        told = "rank 1 had failed: SystemExit: 3"
    elif fault == "SIGKILL":
        told = "the process of rank 1 has ended"
    elif fault == "SIGSTOP":
        told = "the process of rank 1 is stopped"
    else:
        return  # a backend that meets another collective than its own may end the process
    assert set(messages) == {0, 2, 3}
    for rank, message in messages.items():
        assert told in message, f"rank {rank}: {message}"
    assert "in a collective over TENSOR_PARALLEL (ranks 0-1): " in messages[0]


def late(mode: str) -> list[Any]:
    """Rank 2 skips a barrier; afterwards all meet in the next one."""
    ParallelContext().initialize(tensor_parallel_size=2, backend="gloo")
    rank = dist.get_rank()
    barrier(mode, timeout=20)
    message, start = None, time.monotonic()
    if rank == 2:
        time.sleep(2.5)  # or it would come to the others' barrier after all
    else:
        try:
            barrier(mode, timeout=1.0)
        except AgreementError as error:
            message = str(error)
    seconds = time.monotonic() - start
    barrier("GLOBAL", timeout=20)
    barrier(mode, timeout=20)
    return [message, seconds]


def test_a_barrier_says_who_is_missing(run_ranks: Run) -> None:
    missing = "rank 2 did not call barrier({}) within 1 s; {} did. "
    for mode, told in [("GLOBAL", [0, 1, 3]), (TENSOR, [3])]:
        for rank, (message, seconds) in enumerate(run_ranks(late, 4, mode)):
            if rank in told:
                assert message.startswith(
                    missing.format(mode, f"{len(told)} of {2 if mode == TENSOR else 4}")
                )
                assert 0.9 < seconds < 10
            else:
                assert message is None


def test_what_is_an_echo() -> None:
    gloo = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
    assert is_echo(RuntimeError(gloo))
    assert is_echo(dist.DistBackendError("NCCL error"))
    assert not is_echo(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_echo(ValueError(gloo))


def unheard() -> list[str | None]:
    """What rank 0 is told while rank 1 has said nothing, and once it has."""
    ParallelContext().initialize(backend="gloo")
    echo = RuntimeError("gloo: Connection closed by peer")
    if dist.get_rank() == 1:
        barrier("GLOBAL", timeout=20)
        own = explain(ValueError("bad luck"))
        barrier("GLOBAL", timeout=20)
        return [own]
    before = explain(echo, wait=0.3)
    barrier("GLOBAL", timeout=20)
    barrier("GLOBAL", timeout=20)
    return [before, explain(echo, wait=5)]


def test_a_rank_that_nobody_can_look_at(run_ranks: Run) -> None:
    first, second = run_ranks(unheard, 2)
    assert second == [None]  # its own error needs no explanation
    assert first == [
        "rank 1 said nothing within 0.3 s: late, stopped, or gone",
        "rank 1 had failed: ValueError: bad luck",
    ]
