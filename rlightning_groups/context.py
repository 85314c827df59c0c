"""The one place that knows which process groups this process is in.

:class:`ParallelContext` runs every initializer at start-up and keeps the groups by mode. Model code asks
the module-level functions, which read the same tables::

    from rlightning_groups import ParallelMode, get_group

    torch.distributed.all_reduce(x, group=get_group(ParallelMode.TENSOR_PARALLEL))

Three steps, three kinds of value: a request (what was asked for), a layout (who is where), and handles
(the live groups). Each can be printed and tested without the next.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Optional

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rlightning_groups import _torch_compat
from rlightning_groups._torch_compat import Store
from rlightning_groups.agreement import Statement, agree
from rlightning_groups.errors import AgreementError, ContextError, LayoutError, ModeError
from rlightning_groups.group_initializer import (
    GroupFactory,
    GroupInfo,
    LayoutGroupInitializer,
    ProcessGroupInitializer,
    RankListInitializer,
)
from rlightning_groups.launch import Launch, node_name
from rlightning_groups.layout import ParallelLayout
from rlightning_groups.mesh import mesh_of_groups
from rlightning_groups.modes import ParallelMode
from rlightning_groups.request import (
    Initializer,
    Initializers,
    Plan,
    Request,
    make_initializer,
    planned_ranks,
    print_initializer,
    seconds,
)

__all__ = [
    "GroupHandle",
    "Initializer",
    "ParallelContext",
    "get_cpu_group",
    "get_global_rank",
    "get_group",
    "get_local_rank",
    "get_ranks_in_group",
    "get_world_size",
    "is_initialized",
]

_NAMESPACE = "rlightning_groups"
_COMPOSABLE = (ParallelMode.TRAIN_DATA_PARALLEL, ParallelMode.TENSOR_PARALLEL)


@dataclass(frozen=True)
class GroupHandle:
    """One group of a mode as this rank sees it.

    Attributes:
        mode: whom the group is for.
        name: tells several groups of one mode apart; ``None`` for the only one.
        ranks: world ranks in group order, ``None`` where this rank is in no such group.
        local_rank: this rank's place in ``ranks``.
        group: the group.
        cpu_group: a gloo group of the same ranks, where there is one.
    """

    mode: str
    name: str | None
    ranks: tuple[int, ...] | None
    local_rank: int | None
    group: ProcessGroup | None
    cpu_group: ProcessGroup | None


@dataclass
class _State:
    """Everything a running context holds."""

    request: Request
    layout: ParallelLayout
    rank: int
    backend: str
    world: ProcessGroup
    owns_world: bool
    store: Store | None  # None where one process only pretends to be a world
    factories: tuple[GroupFactory, GroupFactory]
    made_elsewhere: list[ProcessGroup]
    meshes: dict[tuple[str, ...], DeviceMesh]
    world_description: str


# The tables. Handles by (mode, name), and by mode alone where that says which one; groups likewise, in a
# table of their own, because get_group is called in every layer of every step.
_handles: dict[Hashable, GroupHandle] = {}
_groups: dict[Hashable, ProcessGroup] = {}


def get_group(mode: str, name: str | None = None) -> ProcessGroup:
    """The process group of a mode that this rank is in.

    One dictionary look-up; ``torch.compile(fullgraph=True)`` traces through it.

    Args:
        mode: a :class:`~rlightning_groups.ParallelMode`, or a mode of your own.
        name: which one, where this rank is in several groups of the mode.

    Raises:
        ContextError: the context is not initialized.
        ModeError: the mode was never set up, this rank is in no group of it, or it is in several.
    """
    group = _groups.get(mode if name is None else (mode, name))
    if group is None:
        _refuse(mode, name)
    return group


def get_cpu_group(mode: str, name: str | None = None) -> ProcessGroup:
    """The gloo group of a mode: the group itself on CPU, its companion beside an accelerator's group.

    Args:
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.

    Raises:
        ContextError: the context is not initialized, or made no CPU groups.
        ModeError: as for :func:`get_group`.
    """
    group = _handle(mode, name).cpu_group
    if group is None:
        raise ContextError(
            f"there is no CPU group for {mode}; initialize(cpu_groups=True) makes one beside each group"
        )
    return group


def get_world_size(mode: str, name: str | None = None) -> int:
    """Number of ranks in this rank's group of a mode.

    Args:
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.

    Raises:
        ContextError: the context is not initialized.
        ModeError: as for :func:`get_group`.
    """
    return len(_handle(mode, name).ranks or ())


def get_local_rank(mode: str, name: str | None = None) -> int:
    """This rank's place in its group of a mode, from 0.

    Args:
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.

    Raises:
        ContextError: the context is not initialized.
        ModeError: as for :func:`get_group`.
    """
    return int(_handle(mode, name).local_rank or 0)


def get_ranks_in_group(mode: str, name: str | None = None) -> list[int]:
    """World ranks of this rank's group of a mode, in group order.

    Args:
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.

    Raises:
        ContextError: the context is not initialized.
        ModeError: as for :func:`get_group`.
    """
    return list(_handle(mode, name).ranks or ())


def get_global_rank() -> int:
    """World rank of this process.

    Raises:
        ContextError: the context is not initialized.
    """
    return ParallelContext()._running().rank


def is_initialized(mode: str | None = None) -> bool:
    """Whether the context runs and, for a mode, whether this rank has a group of it.

    Args:
        mode: a mode, or ``None`` for the context as a whole.
    """
    context = ParallelContext()
    if context._state is None or context._world_is_gone():
        return False
    return mode is None or any(h.mode == mode and h.group is not None for h in _handles.values())


def _handle(mode: str, name: str | None) -> GroupHandle:
    handle = _handles.get(mode if name is None else (mode, name))
    if handle is None or handle.group is None:
        _refuse(mode, name)
    return handle


def _refuse(mode: str, name: str | None) -> NoReturn:
    """Say why there is no such group."""
    state = ParallelContext()._running(f"a group for {mode!r}")
    of_mode = [handle for handle in _handles.values() if handle.mode == mode]
    own = sorted({str(handle.name) for handle in of_mode if handle.group is not None and handle.name})
    has = ", ".join(ParallelContext().modes())
    if not of_mode:
        meant = next((one for one in ParallelContext().modes() if one == str(mode).upper()), None)
        hint = f" (did you mean {meant!r}?)" if meant else ""
        raise ModeError(f"mode {mode!r} was never set up{hint}; rank {state.rank} has groups for {has}")
    if name is not None and not any(handle.name == name for handle in of_mode):
        known = (
            ", ".join(sorted({str(handle.name) for handle in of_mode if handle.name})) or "none has a name"
        )
        raise ModeError(f"there is no {mode} group named {name!r}; names: {known}")
    if name is None and len(own) > 1:
        raise ModeError(
            f"rank {state.rank} is in several {mode} groups; say which by name=: {', '.join(own)}"
        )
    which = f"the {mode} group {name!r}" if name is not None else f"any {mode} group"
    raise ModeError(f"rank {state.rank} is not in {which}; it has groups for {has}")


class ParallelContext:
    """Process-wide owner of the process groups; every call of the class gives the same object.

    >>> ParallelContext() is ParallelContext()
    True
    """

    _instance: Optional[ParallelContext] = None  # noqa: UP045 - the class is not defined yet
    _lock = threading.RLock()

    _state: _State | None
    _was_destroyed: bool

    def __new__(cls) -> ParallelContext:  # noqa: D102 - the class docstring says it
        with cls._lock:
            if cls._instance is None:
                instance = super().__new__(cls)
                instance._state = None
                instance._was_destroyed = False
                cls._instance = instance
            return cls._instance

    def __reduce__(self) -> tuple[Any, ...]:
        return ParallelContext, ()  # copies and pickles of the one context are the one context

    get_group = staticmethod(get_group)
    get_cpu_group = staticmethod(get_cpu_group)
    get_world_size = staticmethod(get_world_size)
    get_local_rank = staticmethod(get_local_rank)
    get_ranks_in_group = staticmethod(get_ranks_in_group)
    get_global_rank = staticmethod(get_global_rank)
    is_initialized = staticmethod(is_initialized)

    def initialize(
        self,
        tensor_parallel_size: int = 1,
        sequence_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        order: str = "tp-sp-dp",
        backend: str | None = None,
        timeout: timedelta | float | None = None,
        initializers: Initializers = (),
        cpu_groups: bool = False,
        extra_axes: Mapping[str, int] | None = None,
        composed: Mapping[str, Sequence[str]] | None = None,
        *,
        backend_options: Mapping[str, Any] | None = None,
        node: str | None = None,
    ) -> ParallelContext:
        """Make every group this rank is in; every rank of the world calls it with the same arguments.

        Where torch.distributed runs already, it is used and left running; otherwise it is started from the
        launcher's environment variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and belongs to the
        context. Without a launcher the process is a world of one, in which every call works.

        A second call with the same sizes does nothing; with other sizes it is an error.

        Args:
            tensor_parallel_size: number of ranks that share one layer's weights.
            sequence_parallel_size: number of ranks that share one sample's tokens.
            data_parallel_size: number of ranks that read different samples; ``None`` takes what is left.
            order: the axes, fastest first; see :class:`~rlightning_groups.ParallelLayout`.
            backend: torch backend of the groups; ``None`` is that of a running world, else nccl for CUDA,
                gloo for CPU, torch's own default for other accelerators.
            timeout: how long a collective, and the wait for other ranks at start-up, may take, in seconds
                where it is a number; ``None`` is that of a running world, else torch's default.
            initializers: further groups, by initializer or by a callable of (rank, world_size) that makes one
                (a mapping gives them names).
            cpu_groups: make a gloo group beside each accelerator group.
            extra_axes: further axes and their sizes.
            composed: further modes over several axes.
            backend_options: options of the backend by mode, such as ``ProcessGroupNCCL.Options``; such a mode
                shares its group with no other.
            node: a name that the ranks of this node have in common; ``None`` asks the launcher (torchrun's
                GROUP_RANK), else the host.

        Returns:
            The context.

        Raises:
            LayoutError: the sizes, the order, or an initializer's ranks are wrong.
            AgreementError: the ranks were started with different settings, or one did not come in time.
            ContextError: it runs with other settings, or torch.distributed cannot be started.
        """
        with self._lock:
            request = Request(
                tensor_parallel_size,
                sequence_parallel_size,
                data_parallel_size,
                order,
                backend,
                timeout,
                initializers,
                cpu_groups,
                extra_axes,
                composed,
                backend_options,
            )
            if self._state is not None and self._world_is_gone():
                self.destroy()
            if self._state is not None:
                state = self._state
                difference = request.differs_from(state.request, state.layout, state.backend)
                if difference is None:
                    return self
                raise ContextError(
                    f"the context is initialized already: asked for {difference}. Call destroy() first"
                )
            self._start(request, node)
            return self

    def _start(self, request: Request, node: str | None) -> None:
        launch = Launch.find()
        failure: Exception | None = None
        plan: Plan | None = None
        try:
            plan = request.plan(launch)
        except Exception as error:  # told to the other ranks, then raised
            failure = error
        try:
            round_, nodes, store = _agree(launch, request, plan, failure, node)
        except AgreementError:
            if failure is None:
                raise
        if failure is not None:
            raise failure  # this rank's own error says more than the agreement's
        assert plan is not None
        layout = _with_nodes(plan.layout, nodes)
        try:
            if store is not None and not launch.running:
                launch.start_world(store, plan.backend, plan.timeout, round_)
            world = dist.group.WORLD
            assert world is not None
            timeout = plan.timeout or _torch_compat.group_timeout(world)
            share_world = _torch_compat.default_backend() == plan.backend and (
                timeout == _torch_compat.group_timeout(world)
            )
            own_modes: dict[tuple[int, ...], list[str]] = {}
            for mode in layout.modes:
                own_modes.setdefault(tuple(layout.ranks_in_group(mode, launch.rank)), []).append(mode)
            for _, initializer in plan.initializers:
                if ranks := planned_ranks(initializer):
                    own_modes.setdefault(tuple(ranks), []).append(str(initializer.mode))
            namespace = f"{_NAMESPACE}/{round_}"
            self._state = _State(
                request=request,
                layout=layout,
                rank=launch.rank,
                backend=plan.backend,
                world=world,
                owns_world=not launch.running,
                store=None if launch.pretends else _torch_compat.default_store(),
                factories=(
                    GroupFactory(
                        namespace, timeout, plan.options, lambda ranks: own_modes.get(tuple(ranks), ())
                    ),
                    GroupFactory(f"{namespace}/cpu", timeout),
                ),
                made_elsewhere=[],
                meshes={},
                world_description=world.group_desc,
            )
            if share_world and ParallelMode.GLOBAL not in plan.options:
                everyone = layout.ranks_in_group(ParallelMode.GLOBAL, launch.rank)
                self._state.factories[0].adopt(world, everyone, plan.backend)
                _torch_compat.describe(world, ",".join(own_modes[tuple(everyone)]))
            for mode in layout.modes:
                self._add(LayoutGroupInitializer(launch.rank, layout, mode), None)
            for name, initializer in plan.initializers:
                self._add(initializer, name)
        except BaseException:
            if self._state is not None:
                self.destroy()
            elif not launch.running and dist.is_initialized():
                dist.destroy_process_group()
            raise

    def register(self, initializer: Initializer, name: str | None = None) -> None:
        """Add a group after start-up; every rank of the world calls it, members or not.

        Args:
            initializer: an initializer, or a callable of (rank, world_size) that makes one.
            name: tells several groups of one mode apart.

        Raises:
            ContextError: the context is not initialized, or has such a group.
            LayoutError: the ranks are wrong.
            AgreementError: the ranks of the world registered different things.
        """
        with self._lock:
            state = self._running("register()")
            failure: Exception | None = None
            made: ProcessGroupInitializer | None = None
            try:
                made = make_initializer(initializer, state.rank, state.layout.world_size)
                self._check_new(made.mode, name)
            except Exception as error:
                failure = error
            if state.store is not None:
                statement = Statement(
                    settings={"register": print_initializer(made, name)},
                    node="",
                    lists=[planned_ranks(made)],
                    failure=_say(failure),
                )
                timeout = state.factories[0].timeout or _torch_compat.default_timeout(state.backend)
                try:
                    agree(state.store, state.rank, state.layout.world_size, statement, timeout, "register")
                except AgreementError:
                    if failure is None:
                        raise
            if failure is not None:
                raise failure
            assert made is not None
            self._add(made, name)

    def _add(self, initializer: ProcessGroupInitializer, name: str | None) -> None:
        state = self._running()
        self._check_new(initializer.mode, name)
        factory, cpu_factory = state.factories
        known = _torch_compat.known_groups()
        if isinstance(initializer, RankListInitializer):
            initializer.group_factory = factory
        info: GroupInfo = initializer.init_dist_group(state.backend, state.backend == "gloo")
        local_rank, _, group, ranks, mode = info
        if not isinstance(group, ProcessGroup):  # torch hands non-members an integer
            local_rank = group = ranks = None
        elif group not in factory.groups.values() and group not in known:
            state.made_elsewhere.append(group)
        cpu_group: ProcessGroup | None = None
        if group is not None and ranks is not None:
            if state.backend == "gloo" or "cpu:gloo" in state.backend:
                cpu_group = group
            elif state.request.cpu_groups:
                cpu_group = cpu_factory(ranks, mode, "gloo")
        handle = GroupHandle(mode, name, tuple(ranks) if ranks else None, local_rank, group, cpu_group)
        _handles[(mode, name)] = handle
        if group is not None:
            _groups[(mode, name)] = group
        own = [h for key, h in _handles.items() if isinstance(key, tuple) and h.mode == mode and h.group]
        plain = next((h for h in own if h.name is None), own[0] if len(own) == 1 else None)
        _handles.pop(mode, None)
        _groups.pop(mode, None)
        if plain is not None and plain.group is not None:
            _handles[mode], _groups[mode] = plain, plain.group

    def _check_new(self, mode: str | None, name: str | None) -> None:
        if not isinstance(mode, str) or not mode:
            raise LayoutError(f"an initializer's mode must be a string, got {mode!r}")
        if name is not None and (not isinstance(name, str) or not name):
            raise LayoutError(f"a group's name must be a string, got {name!r}")
        if (mode, name) in _handles:
            called = f"named {name!r}" if name is not None else "without a name"
            raise ContextError(f"there is a {mode} group {called} already; give this one another name")

    @property
    def layout(self) -> ParallelLayout:
        """Who sits where, with the nodes as they were found.

        Raises:
            ContextError: the context is not initialized.
        """
        return self._running("layout").layout

    @property
    def store(self) -> Store:
        """A store that the ranks of this context share, and no earlier or later context.

        Raises:
            ContextError: the context is not initialized, or one process only pretends to be a world.
        """
        state = self._running("store")
        if state.store is None:
            raise ContextError("there is no store: this process stands for a whole world by itself")
        return _torch_compat.PrefixStore(state.factories[0].namespace, state.store)

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Where a rank sits on each axis.

        Args:
            rank: world rank; ``None`` is this one.

        Raises:
            ContextError: the context is not initialized.
            LayoutError: the rank is out of range.
        """
        state = self._running("coordinates()")
        return state.layout.coordinates(state.rank if rank is None else rank)

    def modes(self) -> list[str]:
        """The modes that this rank has a group for.

        Raises:
            ContextError: the context is not initialized.
        """
        self._running("modes()")
        return list(dict.fromkeys(handle.mode for handle in _handles.values() if handle.group is not None))

    def is_first_rank(self, mode: str, name: str | None = None) -> bool:
        """Whether this rank is the first of its group of a mode.

        Args:
            mode: a mode.
            name: which one, where this rank is in several groups of the mode.
        """
        return get_local_rank(mode, name) == 0

    def is_last_rank(self, mode: str, name: str | None = None) -> bool:
        """Whether this rank is the last of its group of a mode.

        Args:
            mode: a mode.
            name: which one, where this rank is in several groups of the mode.
        """
        return get_local_rank(mode, name) == get_world_size(mode, name) - 1

    def get_next_global_rank(self, mode: str, name: str | None = None) -> int:
        """World rank of the next one in this rank's group of a mode; after the last comes the first.

        Args:
            mode: a mode.
            name: which one, where this rank is in several groups of the mode.
        """
        return self._neighbour(mode, name, 1)

    def get_prev_global_rank(self, mode: str, name: str | None = None) -> int:
        """World rank of the previous one in this rank's group of a mode; before the first comes the last.

        Args:
            mode: a mode.
            name: which one, where this rank is in several groups of the mode.
        """
        return self._neighbour(mode, name, -1)

    def _neighbour(self, mode: str, name: str | None, step: int) -> int:
        ranks = get_ranks_in_group(mode, name)
        return ranks[(get_local_rank(mode, name) + step) % len(ranks)]

    def device_mesh(self, *modes: str) -> DeviceMesh:
        """A DeviceMesh over the context's own groups; no communicator is made.

        Args:
            *modes: outermost mesh dim first; several must span different axes of the layout.

        Returns:
            A mesh whose dims are named after the modes in lower case, the same object for the same modes.
            Those of TENSOR_PARALLEL and of TRAIN_DATA_PARALLEL alone are parts of the one over both, so that
            fully sharded data parallelism can be laid over tensor parallelism.

        Raises:
            ContextError: the context is not initialized.
            ModeError: no mode given, a mode this rank has no group for, or modes that share an axis.
        """
        state = self._running("device_mesh()")
        if not modes or len(set(modes)) != len(modes):
            raise ModeError(f"device_mesh needs one or more different modes, got {modes!r}")
        groups = {mode: get_group(mode) for mode in modes}
        if modes not in state.meshes:
            if len(modes) == 1 and modes[0] in _COMPOSABLE and all(map(self._is_by_layout, _COMPOSABLE)):
                state.meshes[modes] = self.device_mesh(*_COMPOSABLE)[modes[0].lower()]
            else:
                device_type = _device_type(state.backend)
                state.meshes[modes] = mesh_of_groups(state.layout, state.rank, groups, device_type)
        return state.meshes[modes]

    def _is_by_layout(self, mode: str) -> bool:
        handle = _handles.get(mode)
        ranks = None if handle is None else handle.ranks
        return ranks is not None and list(ranks) == self.layout.ranks_in_group(mode, get_global_rank())

    def destroy(self) -> None:
        """Free the groups this context made, and torch.distributed if the context started it.

        Groups and a world made by others stay. Without a running context it does nothing. Afterwards
        ``initialize`` works again, with any sizes.
        """
        with self._lock:
            state, self._state = self._state, None
            _groups.clear()
            _handles.clear()
            if state is None:
                return
            self._was_destroyed = True
            _torch_compat.forget_meshes()
            if not dist.is_initialized() or dist.group.WORLD is not state.world:
                return  # somebody destroyed the world, and our groups with it
            if state.owns_world:
                dist.destroy_process_group()
                return
            _torch_compat.describe(state.world, state.world_description)
            made = [group for factory in state.factories for group in factory.groups.values()]
            for group in reversed([*made, *state.made_elsewhere]):
                if group is not state.world and _torch_compat.is_registered(group):
                    dist.destroy_process_group(group)

    def _world_is_gone(self) -> bool:
        state = self._state
        return state is not None and (not dist.is_initialized() or dist.group.WORLD is not state.world)

    def _running(self, wanted: str = "this call") -> _State:
        if self._state is None:
            why = "was destroyed" if self._was_destroyed else "is not initialized"
            raise ContextError(
                f"{wanted} needs a running context, but it {why}; call ParallelContext().initialize(...), "
                f"which without a launcher makes a world of one, or train with HybridParallelStrategy"
            )
        return self._state

    def __repr__(self) -> str:
        if self._state is None:
            return "ParallelContext(not initialized)"
        return f"ParallelContext(rank {self._state.rank} of {self._state.layout}, {self._state.backend})"


