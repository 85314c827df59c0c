"""Checkpoints over a growing state: seconds and memory to save and to load, ours beside Lightning's.

Blocks of a norm and two linear layers, by data 2 x tensor 2 ranks; the state is weights and both moments of
AdamW, in float32. A ``file`` holds full tensors, a ``directory`` the parts. The ways alternate in one run;
printed is the median over repeats with its spread, times of the slowest rank, and as ``x`` the ratio to
ModelParallelStrategy with the same kind of checkpoint::

    python benchmarks/checkpoint.py --widths 256 512 768 --repeats 3

Each measurement is four new processes of one thread, forked from a server that has imported everything. They
train one step, call ``Trainer.save_checkpoint``, forget weights and moments, and take them back by the calls
that ``Trainer.fit(ckpt_path=...)`` makes of the strategy; then each compares them with what it had. Either
call is the first in its process.

Extra MiB are a rank's anonymous memory at its highest, above what it held at the start of the call, less the
moments that a load has to bring. It is read from ``/proc/<pid>/statm``, so on Linux only, every few
milliseconds by the process that started the ranks. Pages of a file that is mapped are not anonymous, unless
they were written to. What is freed counts no longer: glibc is told to give back every block of a MiB or more,
as it does by itself with those of real models, above 32 MiB.

What is loaded was just written and comes from the page cache. Ours, and torch's directories, return when the
disk has everything; Lightning's file does not wait for it. The line above each table says what that costs
here for as many bytes, written by one process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from rlightning_groups import ParallelContext, ParallelMode
from rlightning_groups.pytorch_lightning import HybridParallelStrategy

DATA, TENSOR, MEBI = 2, 2, 2**20
WORLD = DATA * TENSOR
PAGE, INTERVAL = os.sysconf("SC_PAGE_SIZE"), 0.003
# What the calls import when they are first made is not what is measured.
PRELOAD = [
    "pytorch_lightning.strategies",
    "rlightning_groups.pytorch_lightning",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
CALLS = ("save", "load")


# ------------------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    """A norm and two linear layers beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = (
            nn.utils.skip_init(nn.Linear, *sizes, bias=False)
            for sizes in ((width, 4 * width), (4 * width, width))
        )
        for linear in (self.up, self.down):  # drawing would take longer than all that is measured
            weight = linear.weight.detach()
            weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to tokens."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(LightningModule):
    """Linear layers over tensor ranks; the strategy does the rest."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to tokens."""
        for block in self.blocks:
            x = block(x)
        return x

    def tensor_parallel(self, mesh: Any) -> None:
        """Cut every block over the ranks of a mesh."""
        for block in self.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def configure_model(self) -> None:
        """Cut the model over tensor ranks."""
        self.tensor_parallel(ParallelContext().device_mesh(ParallelMode.TENSOR_PARALLEL))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Any loss."""
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Two moments for every weight."""
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        """One sample for each data-parallel rank."""
        return DataLoader(torch.randn(DATA, self.width), batch_size=1)  # type: ignore[arg-type]


class LightningsModel(Model):
    """The same for ModelParallelStrategy, which leaves all of it to the user."""

    def configure_model(self) -> None:
        """Cut the model over all ranks."""
        self.tensor_parallel(self.device_mesh["tensor_parallel"])
        for module in (*self.blocks, self):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


class Way(NamedTuple):
    """One way to keep checkpoints.

    Attributes:
        model: makes the module; (width, blocks).
        strategy: makes the strategy.
        peer: the way to compare with.
    """

    model: Callable[[int, int], LightningModule]
    strategy: Callable[[], Any]
    peer: str


def ours(data_parallel: Any, directory: bool) -> Way:
    return Way(
        Model,
        lambda: HybridParallelStrategy(
            TENSOR, data_parallel=data_parallel, save_distributed_checkpoint=directory
        ),
        f"lightning {KINDS[directory]}",
    )


