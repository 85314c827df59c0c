"""Attention over a growing sequence: seconds and memory, by one process and by several ranks.

Forward and backward, causal, zigzag. The ways alternate in one run; printed is the median over repeats of
the slowest rank, and the largest peak of any rank: bytes of live tensors that the call added, gradients
included::

    python benchmarks/sequence.py --ranks 2 4 --lengths 1024 2048 4096 --repeats 3

Ranks are processes of one thread. With fewer cores than ranks they share them, so that times show overhead
and not speed-up; memory is the same everywhere.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlightning_groups import ParallelContext, ParallelMode
from rlightning_groups.collectives import all_gather_object, barrier
from rlightning_groups.sequence import (
    SequenceShard,
    hybrid_attention,
    register_hybrid_groups,
    ring_attention,
    shard_sequence,
    ulysses_attention,
)

MODE = ParallelMode.SEQUENCE_PARALLEL
HEADS, HEAD_DIM, MEBI = 8, 64, 2**20

Way = Callable[[list[Tensor], SequenceShard], Tensor]


def single(qkv: list[Tensor], shard: SequenceShard) -> Tensor:
    return scaled_dot_product_attention(*qkv, is_causal=True)


def ulysses(qkv: list[Tensor], shard: SequenceShard) -> Tensor:
    return ulysses_attention(*qkv, causal=True, shard=shard)


def ring(qkv: list[Tensor], shard: SequenceShard) -> Tensor:
    return ring_attention(*qkv, causal=True, shard=shard)


def hybrid(qkv: list[Tensor], shard: SequenceShard) -> Tensor:
    return hybrid_attention(*qkv, causal=True, ulysses_size=2, shard=shard)


class LiveBytes(TorchDispatchMode):
    """Follows how many bytes the tensors made inside hold, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.add(x.untyped_storage())
        return result

    def add(self, storage: Any) -> None:
        """Count a storage until it dies."""
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.free, size)

    def free(self, size: int) -> None:
        """Count it no more."""
        self.now -= size


def step(way: Way, qkv: list[Tensor], shard: SequenceShard) -> None:
    for x in qkv:
        x.grad = None
    way(qkv, shard).sum().backward()


def measure(rank: int, size: int, port: int, lengths: list[int], repeats: int) -> None:
    """What one rank does; rank 0 prints."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    ParallelContext().initialize(sequence_parallel_size=size, backend="gloo")
    ways: list[Way] = [single, ring] if HEADS % size else [single, ulysses, ring]
    if size % 2 == 0 and size > 2:
        register_hybrid_groups(2)
        ways.append(hybrid)
    for length in lengths:
        whole = [torch.randn(1, HEADS, length, HEAD_DIM) for _ in range(3)]
        shard = shard_sequence(whole, dim=2, scheme="zigzag")
        given = {way: [x.detach().clone() for x in whole if way is single] or shard.batch for way in ways}
        for x in (x for qkv in given.values() for x in qkv):
            x.requires_grad_()
        seconds: dict[Way, list[float]] = {way: [] for way in ways}
        peaks: dict[Way, int] = {}
        for repeat in range(repeats + 1):  # the first one warms up, and measures memory
            for way in ways:
                barrier(MODE)
                start = time.perf_counter()
                if way is not single or rank == 0:
                    if repeat:
                        step(way, given[way], shard)
                    else:
                        with LiveBytes() as live:
                            step(way, given[way], shard)
                        peaks[way] = live.peak
                seconds[way].append(max(all_gather_object(time.perf_counter() - start, MODE)))
        for way in ways:
            taken = statistics.median(seconds[way][1:])
            peak = max(all_gather_object(peaks.get(way, 0), MODE))
            if rank == 0:
                if way is single:
                    base = taken, peak
                print(
                    f"{size:5} {length:7} {length // size:6}  {way.__name__:8} {taken:8.3f} "
                    f"{taken / base[0]:6.2f} {peak / MEBI:9.1f} {peak / base[1]:6.2f}",
                    flush=True,
                )
    ParallelContext().destroy()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {HEADS} heads of {HEAD_DIM}, float32, batch 1")
    print("ranks  length  local  way       seconds  ratio  peak MiB  ratio", flush=True)
    for size in arguments.ranks:
        torch.multiprocessing.spawn(
            measure, (size, free_port(), arguments.lengths, arguments.repeats), nprocs=size
        )


if __name__ == "__main__":
    main()
