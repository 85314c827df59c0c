"""The example as a user runs it: Lightning itself starts the other processes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED"}


def run_example(
    directory: Path, *options: str, devices: int = 4, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    small = ["--devices", str(devices), "--max-steps", "6", "--batch-size", "4", "--length", "32"]
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_lm.py"), "--accelerator", "cpu", *small, *options],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_example(tmp_path: Path) -> None:
    done = run_example(tmp_path, "--tensor-parallel-size", "2", "--sequence-parallel-size", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout + done.stderr
    assert told.count("4 ranks = data 1 x sequence 2 x tensor 2, order tp-sp-dp, 1 node") == 1
    assert told.count("SEQUENCE_PARALLEL    2     0,2  1,3") == 1
    log = tmp_path / "runs" / "train_lm" / "version_0"
    with (log / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    (validation,) = (float(row["val_loss"]) for row in rows if row.get("val_loss"))
    assert 1 < validation < 6  # chance is ln 256 = 5.5
    assert f"validation loss: {validation:.3f}" in done.stdout
    assert (log / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert {path.suffix for path in (log / "checkpoints").iterdir()} == {".ckpt"}
    assert (log / "checkpoints" / "last.ckpt").exists()


def test_example_with_a_size_that_does_not_divide(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = run_example(tmp_path, "--tensor-parallel-size", "3", devices=2)
    assert done.returncode != 0
    assert "LayoutError: tensor_parallel_size=3 does not divide world_size=2" in done.stderr
    assert "sizes that do: 1, 2" in done.stderr
    assert time.monotonic() - begin < 60