def lightnings(directory: bool) -> Way:
    return Way(
        LightningsModel,
        lambda: ModelParallelStrategy(DATA, TENSOR, save_distributed_checkpoint=directory),
        f"lightning {KINDS[directory]}",
    )


KINDS = {False: "file", True: "directory"}
WAYS = {
    f"{name} {kind}": make(directory)
    for directory, kind in KINDS.items()
    for name, make in {
        "replicate": lambda directory: ours("replicate", directory),
        "shard": lambda directory: ours("shard", directory),
        "lightning": lightnings,
    }.items()
}


# --------------------------------------------------------------------------------------------- of a rank


class Measured(NamedTuple):
    """One call on one rank: when, the anonymous memory before and after, and what it had to add to it."""

    start: float
    end: float
    before: int
    after: int
    needed: int


def anonymous(pid: int | str = "self") -> int:
    """Bytes of anonymous memory of a process; 0 when it is gone."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except OSError:
        return 0
    return (resident - shared) * PAGE


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Measure(Callback):
    """Saves and loads at the end of the training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.measured: dict[str, Measured] = {}

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Save, forget, load and compare."""
        strategy, optimizer = trainer.strategy, trainer.optimizers[0]
        with self.measure("save", trainer):
            trainer.save_checkpoint(self.path)
        expected = [value.sum(dtype=torch.float64) for value in self.held(optimizer)]
        optimizer.zero_grad()
        optimizer.state.clear()
        for parameter in module.parameters():
            local(parameter).zero_()
        with self.measure("load", trainer):
            checkpoint = strategy.load_checkpoint(self.path)
            strategy.load_model_state_dict(checkpoint)
            if strategy.lightning_restore_optimizer:
                strategy.load_optimizer_state_dict(checkpoint)
            del checkpoint
        if expected != [value.sum(dtype=torch.float64) for value in self.held(optimizer)]:
            raise RuntimeError(f"rank {trainer.global_rank} has loaded something else than was saved")

    @contextmanager
    def measure(self, call: str, trainer: Trainer) -> Iterator[None]:
        """Measure what happens inside, on all ranks from the same moment on."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is to count again when it is taken again
        held = sum(value.nbytes for value in self.held(trainer.optimizers[0]))
        before = anonymous()
        trainer.strategy.barrier()
        start = time.monotonic()
        yield
        end = time.monotonic()
        after = anonymous()
        needed = sum(value.nbytes for value in self.held(trainer.optimizers[0])) - held
        self.measured[call] = Measured(start, end, before, after, needed)

    @staticmethod
    def held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """What this rank holds of the weights and the moments."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        moments = (
            optimizer.state.get(p, {}).get(key) for p in parameters for key in ("exp_avg", "exp_avg_sq")
        )
        return [local(value) for value in (*parameters, *moments) if value is not None]


def play(pipe: Connection, rank: int, port: int, way: str, sizes: tuple[int, int], directory: str) -> None:
    """Be one rank, and send what was measured or what went wrong."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    tempfile.tempdir = directory  # Lightning writes there first, and then moves the file
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    try:
        measure = Measure(Path(directory) / "checkpoint")
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        Trainer(
            accelerator="cpu",
            devices=WORLD,
            strategy=WAYS[way].strategy(),
            max_steps=1,
            callbacks=measure,
            **dict.fromkeys(quiet, False),
        ).fit(WAYS[way].model(*sizes))
        pipe.send(measure.measured)
    except BaseException as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    # Whoever leaves first would be what the others complain of; the parent ends all of them.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()


# ------------------------------------------------------------------------------------------- of their parent


class Run(NamedTuple):
    """One call on all ranks: its seconds, and extra bytes on rank 0 and on the worst of the others."""

    seconds: float
    first: int
    others: int


