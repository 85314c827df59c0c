"""A pool of reusable worker processes in which multi-rank tests run.

A fork server imports torch and Lightning once; the workers forked from it serve one task after another, and
to each task its worker looks freshly launched by ``torchrun``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rlightning_groups._torch_compat import forget_meshes

MAX_RANKS = 8
PRELOAD = [
    "torch.distributed.tensor.parallel",
    "torch._inductor.compile_fx",  # what a torch.compile imports when first called
    "torch._dynamo.backends.debugging",
    "pytorch_lightning",
    "lightning.pytorch",
    "pytest",
    "hypothesis",
    "rlightning_groups",
]
TORCHRUN = (  # the variables that torchrun sets, and the pool with it
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
)
START_TIMEOUT = 180.0  # the fork server's imports take long on a cold file cache
CLEAN_TIMEOUT = 20.0
GRACE = 1.0  # the first rank to report a failure often tells of the echo, not of the cause
STACK_SIGNAL = signal.SIGUSR1

WarningFilter = tuple[Any, str, type[Warning], str, int]


@dataclass(frozen=True)
class RankError:
    """What one rank raised; ``module`` defines the exception's class."""

    type_name: str
    message: str
    traceback: str
    module: str

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        kind = type(error)
        text = "".join(traceback.format_exception(error))
        return cls(kind.__qualname__, str(error), text, kind.__module__)

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


@dataclass(frozen=True)
class Report:
    """How one rank ended: its state in words, with its value, its exception or its stack."""

    state: str
    value: bytes = b""
    error: RankError | None = None
    stack: str = ""

    @property
    def passed(self) -> bool:
        return self.state == "passed"


class RankFailure(AssertionError):  # noqa: N818 - it is a test's failure
    """Some rank raised, hung or died; the message has every rank's state and traceback.

    ``tracebacks`` holds the traceback of each rank that raised and the stack of each that hung,
    ``exceptions`` the class name and message of each exception, and ``states`` every rank's state.
    """

    def __init__(self, task: str, reports: Mapping[int, Report]) -> None:
        self.states = {rank: reports[rank].state for rank in sorted(reports)}
        self.exceptions = {rank: str(r.error) for rank, r in sorted(reports.items()) if r.error}
        texts = {rank: r.error.traceback if r.error else r.stack for rank, r in sorted(reports.items())}
        self.tracebacks = {rank: text for rank, text in texts.items() if text}
        # In order of arrival, so that the summary line begins with the first failure.
        titles = {rank: f"rank {rank} {r.state} {r.error or ''}".rstrip() for rank, r in reports.items()}
        failed = [titles[rank].splitlines()[0] for rank, r in reports.items() if not r.passed]
        sections = [f"----- {titles[rank]}\n{text}".rstrip() for rank, text in texts.items()]
        super().__init__("\n".join([f"{task}: {'; '.join(failed)}", *sections]))


@dataclass(frozen=True)
class _Task:
    """What one worker is sent; unpickling ``payload``, the call itself, is part of the task."""

    environment: dict[str, str]
    directory: str
    import_path: list[str]
    filters: Sequence[WarningFilter]
    payload: bytes


# ---------------------------------------------------------------------------------------- in the worker


