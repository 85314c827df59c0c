"""What ``initialize`` was asked for, and the sense made of it before any communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Union

import torch

from rlightning_groups._version import __version__
from rlightning_groups.errors import LayoutError
from rlightning_groups.group_initializer import ProcessGroupInitializer, RankListInitializer
from rlightning_groups.launch import Launch
from rlightning_groups.layout import ParallelLayout

Initializer = Union[ProcessGroupInitializer, Callable[[int, int], ProcessGroupInitializer]]  # noqa: UP007
"""An initializer, or a callable of (rank, world_size) that makes one, such as a class."""

Initializers = Union[Sequence[Initializer], Mapping[str, Initializer]]  # noqa: UP007
"""Initializers in a row, or by the names of their groups."""


@dataclass(frozen=True)
class Plan:
    """A request made sense of.

    Attributes:
        layout: who sits where; the nodes are not known yet.
        backend: torch backend of the groups.
        timeout: of the groups, ``None`` for torch's default.
        initializers: the extra groups, with their names.
        options: backend options by mode.
    """

    layout: ParallelLayout
    backend: str
    timeout: timedelta | None
    initializers: Sequence[tuple[str | None, ProcessGroupInitializer]]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """The arguments of ``ParallelContext.initialize``, as they were given."""

    tensor_parallel_size: int
    sequence_parallel_size: int
    data_parallel_size: int | None
    order: str
    backend: str | None
    timeout: timedelta | float | None
    initializers: Initializers
    cpu_groups: bool
    extra_axes: Mapping[str, int] | None
    composed: Mapping[str, Sequence[str]] | None
    backend_options: Mapping[str, Any] | None

    def plan(self, launch: Launch) -> Plan:
        """Make sense of the request for one launch.

        Args:
            launch: how this process was started.

        Raises:
            LayoutError: whatever does not fit.
        """
        layout = ParallelLayout(
            launch.world_size,
            tensor_parallel_size=self.tensor_parallel_size,
            sequence_parallel_size=self.sequence_parallel_size,
            data_parallel_size=self.data_parallel_size,  # type: ignore[arg-type]
            order=self.order,
            extra_axes=self.extra_axes,
            composed=self.composed,
        )
        if self.backend is not None and not isinstance(self.backend, str):
            raise LayoutError(f"backend={self.backend!r} must be a torch backend string such as 'gloo'")
        options = {} if self.backend_options is None else self.backend_options
        if not isinstance(options, Mapping):
            raise LayoutError(f"backend_options={options!r} must be a mapping from mode to options")
        made = [
            (name, make_initializer(one, launch.rank, launch.world_size))
            for name, one in _named(self.initializers)
        ]
        taken: set[tuple[str | None, str | None]] = {(mode, None) for mode in layout.modes}
        for name, initializer in made:
            if (initializer.mode, name) in taken:
                raise LayoutError(
                    f"two groups of mode {initializer.mode!r} are named {name!r}; pass initializers as a "
                    f"mapping that gives each a name"
                )
            taken.add((initializer.mode, name))
            planned_ranks(initializer)
        timeout = seconds(self.timeout)
        return Plan(layout, self.backend or launch.default_backend(), timeout, made, options)

    def settings(self, plan: Plan | None) -> dict[str, str]:
        """What all ranks must have asked for alike, printed.

        Args:
            plan: what the request came to; two spellings of one thing then print alike.
        """
        asked: dict[str, Any] = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "sequence_parallel_size": self.sequence_parallel_size,
            "data_parallel_size": plan.layout.data_parallel_size if plan else self.data_parallel_size,
            "order": self.order,
            "backend": plan.backend if plan else self.backend,
            "timeout": f"{plan.timeout.total_seconds():g}" if plan and plan.timeout else self.timeout,
            "cpu_groups": self.cpu_groups,
            "extra_axes": dict(plan.layout.extra_axes or {}) if plan else self.extra_axes,
            "composed": dict(plan.layout.composed or {}) if plan else self.composed,
            "backend_options": ", ".join(sorted(plan.options)) or "none" if plan else self.backend_options,
            "initializers": _print_all(plan.initializers) if plan else "unknown",
            "torch": torch.__version__,
            "rlightning_groups": __version__,
        }
        return {name: str(value) for name, value in asked.items()}

    def differs_from(self, earlier: Request, layout: ParallelLayout, backend: str) -> str | None:
        """What this request wants that a running context does not give, or ``None``.

        Args:
            earlier: the request the context was started with.
            layout: its layout.
            backend: its backend.

        Raises:
            LayoutError: an argument is of a wrong type.
        """
        if self.composed is not None and not isinstance(self.composed, Mapping):
            raise LayoutError(f"composed={self.composed!r} must be a mapping from mode to axes")
        # (name, asked for, there, whether leaving it out asks for nothing)
        pairs: list[tuple[str, Any, Any, bool]] = [
            ("tensor_parallel_size", self.tensor_parallel_size, layout.tensor_parallel_size, False),
            ("sequence_parallel_size", self.sequence_parallel_size, layout.sequence_parallel_size, False),
            ("data_parallel_size", self.data_parallel_size, layout.data_parallel_size, True),
            ("order", self.order, layout.order, False),
            ("backend", self.backend, backend, True),
            ("timeout", seconds(self.timeout), seconds(earlier.timeout), True),
            ("initializers", self.initializers, earlier.initializers, True),
            ("cpu_groups", self.cpu_groups, earlier.cpu_groups, True),
            ("extra_axes", self.extra_axes, dict(layout.extra_axes or {}), True),
            (
                "composed",
                {mode: tuple(axes) for mode, axes in (self.composed or {}).items()},
                dict(layout.composed or {}),
                True,
            ),
            ("backend_options", self.backend_options, earlier.backend_options, True),
        ]
        for name, asked, running, optional in pairs:
            nothing = (
                asked is None or asked is False or (isinstance(asked, (tuple, list, dict)) and not asked)
            )
            if asked != running and not (optional and nothing):
                return f"{name}={asked!r}, but it runs with {name}={running!r}"
        return None


def make_initializer(initializer: Initializer, rank: int, world_size: int) -> ProcessGroupInitializer:
    """An initializer, made if need be, that is for this rank.

    Args:
        initializer: an initializer, or a callable that makes one.
        rank: world rank of this process.
        world_size: number of processes.

    Raises:
        LayoutError: it is neither, has no mode, or is for another rank.
    """
    made: object = initializer
    if not isinstance(made, ProcessGroupInitializer) and callable(made):
        made = made(rank, world_size)
    if not isinstance(made, ProcessGroupInitializer):
        raise LayoutError(
            f"{initializer!r} gave a {type(made).__name__}; an initializer is a ProcessGroupInitializer or a "
            f"callable of (rank, world_size) that makes one"
        )
    if (made.rank, made.world_size) != (rank, world_size):
        raise LayoutError(
            f"{type(made).__name__} was made for rank={made.rank} of world_size={made.world_size}, but this "
            f"is rank {rank} of {world_size}"
        )
    return made


def planned_ranks(initializer: ProcessGroupInitializer | None) -> list[int] | None:
    """The ranks an initializer will use, where it can say so beforehand.

    Args:
        initializer: any initializer.
    """
    return initializer.planned_ranks() if isinstance(initializer, RankListInitializer) else None


def print_initializer(initializer: ProcessGroupInitializer | None, name: str | None) -> str:
    """An initializer in one word, equal on all ranks.

    Args:
        initializer: any initializer.
        name: the name of its group.
    """
    if initializer is None:
        return "nothing"
    return f"{type(initializer).__qualname__}(mode={initializer.mode!r}, name={name!r})"


def seconds(timeout: timedelta | float | None) -> timedelta | None:
    """A timeout as a timedelta.

    Args:
        timeout: a timedelta, a number of seconds, or ``None``.

    Raises:
        LayoutError: it is something else, or not longer than nothing.
    """
    if timeout is None or isinstance(timeout, timedelta):
        result = timeout
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        try:
            result = timedelta(seconds=timeout)
        except (OverflowError, ValueError):
            raise LayoutError(f"timeout={timeout!r} is no length of time; give seconds") from None
    else:
        raise LayoutError(f"timeout={timeout!r} must be a timedelta or a number of seconds")
    if result is not None and result <= timedelta(0):
        raise LayoutError(f"timeout={timeout!r} must be longer than nothing")
    return result


def _named(initializers: Initializers) -> list[tuple[str | None, Initializer]]:
    if isinstance(initializers, Mapping):
        return list(initializers.items())
    if isinstance(initializers, (list, tuple)):
        return [(None, one) for one in initializers]
    raise LayoutError(
        f"initializers={initializers!r} must be a list of initializers, or a mapping of them by name"
    )


def _print_all(made: Sequence[tuple[str | None, ProcessGroupInitializer]]) -> str:
    return ", ".join(print_initializer(one, name) for name, one in made) or "none"
