"""What the tests of the pool run on each rank."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from rlightning_groups import ParallelContext, is_initialized


def pid() -> int:
    return os.getpid()


def add(first: Any, second: Any, *, scale: int = 1) -> Any:
    return (first + second) * scale


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def all_reduce() -> tuple[int, int, torch.Tensor]:
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank()), 1.0])
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value


def swap_key(key: str) -> bool:
    """Whether ``key`` was in the store; it is from now on."""
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    found = store.check([key])
    dist.barrier()
    store.set(key, "here")
    return found


def sockets() -> int:
    """The open sockets after one rank has only set up its group."""
    dist.init_process_group("gloo")
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sum("socket:" in link for link in links)


def raise_on(rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        raise ValueError(f"the cause on rank {rank}")
    dist.all_reduce(torch.zeros(1))


def raise_late(rank: int) -> None:
    """Raise an echo on every rank but one, which raises the cause a little later."""
    if int(os.environ["RANK"]) == rank:
        time.sleep(0.3)
        raise ValueError("the cause")
    raise ConnectionError("an echo")


def raise_or_add(value: int) -> int:
    if value < 0:
        raise KeyError(value)
    return value + 1


def hang_on(rank: int) -> str:
    """Hang on one rank, after its signal handlers were reset as Lightning's trainer does."""
    if int(os.environ["RANK"]) == rank:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        threading.Event().wait()  # the line that hangs
    return "done"


def exit_on(rank: int, code: int) -> None:
    """End the process of one rank: with an exit code, or by a signal where ``code`` is negative."""
    if int(os.environ["RANK"]) != rank:
        return
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def disturb() -> None:
    """Change the global state that a task must not leave behind."""
    Path("left.txt").write_text("left")
    os.chdir("/")
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    random.seed(7)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")


def surroundings() -> dict[str, Any]:
    return {
        "cwd": str(Path.cwd()),
        "files": sorted(path.name for path in Path.cwd().iterdir()),
        "left_behind": os.environ.get("LEFT_BEHIND"),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seeds": (torch.initial_seed(), random.random()),
        "group": dist.is_initialized(),
        "threads": torch.get_num_threads(),
    }


def load_with_workers() -> tuple[str, list[int]]:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1)
    return multiprocessing.get_start_method(), [int(batch.sum()) for (batch,) in loader]


def start_context() -> tuple[bool, bool, bool]:
    """Whether a context or a world ran before; whether each runs once the context is started."""
    before = is_initialized() or dist.is_initialized()
    ParallelContext().initialize()
    return before, is_initialized(), dist.is_initialized()


def warn(category: type[Warning]) -> str:
    warnings.warn("take care", category, stacklevel=1)
    return "went on"


def unpicklable() -> Any:
    return lambda: None


def loaded(name: str) -> bool:
    return name in sys.modules


def product_on_mesh(spare_groups: int) -> tuple[torch.Tensor, list[str]]:
    """Multiply sharded matrices; the spare groups shift the names of the mesh's groups."""
    dist.init_process_group("gloo")
    for _ in range(spare_groups):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    placements = [Replicate(), Shard(1)], [Replicate(), Shard(0)]
    left = distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, placements[0])
    right = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, placements[1])
    product = left @ right
    assert isinstance(product, DTensor)
    names = [str(group.group_name) for group in product.device_mesh.get_all_groups()]
    return product.full_tensor(), names