def _agree(
    launch: Launch, request: Request, plan: Plan | None, failure: Exception | None, node: str | None
) -> tuple[int, Sequence[tuple[int, int]], Store | None]:
    """Compare this request with the other ranks'; returns the round, the nodes and the store."""
    if launch.pretends:
        return 0, [(0, launch.world_size)], None
    statement = Statement(
        settings=request.settings(plan),
        node=node if node is not None else node_name(),
        lists=[planned_ranks(initializer) for _, initializer in plan.initializers]
        if plan is not None
        else [],
        failure=_say(failure),
    )
    try:
        timeout = seconds(request.timeout)
    except LayoutError:  # this rank's failure then, which the others are about to read
        timeout = None
    agreement, store = launch.agree(statement, timeout or _torch_compat.default_timeout("gloo"))
    return agreement.round, agreement.nodes, store


def _say(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def _with_nodes(layout: ParallelLayout, runs: Sequence[tuple[int, int]]) -> ParallelLayout:
    numbers = [node for node, _ in runs]
    consecutive = numbers == list(range(len(runs)))
    return ParallelLayout(
        layout.world_size,
        layout.tensor_parallel_size,
        layout.sequence_parallel_size,
        layout.data_parallel_size,
        layout.order,
        [count for _, count in runs] if consecutive else None,
        layout.extra_axes,
        layout.composed,
        node_of_rank=None if consecutive else [node for node, count in runs for _ in range(count)],
    )


def _device_type(backend: str) -> str:
    if backend in ("gloo", "mpi", "fake"):
        return "cpu"
    return _torch_compat.accelerator_type() or "cpu"
