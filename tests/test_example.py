"""The example as a user runs it: by torchrun, and where Lightning itself starts the other processes."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pool import TORCHRUN

Run = Callable[..., list[Any]]
ROOT = Path(__file__).parent.parent
NO_LAUNCHER = dict.fromkeys((*TORCHRUN, "PL_GLOBAL_SEED"))


@contextlib.contextmanager
def output_in(path: Path) -> Iterator[None]:
    """Send to a file what this process and those that it starts write; if there is an error, show it, too."""
    streams = (sys.stdout, sys.stderr)
    with path.open("w") as file:
        kept = [os.dup(stream.fileno()) for stream in streams]
        for stream in streams:
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
        failed = True
        try:
            yield
            failed = False
        finally:
            for stream, descriptor in zip(streams, kept, strict=True):
                stream.flush()
                os.dup2(descriptor, stream.fileno())
                os.close(descriptor)
            if failed:
                sys.stderr.write(path.read_text())


def run_example(directory: Path, *options: str) -> str:
    """Run the example as a script, and return what was written by it and the processes that it started."""
    script, output = ROOT / "examples" / "train_lm.py", Path(f"output-{os.environ.get('RANK')}.txt")
    small = ["--accelerator", "cpu", "--max-steps", "8", "--batch-size", "4", "--length", "32"]
    os.chdir(directory)
    with mock.patch.object(sys, "argv", [str(script), *small, *options]), warnings.catch_warnings():
        warnings.resetwarnings()  # to a user they are no errors
        with output_in(output):
            runpy.run_path(str(script), run_name="__main__")
    return output.read_text()


def loss_of(directory: Path, told: str) -> float:
    """The validation loss of a run that left behind and told what it should."""
    log = directory / "runs" / "train_lm" / "version_0"
    with (log / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    (validation,) = (float(row["val_loss"]) for row in rows if row.get("val_loss"))
    assert f"validation loss: {validation:.3f}" in told
    assert (log / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert {path.suffix for path in (log / "checkpoints").iterdir()} == {".ckpt"}
    assert (log / "checkpoints" / "last.ckpt").exists()
    return validation


def test_example(run_ranks: Run, tmp_path: Path) -> None:
    """It learns, under torchrun and where Lightning starts the other process, with the same losses."""
    by_torchrun, by_lightning = tmp_path / "torchrun", tmp_path / "lightning"
    by_torchrun.mkdir(), by_lightning.mkdir()
    options = ("--devices", "4", "--tensor-parallel-size", "2", "--sequence-parallel-size", "2")
    told = "".join(run_ranks(run_example, 4, by_torchrun, *options, timeout=120))
    assert told.count("4 ranks = data 1 x sequence 2 x tensor 2, order tp-sp-dp, 1 node") == 1
    assert told.count("SEQUENCE_PARALLEL    2     0,2  1,3") == 1
    validation = loss_of(by_torchrun, told)
    assert 1 < validation < math.log(256) - 0.5  # chance is ln 256 = 5.5

    env = {**NO_LAUNCHER, "PYTHONPATH": str(ROOT)}
    (told,) = run_ranks(run_example, 1, by_lightning, "--devices", "2", env=env, timeout=120)
    assert told.count("2 ranks = data 2 x sequence 1 x tensor 1, order tp-sp-dp, 1 node") == 1
    assert loss_of(by_lightning, told) == pytest.approx(validation, abs=1e-4)


def test_example_with_a_size_that_does_not_divide(run_ranks: Run, tmp_path: Path) -> None:
    options = ("--devices", "2", "--tensor-parallel-size", "3")
    for error in run_ranks(run_example, 2, tmp_path, *options, expect_errors=True):
        assert error.type_name == "LayoutError"
        assert "tensor_parallel_size=3 does not divide world_size=2" in error.message
        assert "sizes that do: 1, 2" in error.message
