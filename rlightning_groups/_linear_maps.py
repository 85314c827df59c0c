"""Linear maps between the ranks of a group, each with its adjoint: what the collectives are made of.

Arguments besides the tensor are constants: sizes, ranks, and the name of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# Private to torch, and the only collectives that torch.compile traces in every version: the public ones
# work in place, and the wrappers around these ops change their names and return lazy tensors. The import
# registers the ops' shape rules.
from torch.distributed import _functional_collectives as _registers_the_shape_rules  # noqa: F401

_ops = torch.ops._c10d_functional


def _copy(x: Tensor, group: str) -> Tensor:
    return x.view_as(x)


def all_reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    return _wait(_ops.all_reduce(x.contiguous(), op, group))


def _split(x: Tensor, dim: int, sizes: tuple[int, ...], rank: int, group: str) -> Tensor:
    return _slice(x, dim, sum(sizes[:rank]), sizes[rank])


def gather(x: Tensor, dim: int, sizes: tuple[int, ...], rank: int, group: str) -> Tensor:
    mine = _padded(_as_bytes(x), dim, max(sizes))
    stacked = _wait(_ops.all_gather_into_tensor(mine.unsqueeze(0), len(sizes), group))
    if dim == 0 and min(sizes) == max(sizes):
        return stacked.flatten(0, 1).view(x.dtype)  # saves a copy
    parts = [part.narrow(dim, 0, size) for part, size in zip(stacked.unbind(0), sizes, strict=True)]
    return torch.cat(parts, dim).view(x.dtype)


def reduce_scatter(
    x: Tensor, dim: int, sizes: tuple[int, ...], rank: int, group: str, op: str = "sum"
) -> Tensor:
    longest = max(sizes)
    if dim == 0 and min(sizes) == longest:
        stacked = x.contiguous()  # saves a copy
    else:
        stacked = torch.cat([_padded(part, dim, longest) for part in x.split(sizes, dim)])
    mine = _wait(_ops.reduce_scatter_tensor(stacked, op, len(sizes), group))
    return mine if sizes[rank] == longest else _slice(mine, dim, 0, sizes[rank])


Cut = tuple[int, tuple[int, ...]]  # a dim and the lengths of its slices


def _forth(x: Tensor, scatter: Cut, gather: Cut, rank: int, group: str) -> Tensor:
    (scatter_dim, scatter_sizes), (gather_dim, gather_sizes) = scatter, gather
    data = _as_bytes(x)
    sent = [part.reshape(-1) for part in data.split(scatter_sizes, scatter_dim)]
    shapes = [list(x.shape) for _ in gather_sizes]
    for shape, length in zip(shapes, gather_sizes, strict=True):
        shape[scatter_dim], shape[gather_dim] = scatter_sizes[rank], length
    flat = _exchange(torch.cat(sent), [_numel(s) for s in shapes], [p.numel() for p in sent], group)
    parts = flat.split([_numel(shape) for shape in shapes])
    return torch.cat([p.view(s) for p, s in zip(parts, shapes, strict=True)], gather_dim).view(x.dtype)


def _back(x: Tensor, scatter: Cut, gather: Cut, rank: int, group: str) -> Tensor:
    return _forth(x, gather, scatter, rank, group)


def broadcast(x: Tensor, src: int, rank: int, group: str) -> Tensor:
    return _wait(_ops.broadcast(_as_bytes(x).contiguous(), src, group)).view(x.dtype)


def _reduce_to(x: Tensor, src: int, rank: int, group: str) -> Tensor:
    total = all_reduce(x, group)
    # Plain zeros would leave the sum unused, and a compiler drops what is unused: on this rank alone, so that
    # the others would wait for ever.
    everywhere = torch.ones((), dtype=torch.bool, device=x.device)
    return total if rank == src else total.masked_fill(everywhere, 0)


def _next(x: Tensor, rank: int, size: int, group: str, step: int = 1) -> Tensor:
    sent, received = [0] * size, [0] * size
    sent[(rank + step) % size] = received[(rank - step) % size] = x.numel()
    return _exchange(_as_bytes(x).reshape(-1), received, sent, group).view(x.shape).view(x.dtype)


def _previous(x: Tensor, rank: int, size: int, group: str) -> Tensor:
    return _next(x, rank, size, group, step=-1)


# Each map with its adjoint, which takes the same arguments.
_MAPS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "copy": (_copy, "reduce"),
    "reduce": (all_reduce, "copy"),
    "split": (_split, "gather"),
    "gather": (gather, "split"),
    "gather partial": (gather, "reduce scatter"),
    "reduce scatter": (reduce_scatter, "gather partial"),
    "forth": (_forth, "back"),
    "back": (_back, "forth"),
    "broadcast": (broadcast, "reduce to"),
    "reduce to": (_reduce_to, "broadcast"),
    "next": (_next, "previous"),
    "previous": (_previous, "next"),
}


class _Linear(torch.autograd.Function):
    """One map; the backward applies the adjoint through this class again, so that it has a gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, *args: Any) -> Tensor:
        ctx.kind, ctx.args = kind, args
        return _MAPS[kind][0](x, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_apply(grad, _MAPS[ctx.kind][1], *ctx.args), None, *[None for _ in ctx.args])


def _apply(x: Tensor, kind: str, *args: Any) -> Tensor:
    result: Tensor = _Linear.apply(x, kind, *args)  # type: ignore[no-untyped-call]
    return result


def linear(group: ProcessGroup, x: Tensor, kind: str, *args: Any) -> Tensor:
    return x if group.size() == 1 else _apply(x, kind, *args)


def new_result(group: ProcessGroup, x: Tensor, collective: Callable[[], Tensor]) -> Tensor:
    return x.clone() if group.size() == 1 else collective()


def _wait(x: Tensor) -> Tensor:
    result: Tensor = _ops.wait_tensor(x)
    return result


def _exchange(flat: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    return _wait(_ops.all_to_all_single(flat, received, sent, group))


def _slice(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    # A copy: a view would keep the whole alive, and autograd would let nobody change it in place.
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _as_bytes(x: Tensor) -> Tensor:
    # gloo knows no fp8, and moving needs no more than the bytes.
    return x.view(torch.uint8) if is_fp8(x) else x


def is_fp8(x: Tensor) -> bool:
    return x.is_floating_point() and x.element_size() == 1


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """With zeros up to a length, because all-gather and reduce-scatter know only equal ones."""
    if x.shape[dim] == length:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
