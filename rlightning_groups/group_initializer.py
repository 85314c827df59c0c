"""Process group initializers: each knows which ranks make up a group, and makes the group this rank is in.

A rank creates its own groups only. The others follow by arithmetic and are never created here, so the cost
of starting up does not grow with the world. Groups carry names that all their members derive from the
ranks, so ranks may make different numbers of groups, in any order.

Used by hand, an initializer is constructed on every rank and ``init_dist_group`` is called on every rank;
a rank outside the group gets ``None`` for all but the mode. :class:`~rlightning_groups.ParallelContext`
does the same for a whole layout.

``TPGroupInitializer`` and ``SPGroupInitializer`` both take consecutive ranks, so together they give one and
the same group: right for sequence parallelism inside the tensor-parallel group, and for nothing else. The
context places the axes by strides instead (:class:`LayoutGroupInitializer`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlightning_groups import _torch_compat
from rlightning_groups.errors import ContextError, LayoutError
from rlightning_groups.layout import ParallelLayout, check_ranks, check_size
from rlightning_groups.modes import CommMode, ParallelMode

__all__ = [
    "CommMode",
    "ParallelMode",
    "ProcessGroupInitializer",
    "RankListInitializer",
    "LayoutGroupInitializer",
    "DPGroupInitializer",
    "TPGroupInitializer",
    "SPGroupInitializer",
    "InterNodeGroupInitializer",
    "IntraNodeGroupInitializer",
    "TrainDPGroupInitializer",
    "WeightTransferGroupInitializer",
    "GroupFactory",
    "GroupInfo",
]

GroupInfo = tuple[int | None, int | None, ProcessGroup | None, list[int] | None, str]
"""(local_rank, group_world_size, process_group, ranks_in_group, mode)."""


class GroupFactory:
    """Makes process groups, each distinct rank list once.

    Two requests share a group when their ranks (in order), backend, timeout and options are equal. A call
    for ranks that are already there costs a dictionary look-up.

    Args:
        namespace: goes into every group's name; equal on all ranks and new in this world.
        timeout: of the collectives of each group; ``None`` is torch's default for the backend.
        options: backend options by mode, e.g. ``ProcessGroupNCCL.Options``.
        modes_of: which modes share a rank list, for the group's description; the asking mode by default.
    """

    def __init__(
        self,
        namespace: str,
        timeout: timedelta | None = None,
        options: Mapping[str, Any] | None = None,
        modes_of: Callable[[Sequence[int]], Sequence[str]] | None = None,
    ) -> None:
        self.namespace = namespace
        self.timeout = timeout
        self.options = dict(options or {})
        self.modes_of = modes_of
        self.groups: dict[Hashable, ProcessGroup] = {}

    def adopt(self, group: ProcessGroup, ranks: Sequence[int], backend: str) -> None:
        """Share a group that exists already with every request for its ranks and backend.

        Args:
            group: a group with this factory's timeout and without options.
            ranks: its world ranks.
            backend: its backend.
        """
        self.groups[(tuple(ranks), backend, None)] = group

    def __call__(self, ranks: Sequence[int], mode: str, backend: str) -> ProcessGroup:
        """The group of these ranks, made now if it is not there; only members call this.

        Args:
            ranks: world ranks; the position in the list is the group rank.
            mode: whom the group is for.
            backend: a torch backend string.

        Raises:
            ContextError: this build of torch lacks the backend.
        """
        options = self.options.get(mode)
        key = (tuple(ranks), backend, mode if options is not None else None)
        if key not in self.groups:
            modes = [m for m in (self.modes_of(ranks) if self.modes_of else ()) if m not in self.options]
            # Options cannot be compared across ranks, so a mode that has some shares its group with none.
            owner = mode if options is not None else ""
            self.groups[key] = _create(
                ranks,
                name=f"{self.namespace}/{owner}/{backend}/{_short_name(ranks)}",
                backend=backend,
                timeout=self.timeout,
                options=options,
                description=",".join(dict.fromkeys([mode, *modes] if options is None else [mode])),
            )
        return self.groups[key]


class ProcessGroupInitializer(ABC):
    """Base class of everything that makes one kind of process group.

    Subclass :class:`RankListInitializer` for a mode of your own: it needs the ranks and nothing else.

    Args:
        rank: world rank of this process.
        world_size: number of processes.

    Attributes:
        rank: world rank of this process.
        world_size: number of processes.
        local_rank: rank of this process inside its group, ``None`` before and for a non-member.
        ranks_in_group: world ranks of the group, ``None`` before and for a non-member.
        process_group: the group, ``None`` before and for a non-member.
        group_world_size: number of ranks in the group, ``None`` before and for a non-member.
        mode: whom the group is for.

    Raises:
        LayoutError: the rank is outside the world, or one of the two is not an int.
    """

    rank: int
    world_size: int
    local_rank: int | None
    ranks_in_group: list[int] | None
    process_group: ProcessGroup | None
    group_world_size: int | None
    mode: str | None = None

    def __init__(self, rank: int, world_size: int) -> None:
        self.world_size = check_size("world_size", world_size)
        self.rank = check_ranks([rank], self.world_size, "rank")[0]
        self.local_rank = None
        self.ranks_in_group = None
        self.process_group = None
        self.group_world_size = None
        # The context lends its own factory, so that equal rank lists share a group.
        self.group_factory: Callable[[Sequence[int], str, str], ProcessGroup] = _new_group_alone

    @abstractmethod
    def init_dist_group(self, backend: str = "nccl", use_cpu: bool = False) -> GroupInfo:
        """Make this rank's group; called on every rank.

        Args:
            backend: a torch backend string.
            use_cpu: use ``gloo``, whatever ``backend`` says.

        Returns:
            (local_rank, group_world_size, process_group, ranks_in_group, mode), the first four ``None`` on a
            rank that is in no such group.
        """


class RankListInitializer(ProcessGroupInitializer):
    """An initializer that only says which ranks are together; the base of all others here.

    A mode of your own is a subclass with a ``mode`` and :meth:`own_ranks`::

        class PairInitializer(RankListInitializer):
            mode = "PAIR"

            def own_ranks(self):
                first = self.rank // 2 * 2
                return [first, first + 1]
    """

    @abstractmethod
    def own_ranks(self) -> Sequence[int] | None:
        """World ranks of the group this rank is in, the same list on each of them.

        Returns:
            The ranks in group order. A list without this rank, or ``None``, says that it is in no group.
        """

    def planned_ranks(self) -> list[int] | None:
        """:meth:`own_ranks`, checked; ``None`` when this rank is in no group.

        Raises:
            LayoutError: the ranks are empty, repeated, or out of range.
        """
        ranks = self.own_ranks()
        if ranks is None:
            return None
        checked = check_ranks(ranks, self.world_size)
        return checked if self.rank in checked else None

    def init_dist_group(self, backend: str = "nccl", use_cpu: bool = False) -> GroupInfo:
        """Make the group of :meth:`own_ranks`; called on every rank.

        Args:
            backend: a torch backend string.
            use_cpu: use ``gloo``, whatever ``backend`` says.

        Returns:
            (local_rank, group_world_size, process_group, ranks_in_group, mode), the first four ``None`` on a
            rank that is in no such group.

        Raises:
            LayoutError: the ranks are wrong, or this rank is not the one torch knows.
            ContextError: torch.distributed is not running, or lacks the backend.
        """
        if not self.mode:
            raise LayoutError(f"{type(self).__name__} has no mode; set the class attribute to a string")
        ranks = self.planned_ranks()
        if ranks is None:
            self.local_rank = self.group_world_size = self.process_group = self.ranks_in_group = None
            return None, None, None, None, self.mode
        if not dist.is_initialized():
            raise ContextError(
                f"{type(self).__name__} makes a group of torch.distributed, which is not running; call "
                f"ParallelContext().initialize() or torch.distributed.init_process_group() first"
            )
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):
            raise LayoutError(
                f"{type(self).__name__} was given rank={self.rank} of world_size={self.world_size}, but "
                f"torch.distributed runs as rank {dist.get_rank()} of {dist.get_world_size()}"
            )
        self.process_group = self.group_factory(ranks, self.mode, "gloo" if use_cpu else backend)
        self.ranks_in_group = ranks
        self.group_world_size = len(ranks)
        self.local_rank = ranks.index(self.rank)
        return self.local_rank, self.group_world_size, self.process_group, self.ranks_in_group, self.mode


class LayoutGroupInitializer(RankListInitializer):
    """The group of one mode of a :class:`~rlightning_groups.ParallelLayout`.

    Args:
        rank: world rank of this process.
        layout: who sits where.
        mode: a mode of the layout.
    """

    def __init__(self, rank: int, layout: ParallelLayout, mode: str) -> None:
        super().__init__(rank, layout.world_size)
        self.layout = layout
        self.mode = mode

    def own_ranks(self) -> list[int]:
        """World ranks of the group this rank is in."""
        return self.layout.ranks_in_group(str(self.mode), self.rank)

    def planned_ranks(self) -> list[int]:
        """The same: a layout's ranks need no check."""
        return self.own_ranks()