def _serve(connection: Connection, stack_file: str) -> None:
    """Run tasks until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers Ctrl-C
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # a rank that hangs must not outlive the fork server
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # The fork server lives while this is open anywhere, and must not outlive the session.
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    multiprocessing.set_start_method(None, force=True)  # the platform's own, as in any launched process
    torch.set_num_threads(1)
    gc.freeze()  # what was preloaded never dies, so the collection after each task can pass over it
    with open(stack_file, "w") as stacks, contextlib.suppress(EOFError, OSError):  # noqa: PTH123
        _dump_stacks_to(stacks.fileno())
        connection.send_bytes(b"ready")
        while True:
            task = pickle.loads(connection.recv_bytes())
            imported = len(sys.modules)
            with _pristine(task):
                connection.send_bytes(pickle.dumps(_attempt(task.payload)))
                # Until every rank has reported, none may close the connections that others still use.
                connection.recv_bytes()
                connection.send_bytes(pickle.dumps(_clean_up(imported)))


def _dump_stacks_to(file: int) -> None:
    """Have the stack signal write the stack of every thread, even while C code holds the GIL."""
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    set_handler = signal.signal

    def keep_ours(signum: Any, handler: Any) -> Any:
        # Lightning's trainer "restores" each signal it finds without a Python handler to the default.
        return signal.SIG_DFL if signum == STACK_SIGNAL else set_handler(signum, handler)

    signal.signal = keep_ours  # type: ignore[assignment]


def _attempt(payload: bytes) -> Report:
    try:
        function, args, kwargs = pickle.loads(payload)
        # The standard pickle sends tensors by value; multiprocessing's would share their memory.
        return Report("passed", value=pickle.dumps(function(*args, **kwargs)))
    except BaseException as error:
        return Report("raised", error=RankError.of(error))


def _clean_up(imported: int) -> Report:
    """Leave nothing to the next task; ``imported`` is how many modules there were before this one."""
    try:
        context = sys.modules.get("rlightning_groups.context")
        try:
            if context is not None and context.ParallelContext().is_initialized():
                context.ParallelContext().destroy()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            forget_meshes()  # a past task's mesh equals one of the next, but its groups died
            gc.collect()
            if len(sys.modules) > imported:
                gc.freeze()  # as after preloading: to pass over the compiler's modules alone saves 0.1 s
        return Report("passed")
    except BaseException as error:
        return Report("raised while cleaning up", error=RankError.of(error))


@contextlib.contextmanager
def _pristine(task: _Task) -> Iterator[None]:
    """Give a task its surroundings, and undo what it did to the process's global state."""
    directory, dtype, precision = Path.cwd(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn
    cudnn_flags = cudnn.deterministic, cudnn.benchmark
    sys.path[:] = task.import_path
    random.seed(0)
    torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    os.chdir(task.directory)
    try:
        with mock.patch.dict(os.environ, task.environment, clear=True), warnings.catch_warnings():
            warnings.simplefilter("error")
            for warning_filter in task.filters:
                warnings.filterwarnings(*warning_filter)
            yield
    finally:
        os.chdir(directory)
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        cudnn.deterministic, cudnn.benchmark = cudnn_flags
        sys.stdout.flush()
        sys.stderr.flush()


# ---------------------------------------------------------------------------------------- in the parent


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, stack_file: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self.stack_file = stack_file
        # Not a daemon: a task may start processes of its own, as a DataLoader does.
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, str(stack_file)))
        self.process.start()
        theirs.close()

    def send(self, message: bytes) -> None:
        # A worker that is gone shows when its report is awaited.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def receive(self) -> bytes | None:
        """The message that has come, or None of a worker that has died."""
        # A child of a dead worker may hold the connection open, so do not wait for its end.
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                return self.connection.recv_bytes()
        return None

    def death(self) -> Report:
        self.process.join(5.0)
        code = self.process.exitcode
        if code is None:
            return Report("died or closed its connection")
        return Report(f"died of {signal.Signals(-code).name}" if code < 0 else f"died with exit code {code}")

    def stack(self) -> str:
        """The stacks of the worker's threads, once their text has stopped growing."""
        text, last, deadline = "", None, time.monotonic() + 2.0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or os.getpid(), STACK_SIGNAL)
        while (not text or text != last) and time.monotonic() < deadline:
            time.sleep(0.05)
            last, text = text, self.stack_file.read_text(errors="replace")
        return text or "(no stack could be had)"

    def reap(self) -> None:
        """Release everything of a worker that was killed."""
        self.process.join()
        self.process.close()
        self.connection.close()
        self.stack_file.unlink(missing_ok=True)


