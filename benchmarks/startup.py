"""Start-up at scale: CPU seconds and memory of one rank, by world size, ours beside what users would write.

Each measurement is a process of its own that plays one rank of a world over torch's fake backend; the ways
alternate, and what is printed is the median with its spread, and ratios from the same run::

    python benchmarks/startup.py --world-sizes 1024 8192 65536 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

TENSOR, SEQUENCE, NODE = 8, 2, 8
MODES = ("TENSOR_PARALLEL", "SEQUENCE_PARALLEL", "DATA_PARALLEL", "TRAIN_DATA_PARALLEL")


def ours(world_size: int) -> None:
    from rlightning_groups import ParallelContext

    ParallelContext().initialize(tensor_parallel_size=TENSOR, sequence_parallel_size=SEQUENCE)


def own_groups_by_hand(world_size: int) -> None:
    """The floor: nothing but the groups this rank is in."""
    import torch.distributed as dist

    rank, stride = dist.get_rank(), TENSOR * SEQUENCE
    tensor = [rank // TENSOR * TENSOR + i for i in range(TENSOR)]
    sequence = [rank // stride * stride + rank % TENSOR + i * TENSOR for i in range(SEQUENCE)]
    data = list(range(rank % stride, world_size, stride))
    train = list(range(rank % TENSOR, world_size, TENSOR))
    for ranks in (train, data, sequence, tensor, [rank]):
        dist.new_group(ranks, use_local_synchronization=True)


def naive_loop(world_size: int) -> None:
    """Every rank makes every group, as the documentation of new_group shows it."""
    import torch.distributed as dist

    from rlightning_groups import ParallelLayout

    layout = ParallelLayout(world_size, tensor_parallel_size=TENSOR, sequence_parallel_size=SEQUENCE)
    for mode in MODES:
        for ranks in layout.groups(mode):
            dist.new_group(ranks)


def device_mesh(world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    shape = (world_size // (TENSOR * SEQUENCE), SEQUENCE, TENSOR)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence", "tensor"))
    mesh["data", "sequence"]._flatten("train")


WAYS = {f.__name__: f for f in (ours, own_groups_by_hand, naive_loop, device_mesh)}


def measure(way: str, world_size: int) -> dict[str, float]:
    """Run one way in this process; CPU seconds and MiB that it added."""
    import torch.distributed as dist
    from torch.distributed import device_mesh as _  # noqa: F401 - imports are not what is measured
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import rlightning_groups.context  # noqa: F401

    dist.init_process_group("fake", store=FakeStore(), rank=world_size // 2 + 3, world_size=world_size)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    WAYS[way](world_size)
    seconds = time.process_time() - start
    return {
        "seconds": seconds,
        "mebi": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "WORLD_SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], int(arguments.one[1]))))
        return

    print(f"one rank, tensor {TENSOR}, sequence {SEQUENCE}; median of {arguments.repeats} (lowest-highest)")
    print(f"{'world':>7}  {'way':<20}{'CPU s':>9}  {'spread':<17}{'MiB':>7}  {'x ours':>7}")
    for world_size in arguments.world_sizes:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(arguments.repeats):
            for way in WAYS:
                command = [sys.executable, __file__, "--one", way, str(world_size)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                runs[way].append(json.loads(done.stdout.splitlines()[-1]))
        base = statistics.median(run["seconds"] for run in runs["ours"])
        for way, results in runs.items():
            seconds = sorted(run["seconds"] for run in results)
            median = statistics.median(seconds)
            mebi = statistics.median(run["mebi"] for run in results)
            spread = f"({seconds[0]:.4f}-{seconds[-1]:.4f})"
            print(
                f"{world_size:>7}  {way:<20}{median:>9.4f}  {spread:<17}{mebi:>7.1f}  {median / base:>7.2f}"
            )


if __name__ == "__main__":
    main()
