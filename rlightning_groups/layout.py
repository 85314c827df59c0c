"""Which rank sits where: sizes and an order of axes turned into coordinates and rank lists.

Pure arithmetic without torch or processes, so any rank of any world can be asked about on a laptop.

World rank is a mixed-radix number whose digits are the coordinates, the first axis of ``order`` being the
digit that changes fastest. With the default order ``"tp-sp-dp"``::

    rank = (data * sequence_parallel_size + sequence) * tensor_parallel_size + tensor

>>> layout = ParallelLayout(8, tensor_parallel_size=2, sequence_parallel_size=2)
>>> layout.groups("TENSOR_PARALLEL")
[[0, 1], [2, 3], [4, 5], [6, 7]]
>>> layout.groups("SEQUENCE_PARALLEL")
[[0, 2], [1, 3], [4, 6], [5, 7]]
>>> layout.groups("DATA_PARALLEL")
[[0, 4], [1, 5], [2, 6], [3, 7]]
>>> layout.groups("TRAIN_DATA_PARALLEL")
[[0, 2, 4, 6], [1, 3, 5, 7]]
>>> layout.coordinates(6)
{'data': 1, 'sequence': 1, 'tensor': 0}
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from rlightning_groups.errors import LayoutError
from rlightning_groups.modes import ParallelMode

_TOKENS = {"tp": "tensor", "sp": "sequence", "dp": "data"}
_AXIS_MODES = {
    "data": ParallelMode.DATA_PARALLEL,
    "sequence": ParallelMode.SEQUENCE_PARALLEL,
    "tensor": ParallelMode.TENSOR_PARALLEL,
}
_RESERVED = frozenset(
    value
    for name, value in (*vars(ParallelMode).items(), *vars(ParallelMode.__base__).items())
    if name.isupper()
)


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes and order of the parallel axes of one world, and every group that follows from them.

    Args:
        world_size: number of processes.
        tensor_parallel_size: number of ranks that share one layer's weights.
        sequence_parallel_size: number of ranks that share one sample's tokens.
        data_parallel_size: number of ranks that read different samples; ``None`` takes what the other sizes
            leave of the world.
        order: the axes, fastest first, joined by ``-``: ``tp``, ``sp``, ``dp`` and the name of each extra
            axis, each exactly once.
        node_sizes: number of ranks on each node, for consecutive ranks; ``None`` is one node.
        extra_axes: further axes and their sizes, e.g. ``{"pipeline": 2}``. Each has a mode, its name in
            capitals, and must stand in ``order``.
        composed: further modes over several axes, e.g. ``{"MODEL_PARALLEL": ("tensor", "pipeline")}``.
        node_of_rank: the node of each rank, for nodes whose ranks are not consecutive; excludes
            ``node_sizes``.

    Raises:
        LayoutError: a size is not a positive int, the sizes do not multiply to the world size, ``order`` is
            not a permutation of the axes, the nodes do not add up, or a name is taken.

    >>> ParallelLayout(8, tensor_parallel_size=3)
    Traceback (most recent call last):
        ...
    rlightning_groups.errors.LayoutError: tensor_parallel_size=3 does not divide world_size=8; \
sizes that do: 1, 2, 4, 8
    """

    world_size: int
    tensor_parallel_size: int = 1
    sequence_parallel_size: int = 1
    data_parallel_size: int = None  # type: ignore[assignment]  # None on the way in, an int ever after
    order: str = "tp-sp-dp"
    node_sizes: Sequence[int] | None = None
    extra_axes: Mapping[str, int] | None = field(default=None, hash=False)
    composed: Mapping[str, Sequence[str]] | None = field(default=None, hash=False)
    node_of_rank: Sequence[int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        def freeze(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        freeze("world_size", _size("world_size", self.world_size))
        extra = dict(_mapping("extra_axes", self.extra_axes))
        for name in extra:
            _check_axis_name(name)
        freeze(
            "extra_axes",
            MappingProxyType({name: _size(f"extra_axes[{name!r}]", extra[name]) for name in extra}),
        )
        freeze("data_parallel_size", self._resolve_sizes())
        self._check_order()
        freeze("composed", MappingProxyType(self._check_composed()))
        self._freeze_nodes(freeze)

    # What was asked for, checked.

    def _resolve_sizes(self) -> int:
        """Check that the sizes multiply to the world and return data_parallel_size."""
        world = self.world_size
        asked = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "sequence_parallel_size": self.sequence_parallel_size,
            **{f"extra_axes[{name!r}]": size for name, size in (self.extra_axes or {}).items()},
        }
        data_parallel_size: int | None = self.data_parallel_size
        if data_parallel_size is not None:
            asked["data_parallel_size"] = data_parallel_size
        sizes = {name: check_size(name, size, world) for name, size in asked.items()}
        object.__setattr__(self, "tensor_parallel_size", sizes["tensor_parallel_size"])
        object.__setattr__(self, "sequence_parallel_size", sizes["sequence_parallel_size"])

        product = math.prod(sizes.values())
        telling = {name: size for name, size in sizes.items() if size > 1} or sizes
        text = " x ".join(f"{name}={size}" for name, size in telling.items())
        if "data_parallel_size" not in asked:
            if world % product:
                raise LayoutError(
                    f"{text} = {product} does not divide world_size={world}; "
                    f"products that do: {_divisors(world)}"
                )
            return world // product
        if product != world:
            others = product // sizes["data_parallel_size"]
            fit = (
                f"with the other sizes, data_parallel_size={world // others} would"
                if world % others == 0
                else f"the sizes besides data_parallel_size must multiply to one of {_divisors(world)}"
            )
            raise LayoutError(f"{text} = {product} is not world_size={world}; {fit}")
        return sizes["data_parallel_size"]

    def _check_order(self) -> None:
        tokens = [*_TOKENS, *self._extra]
        given = self.order.split("-") if isinstance(self.order, str) else []
        if sorted(given) != sorted(tokens):
            example = "-".join(["tp", "sp", *self._extra, "dp"])
            raise LayoutError(
                f"order={self.order!r} must name each of {', '.join(tokens)} exactly once, fastest first, "
                f"joined by '-'; for example {example!r}"
            )

    def _check_composed(self) -> dict[str, tuple[str, ...]]:
        taken = {*_RESERVED, *(name.upper() for name in self._extra)}
        result: dict[str, tuple[str, ...]] = {}
        for mode, names in _mapping("composed", self.composed).items():
            if not isinstance(mode, str) or not mode or mode in taken:
                raise LayoutError(
                    f"composed mode {mode!r} must be a new name; taken are {', '.join(sorted(taken))}"
                )
            axes = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (names,)
            if not axes or len(set(axes)) != len(axes) or not set(axes) <= set(self.axes):
                raise LayoutError(
                    f"composed[{mode!r}]={axes!r} must name different axes out of {', '.join(self.axes)}"
                )
            result[mode] = axes
        return result

    def _freeze_nodes(self, freeze: Any) -> None:
        world = self.world_size
        if self.node_of_rank is not None:
            given = self.node_of_rank
            if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
                raise LayoutError(f"node_of_rank must list the node of each rank, got {given!r}")
            nodes = tuple(_integer("node_of_rank", node) for node in given)
            if len(nodes) != world or set(nodes) != set(range(len(set(nodes)))):
                raise LayoutError(
                    f"node_of_rank must give each of the {world} ranks a node counted from 0 without gaps, "
                    f"got {_short(nodes)}"
                )
            freeze("node_of_rank", nodes)
            sizes = tuple(len(members) for members in self._scattered_nodes)
            if self.node_sizes is not None and tuple(self.node_sizes) != sizes:
                raise LayoutError(
                    f"node_sizes {_short(self.node_sizes)} and node_of_rank, whose nodes have "
                    f"{_short(sizes)} ranks, were both given; give one of them"
                )
            freeze("node_sizes", sizes)
            if list(nodes) == sorted(nodes):  # consecutive after all: the sizes say it
                freeze("node_of_rank", None)
            return
        if self.node_sizes is None:
            freeze("node_sizes", (world,))
            return
        if isinstance(self.node_sizes, (str, bytes)) or not isinstance(self.node_sizes, Iterable):
            raise LayoutError(
                f"node_sizes must list the number of ranks of each node, got {self.node_sizes!r}"
            )
        sizes = tuple(_size("node_sizes", size) for size in self.node_sizes)
        if sum(sizes) != world:
            raise LayoutError(f"node_sizes {_short(sizes)} add up to {sum(sizes)}, not to world_size={world}")
        freeze("node_sizes", sizes)

    # The axes.

    @property
    def _extra(self) -> Mapping[str, int]:
        return self.extra_axes or {}

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, fastest first."""
        return tuple(_TOKENS.get(token, token) for token in self.order.split("-"))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Size of each axis: data, sequence, tensor, then the extra ones."""
        return MappingProxyType(
            {
                "data": self.data_parallel_size,
                "sequence": self.sequence_parallel_size,
                "tensor": self.tensor_parallel_size,
                **self._extra,
            }
        )

    @cached_property
    def _strides(self) -> Mapping[str, int]:
        strides, stride = {}, 1
        for axis in self.axes:
            strides[axis] = stride
            stride *= self.sizes[axis]
        return MappingProxyType(strides)

    @cached_property
    def _axes_of_mode(self) -> Mapping[str, tuple[str, ...]]:
        """The axes that each mode spans, slowest first; node modes are not here."""
        spans: dict[str, Iterable[str]] = {
            ParallelMode.GLOBAL: self.axes,
            ParallelMode.TRAIN_DATA_PARALLEL: ("data", "sequence"),
            **{mode: (axis,) for axis, mode in _AXIS_MODES.items()},
            **{axis.upper(): (axis,) for axis in self._extra},
            **(self.composed or {}),
        }
        return MappingProxyType(
            {
                mode: tuple(axis for axis in reversed(self.axes) if axis in set(span))
                for mode, span in spans.items()
            }
        )

    @cached_property
    def modes(self) -> tuple[str, ...]:
        """Every mode this layout knows."""
        spans = list(self._axes_of_mode)
        return (spans[0], ParallelMode.INTRA_NODE, ParallelMode.INTER_NODE, *spans[1:])

    def axes_of(self, mode: str) -> tuple[str, ...]:
        """The axes a mode spans, slowest first; empty for INTRA_NODE and INTER_NODE.

        Args:
            mode: a mode of this layout.

        Raises:
            LayoutError: the layout has no such mode.
        """
        self._check_mode(mode)
        return self._axes_of_mode.get(mode, ())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank sits on each axis.

        Args:
            rank: world rank.

        Returns:
            ``{"data": d, "sequence": s, "tensor": t}`` and one entry per extra axis.

        Raises:
            LayoutError: the rank is out of range.
        """
        rank = self._check_rank(rank)
        return {axis: rank // self._strides[axis] % size for axis, size in self.sizes.items()}

    def rank(self, /, **coordinates: int) -> int:
        """The world rank at the given coordinates, the inverse of :meth:`coordinates`.

        Args:
            **coordinates: one per axis (``data=``, ``sequence=``, ``tensor=`` and the extra ones); an axis of
                size 1 may be left out.

        Raises:
            LayoutError: an axis is missing, unknown, or a coordinate is out of range.

        >>> ParallelLayout(8, tensor_parallel_size=2).rank(data=1, tensor=1)
        3
        """
        unknown = set(coordinates) - set(self.sizes)
        missing = [axis for axis, size in self.sizes.items() if size > 1 and axis not in coordinates]
        if unknown or missing:
            raise LayoutError(
                f"rank() needs a coordinate for each of {', '.join(self.sizes)}; "
                f"missing: {', '.join(missing) or 'none'}, unknown: {', '.join(sorted(unknown)) or 'none'}"
            )
        rank = 0
        for axis, value in coordinates.items():
            index = _integer(axis, value)
            if not 0 <= index < self.sizes[axis]:
                raise LayoutError(
                    f"{axis}={index} is out of range; the axis goes from 0 to {self.sizes[axis] - 1}"
                )
            rank += index * self._strides[axis]
        return rank

    # The groups.

    def ranks_in_group(self, mode: str, rank: int) -> list[int]:
        """The ranks of the one group of a mode that a rank is in, in ascending order.

        Costs time in proportion to the group, not to the world (for INTER_NODE: to the number of nodes).

        Args:
            mode: a mode of this layout.
            rank: world rank.

        Raises:
            LayoutError: unknown mode, or rank out of range.
        """
        self._check_mode(mode)
        rank = self._check_rank(rank)
        if mode == ParallelMode.INTRA_NODE:
            return self._node_members(self.node(rank))
        if mode == ParallelMode.INTER_NODE:
            position = self.node_local_rank(rank)
            if self.node_of_rank is None:
                starts = zip(self._node_starts, self._node_sizes, strict=True)
                return [start + position for start, size in starts if size > position]
            members = (self._node_members(node) for node in range(self.node_count))
            return sorted(ranks[position] for ranks in members if len(ranks) > position)
        if mode == ParallelMode.GLOBAL:
            return list(range(self.world_size))
        span = self._axes_of_mode[mode]
        base = rank - sum(rank // self._strides[a] % self.sizes[a] * self._strides[a] for a in span)
        return self._span(base, span)

    def groups(self, mode: str) -> list[list[int]]:
        """Every group of a mode, by its first rank; together they hold each world rank exactly once.

        Args:
            mode: a mode of this layout.

        Raises:
            LayoutError: unknown mode.
        """
        self._check_mode(mode)
        if mode == ParallelMode.INTRA_NODE:
            return sorted(self._node_members(node) for node in range(self.node_count))
        if mode == ParallelMode.INTER_NODE:
            largest = max(range(self.node_count), key=lambda node: self._node_sizes[node])
            return sorted(self.ranks_in_group(mode, rank) for rank in self._node_members(largest))
        span = self._axes_of_mode[mode]
        others = tuple(axis for axis in reversed(self.axes) if axis not in span)
        return [self._span(base, span) for base in self._span(0, others)]

    def _span(self, base: int, axes: tuple[str, ...]) -> list[int]:
        """Ranks reached from ``base`` by moving along ``axes`` (slowest first)."""
        ranks = [base]
        for axis in axes:
            stride = self._strides[axis]
            stop = self.sizes[axis] * stride
            ranks = [rank + step for rank in ranks for step in range(0, stop, stride)]
        return ranks

    # The nodes.

    @property
    def _node_sizes(self) -> tuple[int, ...]:
        return self.node_sizes  # type: ignore[return-value]  # a tuple since __post_init__

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return len(self._node_sizes)

    @cached_property
    def _node_starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self._node_sizes[:-1], initial=0))

    @cached_property
    def _scattered_nodes(self) -> tuple[tuple[int, ...], ...]:
        members: dict[int, list[int]] = {}
        for rank, node in enumerate(self.node_of_rank or ()):
            members.setdefault(node, []).append(rank)
        return tuple(tuple(members[node]) for node in range(len(members)))

    def node(self, rank: int) -> int:
        """The node a rank runs on, counted from 0.

        Args:
            rank: world rank.
        """
        rank = self._check_rank(rank)
        if self.node_of_rank is not None:
            return self.node_of_rank[rank]
        return bisect_right(self._node_starts, rank) - 1

    def node_local_rank(self, rank: int) -> int:
        """The position of a rank among the ranks of its node.

        Args:
            rank: world rank.
        """
        rank = self._check_rank(rank)
        node = self.node(rank)
        if self.node_of_rank is not None:
            return self._scattered_nodes[node].index(rank)
        return rank - self._node_starts[node]

    def _node_members(self, node: int) -> list[int]:
        if self.node_of_rank is not None:
            return list(self._scattered_nodes[node])
        start = self._node_starts[node]
        return list(range(start, start + self._node_sizes[node]))

    # Saying what it is.

    def describe(self, max_groups: int = 8) -> str:
        """A plain-text table: each mode, its group size, and who is in which group.

        Args:
            max_groups: how many groups of a mode to spell out.

        >>> print(ParallelLayout(4, tensor_parallel_size=2, sequence_parallel_size=2).describe())
        4 ranks = data 1 x sequence 2 x tensor 2, order tp-sp-dp, 1 node
        mode                 size  groups
        GLOBAL               4     0,1,2,3
        INTRA_NODE           4     0,1,2,3
        INTER_NODE           1     0  1  2  3
        TRAIN_DATA_PARALLEL  2     0,2  1,3
        DATA_PARALLEL        1     0  1  2  3
        SEQUENCE_PARALLEL    2     0,2  1,3
        TENSOR_PARALLEL      2     0,1  2,3
        """
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        nodes = f"{self.node_count} node{'s' if self.node_count > 1 else ''}"
        width = max(len(mode) for mode in self.modes) + 2
        lines = [
            f"{ranks} = {sizes}, order {self.order}, {nodes}",
            f"{'mode':<{width}}size  groups",
        ]
        for mode in self.modes:
            groups = self.groups(mode)
            lengths = sorted({len(group) for group in groups})
            size = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]}-{lengths[-1]}"
            shown = "  ".join(_short(group) for group in groups[:max_groups])
            more = f"  ... {len(groups) - max_groups} more" if len(groups) > max_groups else ""
            lines.append(f"{mode:<{width}}{size:<6}{shown}{more}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe().splitlines()[0]

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only mappings do not pickle; the constructor's arguments do.
        scattered = self.node_of_rank is not None
        arguments = (
            self.world_size,
            self.tensor_parallel_size,
            self.sequence_parallel_size,
            self.data_parallel_size,
            self.order,
            None if scattered else self.node_sizes,
            dict(self._extra),
            dict(self.composed or {}),
            self.node_of_rank,
        )
        return _rebuild, arguments

    def _check_rank(self, rank: int) -> int:
        index = _integer("rank", rank)
        if not 0 <= index < self.world_size:
            raise LayoutError(f"rank={index} is out of range; the world has ranks 0 to {self.world_size - 1}")
        return index

    def _check_mode(self, mode: str) -> None:
        if mode not in self.modes:
            raise LayoutError(f"the layout has no mode {mode!r}; its modes are {', '.join(self.modes)}")


def _rebuild(*arguments: Any) -> ParallelLayout:
    return ParallelLayout(*arguments[:-1], node_of_rank=arguments[-1])


def check_size(name: str, size: int, world_size: int | None = None) -> int:
    """A size that is a positive int and, where a world is given, divides it.

    Args:
        name: what the message calls the size.
        size: number of ranks.
        world_size: number of processes that the size must divide.

    Raises:
        LayoutError: it is not.
    """
    size = _size(name, size)
    if world_size is not None and world_size % size:
        raise LayoutError(
            f"{name}={size} does not divide world_size={world_size}; sizes that do: {_divisors(world_size)}"
        )
    return size


def check_ranks(ranks: Iterable[int], world_size: int, name: str = "ranks") -> list[int]:
    """A list of world ranks in its given order, checked.

    Args:
        ranks: world ranks.
        world_size: number of processes.
        name: what the message calls the list.

    Returns:
        The same ranks as ints, in the same order.

    Raises:
        LayoutError: the list is empty, repeats a rank, or holds one that is out of range or not an int.

    >>> check_ranks([0, 4, 9], 8)
    Traceback (most recent call last):
        ...
    rlightning_groups.errors.LayoutError: ranks=0,4,9 holds 9, but the world has ranks 0 to 7
    """
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise LayoutError(f"{name} must be a list of world ranks, got {ranks!r}")
    result = [_integer(name, rank) for rank in ranks]
    if not result:
        raise LayoutError(f"{name} is empty; a group has at least one rank")
    outside = sorted({rank for rank in result if not 0 <= rank < world_size})
    if outside:
        raise LayoutError(
            f"{name}={_short(result)} holds {_short(outside)}, but the world has ranks 0 to {world_size - 1}"
        )
    if len(set(result)) != len(result):
        repeated = sorted({rank for rank in result if result.count(rank) > 1})
        raise LayoutError(f"{name}={_short(result)} repeats {_short(repeated)}; each rank may stand once")
    return result


def _mapping(name: str, value: Any) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise LayoutError(f"{name}={value!r} is a {type(value).__name__}; it must be a mapping")
    return value


def _integer(name: str, value: object) -> int:
    """Any integer type but bool, which is an int by accident."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]  # the TypeError is what is asked
        except TypeError:
            pass
    raise LayoutError(f"{name}={value!r} is a {type(value).__name__}; it must be an int")


def _size(name: str, value: object) -> int:
    size = _integer(name, value)
    if size < 1:
        raise LayoutError(f"{name}={size} must be at least 1")
    return size


def _check_axis_name(name: object) -> None:
    taken = {*_TOKENS, *_TOKENS.values()}
    if not isinstance(name, str) or not name.isidentifier() or not name.islower() or name in taken:
        raise LayoutError(
            f"extra axis {name!r} must be a lower-case identifier other than {', '.join(sorted(taken))}"
        )
    if name.upper() in _RESERVED:
        raise LayoutError(
            f"extra axis {name!r} would take the built-in mode {name.upper()}; choose another name"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def _short(ranks: Iterable[int], limit: int = 16) -> str:
    """Ranks joined by commas, the middle left out when there are many."""
    texts = [str(rank) for rank in ranks]
    if len(texts) > limit:
        texts = [*texts[: limit // 2], f"...({len(texts)} in all)...", texts[-1]]
    return ",".join(texts)
