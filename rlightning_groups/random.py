"""Random streams by layout: who draws alike, who draws otherwise, and how that survives a restart.

The default generators hold one of three kinds of stream:

- *shared*, after :func:`seed_everything_by_layout`: equal on every rank, for building the model;
- *step*, inside :func:`step_rng` or after :func:`start_streams`: equal on tensor-parallel peers, other for
  each data and sequence rank, for whatever is replicated over tensor-parallel ranks;
- *sharded*, inside :func:`sharded_rng`: other on every rank, for whatever is cut over tensor-parallel ranks.

Seeds are SHA-256 hashes of the run's seed, the step and the rank's coordinates; sums would collide. That of a
sharded stream is of a draw from the stream around it instead: recomputation under activation checkpointing,
which restores that one, draws the same again, and there is nothing more to save.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlightning_groups import _torch_compat
from rlightning_groups.collectives import all_gather_object, chunk_sizes, object_group
from rlightning_groups.context import ParallelContext, get_global_rank, get_local_rank
from rlightning_groups.errors import ContextError, LayoutError, ShapeError
from rlightning_groups.layout import ParallelLayout
from rlightning_groups.modes import ParallelMode

numpy: Any
try:
    import numpy
except ModuleNotFoundError:
    numpy = None

__all__ = [
    "seed_everything_by_layout",
    "start_streams",
    "step_rng",
    "sharded_rng",
    "preserved_rng",
    "rng_state",
    "set_rng_state",
    "init_full_then_shard",
]

_STEP_AXES = ("data", "sequence")

_seed: int | None = None


def seed_everything_by_layout(seed: int, *, reseed: bool = True) -> None:
    """Seed the default generators of torch, Python and numpy equally on all ranks; keep the seed for streams.

    Args:
        seed: the run's seed, from 0 to 2**64 - 1, the same on every rank.
        reseed: ``False`` only keeps the seed, for generators that are seeded already.

    Raises:
        ValueError: the seed is no such number.
    """
    global _seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed!r} must be an int from 0 to 2**64 - 1")
    _seed = seed
    if reseed:
        _seed_all(seed)


def start_streams(step: int = 0, *, axes: Sequence[str] = _STEP_AXES) -> None:
    """Put the default generators of torch, Python and numpy on this rank's step stream, for good.

    Args:
        step: the number of the stream; the same number gives the same stream again.
        axes: the axes of the layout along which draws differ; along all others they are equal.

    Raises:
        ContextError: the context is not initialized, or no seed was given.
        LayoutError: the layout has no such axis.
    """
    seed = _step_seed(step, "training", axes)
    _seed_all(seed)
    _seed_dtensor(seed)


@contextmanager
def step_rng(step: int, stream: str = "training", *, axes: Sequence[str] = _STEP_AXES) -> Iterator[None]:
    """Inside, torch's default generators run this rank's step stream; afterwards they are as they were.

    The stream depends on the run's seed and the arguments alone: at each step the ranks are in step again,
    whatever one of them has drawn elsewhere, and a run that goes on at step *n* goes on with the same masks.
    Python's and numpy's generators, by whose draws code may decide what to run, stay as equal as they were.

    Args:
        step: the number of the step or micro-batch.
        stream: what the steps are for; each name has its own streams.
        axes: the axes of the layout along which draws differ; along all others they are equal.

    Raises:
        ContextError: the context is not initialized, or no seed was given.
        LayoutError: the layout has no such axis.
    """
    seed = _step_seed(step, stream, axes)
    with _torch_stream(seed):
        _seed_dtensor(seed)
        yield


@contextmanager
def sharded_rng() -> Iterator[None]:
    """Inside, torch's default generators run a stream of this rank alone; afterwards they are as they were.

    For dropout on activations that are cut over tensor-parallel ranks. Every use, nested or not, is a new
    stream, whose seed is one draw of the surrounding one on the CPU: tensor-parallel peers enter it equally
    often. ``torch.utils.checkpoint`` recomputes the same masks as long as its ``preserve_rng_state`` is on.

    Raises:
        ContextError: the context is not initialized.
    """
    place = _place(tuple(ParallelContext().layout.sizes))
    draw = int(torch.randint(2**63 - 1, (), device="cpu").item())
    with _torch_stream(_hash("sharded", draw, *place)):
        yield


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Afterwards all default generators, torch's, Python's and numpy's, are as they were before."""
    state = _local_state()
    try:
        yield
    finally:
        _set_local_state(state)