def run(way: str, sizes: tuple[int, int], directory: str, timeout: float) -> dict[str, Run] | str:
    """One measurement, or what went wrong."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    processes, pipes = [], []
    samples: list[tuple[float, list[int]]] = []
    measured: dict[int, dict[str, Measured]] = {}
    deadline = time.monotonic() + timeout
    try:
        for rank in range(WORLD):
            pipe, theirs = context.Pipe(duplex=False)
            of_rank = (theirs, rank, port, way, sizes, directory)
            processes.append(context.Process(target=play, args=of_rank, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(pipe)
        while len(measured) < WORLD:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in measured]
            for pipe in wait(waiting, INTERVAL):
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    said = pipes[rank].recv()
                except EOFError:
                    return f"rank {rank} died"
                if isinstance(said, str):
                    return said
                measured[rank] = said
            samples.append((time.monotonic(), [anonymous(process.pid or 0) for process in processes]))
            if samples[-1][0] > deadline:
                return f"not done after {timeout:.0f} seconds"
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    result = {}
    for call in CALLS:
        of = [measured[rank][call] for rank in range(WORLD)]
        extra = [
            max([m.before, m.after, *(held[rank] for now, held in samples if m.start <= now <= m.end)])
            - m.before
            - m.needed
            for rank, m in enumerate(of)
        ]
        result[call] = Run(max(m.end - m.start for m in of), extra[0], max(extra[1:]))
    return result


def disk(directory: str, size: int) -> tuple[float, float]:
    """Seconds to write so many bytes, and to have the disk hold them."""
    block = bytes(16 * MEBI)
    file = Path(directory) / "bytes"
    with file.open("wb", buffering=0) as stream:
        start = time.monotonic()
        for at in range(0, size, len(block)):
            stream.write(block[: size - at])
        written = time.monotonic()
        os.fsync(stream.fileno())
        synced = time.monotonic()
    file.unlink()
    return written - start, synced - start


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def row(call: str, runs: list[dict[str, Run]], peer: list[dict[str, Run]] | None) -> str:
    """What the table says of one call by one way."""
    seconds = sorted(run[call].seconds for run in runs)
    median = statistics.median(seconds)
    ratio = f"{median / statistics.median(run[call].seconds for run in peer):.2f}" if peer else "-"
    first = statistics.median(run[call].first for run in runs) / MEBI
    others = statistics.median(run[call].others for run in runs) / MEBI
    spread = f"({seconds[0]:.3f}-{seconds[-1]:.3f})"
    return f"{median:>9.3f}  {spread:<17}{ratio:>7}{first:>9.1f}{others:>9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 768])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--directory", help="where to write; the system's temporary directory unless given")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one measurement")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without removing what was written
    os.environ.update(OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_=str(MEBI))  # the fork server inherits them

    print(f"torch {torch.__version__}, {os.cpu_count()} cores, data {DATA} x tensor {TENSOR}, float32")
    print(f"median of {arguments.repeats} (lowest-highest)")
    for width in arguments.widths:
        sizes = width, arguments.blocks
        state = 3 * sum(parameter.nbytes for parameter in Model(*sizes).parameters())
        runs: dict[str, list[dict[str, Run]]] = {way: [] for way in arguments.ways}
        failures: dict[str, str] = {}
        disks = []
        for _ in range(arguments.repeats):
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                disks.append(disk(directory, state))
            for way in arguments.ways:
                if way in failures:
                    continue
                with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                    done = run(way, sizes, directory, arguments.timeout)
                if isinstance(done, str):
                    failures[way] = done
                    del runs[way]
                else:
                    runs[way].append(done)
        written, synced = (statistics.median(column) for column in zip(*disks, strict=True))
        print(
            f"\nwidth {width}: {state / MEBI:.0f} MiB of state; the bytes alone {written:.3f} s, "
            f"until the disk has them {synced:.3f} s"
        )
        print(f"{'':<27}{'seconds':>9}  {'spread':<17}{'x':>7}{'rank 0':>9}{'others':>9}   extra MiB")
        for call in CALLS:
            for way, results in runs.items():
                print(f"{call}  {way:<21}{row(call, results, runs.get(WAYS[way].peer))}")
        for way, text in failures.items():
            print(f"{way} failed: {text}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