class _AxisGroupInitializer(LayoutGroupInitializer):
    """A mode of a layout, spelled with one size."""

    def __init__(self, rank: int, world_size: int, mode: str, **layout: Any) -> None:
        super().__init__(rank, ParallelLayout(world_size, **layout), mode)


class DPGroupInitializer(_AxisGroupInitializer):
    """Data-parallel groups: ranks at regular intervals.

    Args:
        rank: world rank of this process.
        world_size: number of processes.
        data_parallel_size: number of processes in each group.

    Attributes:
        data_parallel_size: number of processes in each group.
        process_num_between_dp_rank: stride between the ranks of a group.

    Raises:
        LayoutError: ``data_parallel_size`` does not divide the world.

    >>> [DPGroupInitializer(rank, 8, data_parallel_size=4).own_ranks() for rank in (0, 1)]
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    """

    def __init__(self, rank: int, world_size: int, data_parallel_size: int) -> None:
        world_size = check_size("world_size", world_size)
        self.data_parallel_size = check_size("data_parallel_size", data_parallel_size, world_size)
        self.process_num_between_dp_rank = world_size // self.data_parallel_size
        super().__init__(
            rank,
            world_size,
            ParallelMode.DATA_PARALLEL,
            tensor_parallel_size=self.process_num_between_dp_rank,
        )