def _step_seed(step: int, stream: str, axes: Sequence[str]) -> int:
    place = _place(axes)
    if _seed is None:
        raise ContextError("no seed was given; call seed_everything_by_layout(seed) on every rank first")
    return _hash("step", stream, _seed, int(step), *place)


def _place(axes: Sequence[str]) -> list[str]:
    """This rank's coordinates in words; index 0 is left out, so that an axis of size 1 changes nothing."""
    coordinates = ParallelContext().coordinates()
    if unknown := [axis for axis in axes if axis not in coordinates]:
        known = ", ".join(coordinates)
        raise LayoutError(f"axes={tuple(axes)!r}: there is no axis {unknown[0]!r}; the layout has {known}")
    return [f"{axis}={coordinates[axis]}" for axis in sorted(axes) if coordinates[axis]]


def _hash(*words: int | str) -> int:
    """A seed of 63 bits, which every generator accepts; torch's CPU generator uses the low 32."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little") >> 1


def _accelerator() -> Any:
    """Torch's module for the accelerator, if this process uses one: asking it must not start it."""
    kind = _torch_compat.accelerator_type()
    module: Any = None if kind is None else torch.get_device_module(kind)
    return module if module is not None and getattr(module, "is_initialized", lambda: True)() else None


@contextmanager
def _torch_stream(seed: int) -> Iterator[None]:
    generator, accelerator = torch.default_generator, _accelerator()
    state, device_state = generator.get_state(), accelerator and accelerator.get_rng_state()
    try:
        generator.manual_seed(seed)
        if accelerator is not None:
            accelerator.manual_seed(seed)
        yield
    finally:
        generator.set_state(state)
        if accelerator is not None:
            accelerator.set_rng_state(device_state)


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)  # the accelerator's as well, or as soon as it is started
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _seed_dtensor(seed: int) -> None:
    """Keep DTensor from copying world rank 0's state to every rank when it first draws on an accelerator."""
    if _accelerator() is not None:
        mesh = ParallelContext().device_mesh(ParallelMode.TENSOR_PARALLEL)
        if mesh.device_type != "cpu":  # where there is nothing to seed
            _torch_compat.seed_dtensor(seed, mesh)


