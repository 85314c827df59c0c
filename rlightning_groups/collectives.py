"""Collectives by parallel mode, with exact gradients of any order.

No call carries a hidden factor: each is a linear map between the ranks, and its backward is that map's
adjoint. What the backward assumes of the gradient it is given is written in the call. *Replicated* means
equal on every rank of the group and counted once; *partial* means that every rank holds a summand.

Every rank of the group makes the same calls in the same order, on tensors of the same dtype that need a
gradient alike: the backward is a collective too. :func:`debug` checks this before each call. No input is
changed. A group of one passes its input through, so there the result is the input itself. Every call raises
what :func:`~rlightning_groups.get_group` raises where there is no such group.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlightning_groups import _linear_maps as maps
from rlightning_groups._torch_compat import PrefixStore
from rlightning_groups.agreement import Statement, agree
from rlightning_groups.context import (
    ParallelContext,
    get_cpu_group,
    get_global_rank,
    get_group,
    get_ranks_in_group,
)
from rlightning_groups.errors import ContextError, ShapeError
from rlightning_groups.request import seconds

_Op = Literal["sum", "avg", "min", "max", "product"]

__all__ = [
    "copy_to",
    "reduce_from",
    "split_to",
    "gather_from",
    "reduce_scatter_to",
    "all_to_all",
    "broadcast_from",
    "ring_exchange",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_gather_object",
    "broadcast_object",
    "barrier",
    "chunk_sizes",
    "debug",
]

_debugging = os.environ.get("RLIGHTNING_GROUPS_DEBUG") == "1"


def debug(on: bool) -> bool:
    """Switch the check that all ranks of a group make the same call before it moves data.

    A wrong shape aborts the process under gloo and hangs under NCCL; the check makes it a
    :class:`~rlightning_groups.ShapeError` on every rank that names the ranks that differ. It sends a few
    hundred bytes per rank and call, and is skipped inside ``torch.compile``. It starts switched on where the
    environment variable ``RLIGHTNING_GROUPS_DEBUG`` is 1. All ranks switch it alike.

    Args:
        on: whether to check.

    Returns:
        Whether it was on before.
    """
    global _debugging
    before, _debugging = _debugging, on
    return before


def chunk_sizes(length: int, mode: str, *, name: str | None = None) -> tuple[int, ...]:
    """The lengths into which :func:`split_to` cuts, by group rank: what is left over goes to the first ranks.

    Args:
        length: the length of the whole.
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.

    Returns:
        One length per rank of the group; 10 over 4 ranks are 3, 3, 2, 2.
    """
    return _chunks(length, get_group(mode, name).size())


# ------------------------------------------------------------------------------------- differentiable calls


def copy_to(x: Tensor, mode: str, *, name: str | None = None) -> Tensor:
    """Use a replicated tensor differently on every rank.

    Forward: identity, sharing memory with ``x``. Backward: all-reduce sum of the partial gradients.

    Args:
        x: a replicated tensor.
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.

    Returns:
        ``x``; to change it in place, clone it first.

    Raises:
        ShapeError: ranks that differ (debug).
    """
    group = enter("copy_to", x, mode, name)
    return maps.linear(group, x, "copy", group.group_name)


def reduce_from(x: Tensor, mode: str, *, name: str | None = None) -> Tensor:
    """Sum partial tensors into a replicated one.

    Forward: all-reduce sum. Backward: identity, of a replicated gradient.

    Args:
        x: this rank's summand, of one shape on every rank.
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.

    Returns:
        The sum, on every rank.

    Raises:
        ShapeError: the dtype cannot be summed, or ranks that differ (debug).
    """
    group = enter("reduce_from", x, mode, name)
    _summable("reduce_from", x)
    return maps.linear(group, x, "reduce", group.group_name)


def split_to(
    x: Tensor, dim: int, mode: str, *, sizes: Sequence[int] | None = None, name: str | None = None
) -> Tensor:
    """Keep this rank's slice of a replicated tensor.

    Forward: own slice, a copy. Backward: all-gather of the slices' gradients, which is replicated.

    Args:
        x: a replicated tensor.
        dim: the dim to cut.
        mode: a mode.
        sizes: the slices' lengths by group rank; by default :func:`chunk_sizes` of the dim's length.
        name: which one, where this rank is in several groups of the mode.

    Returns:
        Slice number *group rank*.

    Raises:
        ShapeError: no such dim, sizes that do not add up to its length, or ranks that differ (debug).
    """
    group = enter("split_to", x, mode, name, dim=dim, sizes=sizes)
    dim, lengths = _cut("split_to", x, dim, sizes, group)
    return maps.linear(group, x, "split", dim, lengths, group.rank(), group.group_name)


def gather_from(
    x: Tensor,
    dim: int,
    mode: str,
    *,
    grad: Literal["replicated", "partial"],
    sizes: Sequence[int] | None = None,
    name: str | None = None,
) -> Tensor:
    """Put the ranks' slices together on every rank.

    Forward: all-gather. Backward: own slice of a ``replicated`` gradient, or reduce-scatter of a ``partial``
    one. The gradient is replicated where every rank goes on to compute the same from the result, and partial
    where each rank uses the result for its own share of the loss (a column-parallel layer, say).

    Args:
        x: this rank's slice.
        dim: the dim along which the slices lie.
        mode: a mode.
        grad: what the backward is given.
        sizes: the slices' lengths by group rank. By default all are as long as this rank's: nothing is sent
            to find out, so slices of unequal lengths need it (``chunk_sizes(length, mode)`` after split_to).
        name: which one, where this rank is in several groups of the mode.

    Returns:
        The slices in group order.

    Raises:
        ShapeError: an unknown ``grad``, no such dim, sizes that deny this rank's length, or ranks
            that differ (debug).
    """
    group = enter("gather_from", x, mode, name, own=(dim, sizes), dim=dim, sizes=sizes, grad=grad)
    if grad not in ("replicated", "partial"):
        raise ShapeError(f"gather_from: grad must be 'replicated' or 'partial', got {grad!r}")
    dim, lengths = _join("gather_from", x, dim, sizes, group)
    kind = "gather" if grad == "replicated" else "gather partial"
    return maps.linear(group, x, kind, dim, lengths, group.rank(), group.group_name)


def reduce_scatter_to(
    x: Tensor, dim: int, mode: str, *, sizes: Sequence[int] | None = None, name: str | None = None
) -> Tensor:
    """Sum partial tensors and keep this rank's slice of the sum.

    Forward: reduce-scatter sum. Backward: all-gather of the slices' gradients.

    Args:
        x: this rank's summand, of one shape on every rank.
        dim: the dim to cut.
        mode: a mode.
        sizes: the slices' lengths by group rank; by default :func:`chunk_sizes` of the dim's length.
        name: which one, where this rank is in several groups of the mode.

    Returns:
        Slice number *group rank* of the sum.

    Raises:
        ShapeError: no such dim, sizes that do not add up to its length, a dtype that cannot be summed, or
            ranks that differ (debug).
    """
    group = enter("reduce_scatter_to", x, mode, name, dim=dim, sizes=sizes)
    _summable("reduce_scatter_to", x)
    dim, lengths = _cut("reduce_scatter_to", x, dim, sizes, group)
    return maps.linear(group, x, "reduce scatter", dim, lengths, group.rank(), group.group_name)


def all_to_all(
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    mode: str,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    name: str | None = None,
) -> Tensor:
    """Change the dim along which a tensor is spread: whole ``scatter_dim`` and sliced ``gather_dim`` swap.

    Forward: all-to-all; slice *j* along ``scatter_dim`` goes to rank *j*, and what comes is joined along
    ``gather_dim`` in group order. Backward: the reverse.

    Args:
        x: this rank's slice along ``gather_dim``.
        scatter_dim: the dim to cut.
        gather_dim: the dim to join.
        mode: a mode.
        scatter_sizes: lengths along ``scatter_dim`` by group rank; by default :func:`chunk_sizes`.
        gather_sizes: the ranks' lengths along ``gather_dim``. By default all are as long as this rank's:
            nothing is sent to find out, so slices of unequal lengths need it.
        name: which one, where this rank is in several groups of the mode.

    Returns:
        This rank's slice along ``scatter_dim``.

    Raises:
        ShapeError: dims that are equal or do not exist, sizes that deny the lengths, or ranks that
            differ (debug).
    """
    dims, sizes = (scatter_dim, gather_dim), (scatter_sizes, gather_sizes)
    group = enter("all_to_all", x, mode, name, own=(gather_dim, gather_sizes), dims=dims, sizes=sizes)
    cut = _cut("all_to_all", x, scatter_dim, scatter_sizes, group)
    join = _join("all_to_all", x, gather_dim, gather_sizes, group)
    if cut[0] == join[0]:
        raise ShapeError(
            f"all_to_all: scatter_dim={scatter_dim} and gather_dim={gather_dim} are the same dim"
        )
    return maps.linear(group, x, "forth", cut, join, group.rank(), group.group_name)


def broadcast_from(x: Tensor, src: int, mode: str, *, name: str | None = None) -> Tensor:
    """Use one rank's tensor on every rank.

    Forward: broadcast. Backward: sum of the partial gradients on ``src``, zero elsewhere.

    Args:
        x: the tensor on ``src``; elsewhere any of its shape and dtype that needs a gradient if that one does.
        src: the group rank that sends.
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.

    Returns:
        The tensor of ``src``.

    Raises:
        ShapeError: there is no rank ``src``, or ranks that differ (debug).
    """
    group = enter("broadcast_from", x, mode, name, src=src)
    _check_src("broadcast_from", src, group)
    return maps.linear(group, x, "broadcast", src, group.rank(), group.group_name)


def ring_exchange(x: Tensor, mode: str, *, name: str | None = None) -> Tensor:
    """Pass a tensor on around the ring of the group.

    Forward: ``x`` to the next rank, the previous rank's back. Backward: the reverse.

    Args:
        x: a tensor of one shape on every rank.
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.

    Returns:
        The previous rank's tensor; rank 0 gets the last one's.

    Raises:
        ShapeError: ranks that differ (debug).
    """
    group = enter("ring_exchange", x, mode, name)
    return maps.linear(group, x, "next", group.rank(), group.size(), group.group_name)


# ----------------------------------------------------------------- plain calls: new tensors, no gradient


def all_reduce(
    x: Tensor,
    mode: str,
    *,
    op: _Op = "sum",
    name: str | None = None,
) -> Tensor:
    """The ranks' tensors reduced into one; not differentiable, see :func:`reduce_from`.

    Args:
        x: a tensor of one shape on every rank.
        mode: a mode.
        op: how.
        name: which one, where this rank is in several groups of the mode.

    Returns:
        A new tensor, equal on every rank.

    Raises:
        ShapeError: an unknown ``op``, a dtype that cannot be reduced, or ranks that differ (debug).
    """
    x = x.detach()
    group = enter("all_reduce", x, mode, name, op=op)
    _summable("all_reduce", x, op)
    return maps.new_result(group, x, lambda: maps.all_reduce(x, group.group_name, op))


def all_gather(
    x: Tensor, dim: int, mode: str, *, sizes: Sequence[int] | None = None, name: str | None = None
) -> Tensor:
    """The ranks' slices put together; not differentiable, see :func:`gather_from` for arguments and errors.

    Returns:
        A new tensor, equal on every rank.
    """
    x = x.detach()
    group = enter("all_gather", x, mode, name, own=(dim, sizes), dim=dim, sizes=sizes)
    dim, lengths = _join("all_gather", x, dim, sizes, group)
    return maps.new_result(group, x, lambda: maps.gather(x, dim, lengths, group.rank(), group.group_name))


def reduce_scatter(
    x: Tensor,
    dim: int,
    mode: str,
    *,
    op: _Op = "sum",
    sizes: Sequence[int] | None = None,
    name: str | None = None,
) -> Tensor:
    """This rank's slice of the ranks' tensors reduced into one; not differentiable.

    See :func:`reduce_scatter_to` for arguments and errors; ``op`` as in :func:`all_reduce`.

    Returns:
        A new tensor.
    """
    x = x.detach()
    group = enter("reduce_scatter", x, mode, name, dim=dim, sizes=sizes, op=op)
    _summable("reduce_scatter", x, op)
    dim, lengths = _cut("reduce_scatter", x, dim, sizes, group)
    return maps.new_result(
        group, x, lambda: maps.reduce_scatter(x, dim, lengths, group.rank(), group.group_name, op)
    )


def broadcast(x: Tensor, src: int, mode: str, *, name: str | None = None) -> Tensor:
    """The tensor of one rank; not differentiable, see :func:`broadcast_from` for arguments and errors.

    Returns:
        A new tensor, equal on every rank.
    """
    x = x.detach()
    group = enter("broadcast", x, mode, name, src=src)
    _check_src("broadcast", src, group)
    return maps.new_result(group, x, lambda: maps.broadcast(x, src, group.rank(), group.group_name))


def all_gather_object(value: Any, mode: str, *, name: str | None = None) -> list[Any]:
    """Every rank's value, by group rank; values are pickled.

    Args:
        value: anything that pickles.
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.
    """
    group = object_group(mode, name)
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, src: int, mode: str, *, name: str | None = None) -> Any:
    """The value of one rank, pickled.

    Args:
        value: anything that pickles; read on ``src`` only.
        src: the group rank that sends.
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.

    Raises:
        ShapeError: there is no rank ``src``.
    """
    group = object_group(mode, name)
    _check_src("broadcast_object", src, group)
    values = [value if group.rank() == src else None]
    dist.broadcast_object_list(values, src=get_ranks_in_group(mode, name)[src], group=group)
    return values[0]


def barrier(mode: str, *, name: str | None = None, timeout: timedelta | float | None = None) -> None:
    """Wait for every rank of the group.

    Args:
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.
        timeout: how long to wait, in seconds where it is a number, and then to say who is missing; such a
            barrier goes through the store, about six operations for each rank, and not through the group.
            ``None`` is the group's own barrier, whose error names nobody.

    Raises:
        AgreementError: with a ``timeout``, ranks that did not come, named on all that did.
    """
    group = get_group(mode, name)
    if (limit := seconds(timeout)) is not None:
        ranks = get_ranks_in_group(mode, name)
        # Groups of one mode that share a rank have different names.
        store = PrefixStore(f"barrier/{mode}/{name or ''}/{ranks[0]}", ParallelContext().store)
        call = f"barrier({mode})" if name is None else f"barrier({mode}, name={name!r})"
        agree(store, get_global_rank(), len(ranks), Statement({}, node=""), limit, call, ranks)
        return
    # NCCL would else guess the device from the global rank.
    devices = [torch.cuda.current_device()] if dist.get_backend(group) == "nccl" else None
    dist.barrier(group=group, device_ids=devices)


# ---------------------------------------------------------------------------------------------------- checks


def enter(
    call: str,
    x: Tensor,
    mode: str,
    name: str | None,
    own: tuple[int, Sequence[int] | None] | None = None,
    **said: Any,
) -> ProcessGroup:
    """The group of a call, once all its ranks are found to make the same one where the debug check is on.

    Args:
        call: what is called, for the message.
        x: its tensor.
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.
        own: the dim whose length is a rank's own business, with the lengths that all ranks were told.
        **said: further arguments that must be alike.

    Raises:
        ShapeError: ranks that differ (debug).
    """
    group = get_group(mode, name)
    if not _debugging or torch.compiler.is_compiling():
        return group
    shape: list[Any] = list(x.shape)
    dim, sizes = own or (0, None)
    if sizes and len(sizes) == group.size() and -x.dim() <= dim < x.dim():
        shape[dim] = "as told" if shape[dim] == sizes[group.rank()] else shape[dim]
    arguments = "".join(f", {key}={value}" for key, value in said.items() if value is not None)
    needs = ", needs a gradient" if x.requires_grad and torch.is_grad_enabled() else ""
    statements = all_gather_object(f"{call}({x.dtype} {shape}{needs}{arguments})", mode, name=name)
    usual = Counter(statements).most_common(1)[0][0]
    ranks = list(zip(get_ranks_in_group(mode, name), statements, strict=True))
    odd = [f"rank {rank} calls {statement}" for rank, statement in ranks if statement != usual]
    if odd:
        others = ", ".join(str(rank) for rank, statement in ranks if statement == usual)
        raise ShapeError(f"{mode}: {'; '.join(odd)}; but (of world ranks) {others} call {usual}")
    return group


def object_group(mode: str, name: str | None = None) -> ProcessGroup:
    """The group through which objects travel: the CPU group where there is one, else the mode's own.

    Args:
        mode: a mode.
        name: which one, where this rank is in several groups of the mode.
    """
    group = get_group(mode, name)
    try:
        return get_cpu_group(mode, name)
    except ContextError:  # an accelerator's group without a companion
        return group


def _chunks(length: int, count: int) -> tuple[int, ...]:
    return tuple(length // count + (1 if rank < length % count else 0) for rank in range(count))


def _check_dim(call: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"{call}: there is no dim {dim} in a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def _check_sizes(call: str, sizes: Sequence[int], group: ProcessGroup) -> tuple[int, ...]:
    if len(sizes) != group.size() or min(sizes) < 0:
        raise ShapeError(f"{call}: {list(sizes)} is not one size for each of the {group.size()} ranks")
    if torch.compiler.is_compiling() and min(sizes) == 0 < max(sizes):
        # A compiler drops what depends on an empty tensor: on that rank alone, so that the others would wait.
        raise ShapeError(f"{call}: sizes {list(sizes)} leave a rank without data, which cannot be compiled")
    return tuple(sizes)


def _cut(call: str, x: Tensor, dim: int, sizes: Sequence[int] | None, group: ProcessGroup) -> maps.Cut:
    """The dim and the lengths into which this rank cuts it."""
    dim = _check_dim(call, x, dim)
    sizes = _check_sizes(call, _chunks(x.shape[dim], group.size()) if sizes is None else sizes, group)
    if sum(sizes) != x.shape[dim]:
        raise ShapeError(f"{call}: sizes {list(sizes)} do not add up to {x.shape[dim]}, dim {dim}'s length")
    return dim, sizes


def _join(call: str, x: Tensor, dim: int, sizes: Sequence[int] | None, group: ProcessGroup) -> maps.Cut:
    """The dim and the ranks' own lengths along it."""
    dim = _check_dim(call, x, dim)
    if sizes is None:
        return dim, (x.shape[dim],) * group.size()
    sizes = _check_sizes(call, sizes, group)
    if sizes[group.rank()] != x.shape[dim]:
        raise ShapeError(
            f"{call}: sizes {list(sizes)} give group rank {group.rank()} a length of {sizes[group.rank()]}, "
            f"but dim {dim} of its tensor has {x.shape[dim]}"
        )
    return dim, sizes


def _check_src(call: str, src: int, group: ProcessGroup) -> None:
    if not 0 <= src < group.size():
        raise ShapeError(f"{call}: there is no group rank {src} among {group.size()}; src counts from 0")


def _summable(call: str, x: Tensor, op: str = "sum") -> None:
    if op not in get_args(_Op):
        raise ShapeError(f"{call}: op must be one of {', '.join(get_args(_Op))}, got {op!r}")
    if maps.is_fp8(x):
        raise ShapeError(f"{call}: {x.dtype} cannot be summed; convert it first, to bfloat16 say")