class TPGroupInitializer(_AxisGroupInitializer):
    """Tensor-parallel groups: consecutive ranks.

    Args:
        rank: world rank of this process.
        world_size: number of processes.
        tensor_parallel_size: number of processes in each group.

    Attributes:
        tensor_parallel_size: number of processes in each group.
        tensor_parallel_group_num: number of groups.

    Raises:
        LayoutError: ``tensor_parallel_size`` does not divide the world.

    >>> [TPGroupInitializer(rank, 8, tensor_parallel_size=4).own_ranks() for rank in (0, 4)]
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    def __init__(self, rank: int, world_size: int, tensor_parallel_size: int) -> None:
        super().__init__(
            rank, world_size, ParallelMode.TENSOR_PARALLEL, tensor_parallel_size=tensor_parallel_size
        )
        self.tensor_parallel_size = self.layout.tensor_parallel_size
        self.tensor_parallel_group_num = self.world_size // self.tensor_parallel_size


class SPGroupInitializer(_AxisGroupInitializer):
    """Sequence-parallel groups: consecutive ranks.

    Args:
        rank: world rank of this process.
        world_size: number of processes.
        sequence_parallel_size: number of processes in each group.

    Attributes:
        sequence_parallel_size: number of processes in each group.
        sequence_parallel_group_num: number of groups.

    Raises:
        LayoutError: ``sequence_parallel_size`` does not divide the world.

    >>> [SPGroupInitializer(rank, 4, sequence_parallel_size=2).own_ranks() for rank in (0, 2)]
    [[0, 1], [2, 3]]
    """

    def __init__(self, rank: int, world_size: int, sequence_parallel_size: int) -> None:
        super().__init__(
            rank, world_size, ParallelMode.SEQUENCE_PARALLEL, sequence_parallel_size=sequence_parallel_size
        )
        self.sequence_parallel_size = self.layout.sequence_parallel_size
        self.sequence_parallel_group_num = self.world_size // self.sequence_parallel_size


class InterNodeGroupInitializer(_AxisGroupInitializer):
    """Groups across nodes of equal size: the ranks with the same place on their node.

    Args:
        rank: world rank of this process.
        world_size: number of processes.
        local_world_size: number of processes per node.

    Attributes:
        local_world_size: number of processes per node.
        node_count: number of nodes.

    Raises:
        LayoutError: ``local_world_size`` does not divide the world.

    >>> [InterNodeGroupInitializer(rank, 6, local_world_size=3).own_ranks() for rank in (0, 1, 2)]
    [[0, 3], [1, 4], [2, 5]]
    """

    def __init__(self, rank: int, world_size: int, local_world_size: int) -> None:
        world_size = check_size("world_size", world_size)
        self.local_world_size = check_size("local_world_size", local_world_size, world_size)
        self.node_count = world_size // self.local_world_size
        super().__init__(
            rank, world_size, CommMode.INTER_NODE, node_sizes=[self.local_world_size] * self.node_count
        )


class _GivenRanksInitializer(RankListInitializer):
    """One group of the ranks it is given; every other rank is in none."""

    def __init__(self, rank: int, world_size: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, world_size)
        self.ranks = check_ranks(ranks, self.world_size)

    def own_ranks(self) -> list[int]:
        """The ranks that were given."""
        return self.ranks


class IntraNodeGroupInitializer(_GivenRanksInitializer):
    """The group of one node.

    Args:
        rank: world rank of this process.
        world_size: number of processes.
        ranks: world ranks on the node.

    Attributes:
        ranks: world ranks on the node, in the order given.

    Raises:
        LayoutError: the ranks are empty, repeated, or out of range.
    """

    mode = CommMode.INTRA_NODE


class TrainDPGroupInitializer(_GivenRanksInitializer):
    """The group over which training reduces its gradients, given by its ranks.

    Args:
        rank: world rank of this process.
        world_size: number of processes.
        ranks: world ranks that hold a copy of the same weights.

    Attributes:
        ranks: world ranks of the group, in the order given.

    Raises:
        LayoutError: the ranks are empty, repeated, or out of range.
    """

    mode = ParallelMode.TRAIN_DATA_PARALLEL


class WeightTransferGroupInitializer(_GivenRanksInitializer):
    """A group of senders and receivers of weights.

    Args:
        rank: world rank of this process.
        world_size: number of processes.
        ranks: world ranks that take part.

    Attributes:
        ranks: world ranks of the group, in the order given.

    Raises:
        LayoutError: the ranks are empty, repeated, or out of range.
    """

    mode = ParallelMode.WEIGHT_TRANSFER


# How often each group was made by hand, by the default group it was made in: its members count alike,
# since each takes part in every one of them.
_made_alone: WeakKeyDictionary[ProcessGroup, Counter[Hashable]] = WeakKeyDictionary()


def _new_group_alone(ranks: Sequence[int], mode: str, backend: str) -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    made = _made_alone.setdefault(world, Counter())
    key = (tuple(ranks), mode, backend)
    made[key] += 1
    return _create(
        ranks,
        name=f"rlightning_groups/alone/{mode}/{backend}/{_short_name(ranks)}/{made[key]}",
        backend=backend,
        timeout=None,
        options=None,
        description=mode,
    )


def _create(
    ranks: Sequence[int],
    *,
    name: str,
    backend: str,
    timeout: timedelta | None,
    options: Any,
    description: str,
) -> ProcessGroup:
    try:
        return _torch_compat.new_named_group(
            ranks,
            name=name,
            backend=backend,
            timeout=_torch_compat.default_timeout(backend) if timeout is None else timeout,
            options=options,
            description=description,
        )
    except Exception as error:  # torch raises half a dozen kinds, assertions among them
        raise ContextError(
            f"could not make the {description} group of ranks {_short_name(ranks)} with backend {backend!r}: "
            f"{error}. Without an accelerator, use backend='gloo'"
        ) from error


def _short_name(ranks: Sequence[int]) -> str:
    """The ranks themselves while they are few, else a hash of them."""
    text = "-".join(map(str, ranks))
    return text if len(text) <= 48 else hashlib.sha256(text.encode()).hexdigest()[:32]
