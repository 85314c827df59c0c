"""How this process was started: the launcher's facts, the store of the ranks, torch's world.

The environment is asked once, when the context starts; nothing is derived from a device count.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError

from rlightning_groups import _torch_compat
from rlightning_groups._torch_compat import Store
from rlightning_groups.agreement import Agreement, Statement, agree
from rlightning_groups.errors import ContextError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        rank: world rank.
        world_size: number of processes.
        running: torch.distributed was started by somebody else.
        alone: there is no launcher, and the process is a world of one.
    """

    rank: int
    world_size: int
    running: bool
    alone: bool

    @classmethod
    def find(cls) -> Launch:
        """Ask a running torch.distributed, else the launcher's environment.

        Raises:
            ContextError: the environment is that of a launcher, but not whole.
        """
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), running=True, alone=False)
        there = [variable for variable in _VARIABLES if os.environ.get(variable)]
        if not {"RANK", "WORLD_SIZE"} & set(there):
            return cls(0, 1, running=False, alone=True)
        missing = [variable for variable in _VARIABLES if variable not in there]
        if missing:
            raise ContextError(
                f"the environment has {', '.join(there)} but not {', '.join(missing)}; a launcher such as "
                f"torchrun sets all of {', '.join(_VARIABLES)}, a single process has none of them"
            )
        try:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except ValueError:
            rank, world_size = -1, -1
        if not 0 <= rank < world_size:
            raise ContextError(
                f"RANK={os.environ['RANK']!r} and WORLD_SIZE={os.environ['WORLD_SIZE']!r} must be numbers "
                f"with 0 <= RANK < WORLD_SIZE"
            )
        return cls(rank, world_size, running=False, alone=False)

    @property
    def pretends(self) -> bool:
        """One process that stands for a whole world: torch's fake backend."""
        return self.running and _torch_compat.default_backend() == "fake"

    def default_backend(self) -> str:
        """The running world's backend, else the one for the device at hand."""
        if self.running:
            return _torch_compat.default_backend()
        accelerator = _torch_compat.accelerator_type()
        if accelerator is None:
            return "gloo"
        return "nccl" if accelerator == "cuda" else str(dist.get_default_backend_for_device(accelerator))

    def agree(self, statement: Statement, timeout: timedelta) -> tuple[Agreement, Store]:
        """Compare a statement with those of the other ranks; every rank of the world calls it.

        Args:
            statement: what this rank was asked for.
            timeout: how long to wait for the others.

        Returns:
            The agreement, and the store it was reached through.

        Raises:
            AgreementError: the ranks differ, one failed, or one did not come in time.
            ContextError: the store cannot be reached.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                store = self._store(timeout)
                return agree(store, self.rank, self.world_size, statement, timeout), store
            except DistNetworkError as error:
                # A rank that starts again may still reach the store of the run before while it closes.
                if self.running or time.monotonic() > deadline:
                    raise ContextError(f"the ranks' store cannot be reached: {error}") from error
                time.sleep(0.05)

    def _store(self, timeout: timedelta) -> Store:
        if self.running:
            return _torch_compat.default_store()
        if self.alone:
            return _store_of_one()
        # Torch's own rendezvous waits for all ranks and cannot say which one is missing; the agreement can.
        return _torch_compat.launcher_store(self.rank, self.world_size, timeout)

    def start_world(self, store: Store, backend: str, timeout: timedelta | None, round_: int) -> None:
        """Start torch.distributed.

        Args:
            store: the ranks' store.
            backend: a torch backend string.
            timeout: of the world's collectives; ``None`` is torch's default.
            round_: the agreement this world comes from.

        Raises:
            ContextError: torch refuses.
        """
        # A prefix of its own, or a second world would read what the first one left in the store.
        hook = sys.excepthook
        prefixed = _torch_compat.PrefixStore(f"rlightning_groups/world/{round_}", store)
        try:
            if "nccl" in backend and "LOCAL_RANK" in os.environ:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group(
                backend, store=prefixed, rank=self.rank, world_size=self.world_size, timeout=timeout
            )
            global _hooked
            if _hooked:  # torch puts its hook over the one of the world before, and every one marks each line
                sys.excepthook = hook
            _hooked = True
        except Exception as error:  # torch raises half a dozen kinds
            here = _torch_compat.accelerator_type()
            hint = "" if here else "; there is no accelerator here, so use backend='gloo'"
            raise ContextError(
                f"torch.distributed could not start with backend {backend!r}: {error}{hint}"
            ) from error


_hooked = False  # torch has hooked into this process's uncaught errors, for a world that we started
_one: Store | None = None


def _store_of_one() -> Store:
    """The store of a world of one, kept so that its rounds go on counting."""
    global _one
    if _one is None:
        _one = _torch_compat.new_store_of_one()
    return _one


def node_name() -> str:
    """What the ranks of one node have in common: torchrun's word for it, else the host's identity."""
    if "TORCHELASTIC_RUN_ID" in os.environ and "GROUP_RANK" in os.environ:
        return f"GROUP_RANK {os.environ['GROUP_RANK']}"
    identity = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        # Two hosts may carry one name, and one kernel may play several hosts.
        try:
            identity.append(str(Path(path).readlink()) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            continue
    return " ".join(identity)