def rng_state() -> dict[str, Any] | None:
    """Every rank's state of the default generators, for a checkpoint; a collective over GLOBAL.

    Equal states are sent and kept once; ``torch.load(weights_only=True)`` reads them.

    Returns:
        The states on world rank 0, ``None`` elsewhere.

    Raises:
        ContextError: the context is not initialized.
    """
    layout, rank = ParallelContext().layout, get_global_rank()
    own = _local_state()
    digests = all_gather_object(_digest(own), ParallelMode.GLOBAL)
    distinct = list(dict.fromkeys(digests))
    states: list[Any] = [own]
    if len(distinct) > 1:
        states = [None] * len(digests) if rank == 0 else []
        first = digests.index(digests[rank]) == rank
        group = object_group(ParallelMode.GLOBAL, None)
        dist.gather_object(own if first else None, states or None, dst=0, group=group)
    if rank != 0:
        return None
    return {
        "version": 1,
        "seed": _seed,
        "sizes": dict(layout.sizes),
        "order": layout.order,
        "digest": digests[0],
        "state_of_rank": [distinct.index(digest) for digest in digests],
        "states": [state for state in states if state is not None],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the default generators and the run's seed back to a saved state; no communication.

    A state that all ranks had in common is every rank's. Else a rank gets the state of its own coordinates,
    if the layout differs by the axes' order and the tensor-parallel size at most (by that size: the state of
    tensor rank 0). Else it gets a new stream by a hash of the seed, the saved state of world rank 0, and its
    own data and sequence coordinates.

    Args:
        state: what :func:`rng_state` gave world rank 0, on every rank.

    Raises:
        ContextError, ValueError: the context is not initialized; it is not such a state.
    """
    global _seed
    layout = ParallelContext().layout
    if not isinstance(state, dict) or state.get("version") != 1:
        raise ValueError("this is no state that rng_state() of this version gave world rank 0")
    _seed = _seed if state["seed"] is None else state["seed"]
    index = _saved_index(state, layout)
    if index is None:
        _seed_all(_hash("resumed", str(_seed), state["digest"], *_place(_STEP_AXES)))
    else:
        _set_local_state(state["states"][index])


def _saved_index(state: dict[str, Any], layout: ParallelLayout) -> int | None:
    """Which of the saved states this rank goes on with."""
    ranks, sizes = state["state_of_rank"], state["sizes"]
    if len(state["states"]) == 1:
        return 0
    if any(sizes.get(a, 1) != layout.sizes.get(a, 1) for a in {*sizes, *layout.sizes} - {"tensor"}):
        return None
    named = {f"{axis}_parallel_size": sizes[axis] for axis in ("tensor", "sequence", "data")}
    extra = {axis: size for axis, size in sizes.items() if f"{axis}_parallel_size" not in named}
    saved = ParallelLayout(len(ranks), **named, order=state["order"], extra_axes=extra)
    here = {axis: index for axis, index in ParallelContext().coordinates().items() if axis in sizes}
    if sizes["tensor"] != layout.tensor_parallel_size:
        here["tensor"] = 0
    return int(ranks[saved.rank(**here)])


def _local_state() -> dict[str, Any]:
    accelerator = _accelerator()
    return {
        "torch": torch.default_generator.get_state(),
        "python": _lists(random.getstate()),
        "numpy": None if numpy is None else _lists(numpy.random.get_state()),
        "accelerator": accelerator and [accelerator.__name__, accelerator.get_rng_state()],
    }


def _set_local_state(state: dict[str, Any]) -> None:
    torch.default_generator.set_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if state["numpy"] is not None and numpy is not None:
        numpy.random.set_state(tuple(state["numpy"]))
    name, device_state = state["accelerator"] or (None, None)
    accelerator = _accelerator()
    if accelerator is not None and accelerator.__name__ == name:
        accelerator.set_rng_state(device_state)
    elif accelerator is not None:  # one other than the saved one
        accelerator.manual_seed(_hash("accelerator", _digest(state)))


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(repr(_lists(list(state.items()))).encode()).hexdigest()


def _lists(value: Any) -> Any:
    """A nest of lists and arrays as a nest of lists."""
    if isinstance(value, (list, tuple)):
        return [_lists(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def init_full_then_shard(
    init: Callable[[Tensor], object],
    shape: Sequence[int],
    dim: int,
    mode: str = ParallelMode.TENSOR_PARALLEL,
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """This rank's slice of a weight that is initialised in full: the same model whatever the group's size.

    Every rank fills the full tensor from its default generators, which are equal over the group while the
    model is built, and frees it. Slices are as long as those of ``collectives.split_to``.

    Args:
        init: fills a tensor in place, e.g. ``torch.nn.init.xavier_uniform_``.
        shape: the full shape.
        dim: the dim to cut.
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.
        dtype: torch's default if ``None``.
        device: torch's default if ``None``.

    Returns:
        A new contiguous tensor.

    Raises:
        ContextError, ModeError, ShapeError: there is no such group, or no such dim.
    """
    rank = get_local_rank(mode, name)
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"init_full_then_shard: there is no dim {dim} in a tensor of shape {list(shape)}")
    sizes = chunk_sizes(shape[dim], mode, name=name)
    full = torch.empty(tuple(shape), dtype=dtype, device=device)
    with torch.no_grad():
        init(full)
    # A view would keep the full tensor.
    return full.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)