def _new_store() -> TCPStore:
    """A store for one task, as recent torch no longer prefixes keys by TORCHELASTIC_RESTART_COUNT."""
    # torch itself would listen on all interfaces, and ask the name server about each IPv6-mapped client.
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def start_fork_server() -> None:
    """Have the fork server begin its imports, without waiting for them."""
    # Numeric libraries would else start threads in the server, which a fork does not carry over.
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def stop_fork_server() -> None:
    """End the fork server, which by itself outlives its parent a little, and whatever was forked from it."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)  # to finalize all those imports takes seconds
        server._stop()


class RankPool:
    """Workers that run one function as several ranks; started when first needed and then kept.

    ``filters`` are arguments of :func:`warnings.filterwarnings`, the last one strongest; a warning that none
    of them matches is an error.
    """

    def __init__(self, filters: Sequence[WarningFilter] = ()) -> None:
        self._filters = list(filters)
        self._workers: list[_Worker] = []
        self._directory: Path | None = None
        self._attempts = 0
        self._started = 0

    @property
    def pids(self) -> list[int | None]:
        """The process ids of the workers that have been started, by rank."""
        return [worker.process.pid for worker in self._workers]

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        lazy: bool = True,
        env: Mapping[str, str | None] | None = None,
        nodes: Sequence[int] | None = None,
        per_rank: Sequence[Any] | None = None,
        expect_errors: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on every rank and return the results by rank.

        Args:
            function: A function of an importable module.
            world_size: The number of ranks.
            *args: Positional arguments, the same on every rank.
            timeout: Seconds after which a rank that has not reported counts as hanging.
            lazy: Whether gloo connects two ranks only when they first talk to each other.
            env: Further environment variables; None removes one.
            nodes: The number of ranks on each node; by default there is one node.
            per_rank: One more first positional argument for each rank.
            expect_errors: Return a :class:`RankError` for a rank that raises, instead of failing.
            **kwargs: Keyword arguments, the same on every rank.

        Raises:
            RankFailure: If a rank raises, hangs or dies.
        """
        __tracebackhide__ = True
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size must lie between 1 and {MAX_RANKS}, not {world_size}")
        first = [()] * world_size if per_rank is None else [(argument,) for argument in per_rank]
        nodes = nodes or [world_size]
        if sum(nodes) != world_size or len(first) != world_size:
            raise ValueError(f"{nodes=} or {per_rank=} does not fit {world_size} ranks")
        payloads = [pickle.dumps((function, first[rank] + args, kwargs)) for rank in range(world_size)]
        name = f"{function.__module__}.{function.__qualname__} at world size {world_size}"
        directory: Path | None = None
        keep = False
        try:
            workers = self._start(world_size)
            self._attempts += 1
            directory = self._root() / f"task-{self._attempts}"
            directory.mkdir()
            store = _new_store()
            launches = self._environments(nodes, store.port, lazy, env or {})
            path = [entry or str(Path.cwd()) for entry in sys.path]
            for worker, launch, payload in zip(workers, launches, payloads, strict=True):
                task = _Task(launch, str(directory), path, self._filters, payload)
                worker.send(pickle.dumps(task))
            reports = self._gather(workers, timeout, patient=expect_errors)
            errors = any(report.error for report in reports.values())
            if any(not (r.passed or (r.error and expect_errors)) for r in reports.values()):
                raise RankFailure(name, reports)
            for worker in workers:
                worker.send(b"clean")
            cleaned = self._gather(workers, CLEAN_TIMEOUT, patient=True)
            keep = all(report.passed for report in cleaned.values())
            if not keep and not errors:
                raise RankFailure(f"{name}, cleaning up", cleaned)
            return [r.error or pickle.loads(r.value) for _, r in sorted(reports.items())]
        finally:
            if not keep:
                self._kill()
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """End the workers; the fork server, which other pools may use, lives on."""
        self._kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        atexit.unregister(self.close)

    def _root(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="rank-pool-"))
            atexit.register(self.close)  # multiprocessing would else wait for the workers at exit
        return self._directory

    def _start(self, count: int) -> list[_Worker]:
        """The workers of the first ``count`` ranks, alive and idle."""
        if not all(worker.process.is_alive() for worker in self._workers):
            self._kill()
        new: list[_Worker] = []
        start_fork_server()
        while len(self._workers) < count:
            self._started += 1
            new.append(_Worker(self._root() / f"stack-{self._started}"))
            self._workers.append(new[-1])
        for worker in new:
            wait([worker.connection, worker.process.sentinel], START_TIMEOUT)
            if worker.receive() is None:
                raise RuntimeError(f"a worker did not start: {worker.death().state}")
        return self._workers[:count]

    def _environments(
        self, nodes: Sequence[int], port: int, lazy: bool, env: Mapping[str, str | None]
    ) -> Iterator[dict[str, str]]:
        """Each rank's environment: that of the parent with what torchrun adds to it."""
        size = sum(nodes)
        shared = {
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1},
            **{"WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_WORLD_SIZE": len(nodes)},
            **{"ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "rank-pool", "TORCHELASTIC_MAX_RESTARTS": 0},
            **{"TORCHELASTIC_RESTART_COUNT": self._attempts, "TORCHELASTIC_USE_AGENT_STORE": True},
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else None,
            "TORCH_GLOO_LAZY_INIT": 1 if lazy else None,
        }
        places = [(node, local) for node, ranks in enumerate(nodes) for local in range(ranks)]
        for rank, (node, local) in enumerate(places):
            own = {"RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": node, "LOCAL_RANK": local}
            own["LOCAL_WORLD_SIZE"] = nodes[node]
            merged = {**os.environ, **shared, **own, **env}
            yield {key: str(value) for key, value in merged.items() if value is not None}

    @staticmethod
    def _gather(workers: Sequence[_Worker], timeout: float, patient: bool) -> dict[int, Report]:
        """The reports in order of arrival; to the impatient, a failure hurries the rest."""
        reports: dict[int, Report] = {}
        deadline, reason = time.monotonic() + timeout, f"after {timeout:g} s"
        while len(reports) < len(workers) and (left := deadline - time.monotonic()) > 0:
            pending = {rank: worker for rank, worker in enumerate(workers) if rank not in reports}
            ready = wait([end for w in pending.values() for end in (w.connection, w.process.sentinel)], left)
            for rank, worker in pending.items():
                if worker.connection not in ready and worker.process.sentinel not in ready:
                    continue
                message = worker.receive()
                report = worker.death() if message is None else pickle.loads(message)
                reports[rank] = report
                if not report.passed and not patient and time.monotonic() + GRACE < deadline:
                    deadline = time.monotonic() + GRACE
                    reason = f"{GRACE:g} s after rank {rank} {report.state.split()[0]}"
        for rank, worker in enumerate(workers):
            if rank not in reports:
                reports[rank] = Report(f"hanging ({reason})", stack=worker.stack())
        return reports

    def _kill(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.reap()
