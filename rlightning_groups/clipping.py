"""The norm of a gradient that is spread over groups, and clipping by it.

Each element of the full model counts once: parts are summed over the ranks that share them, copies are not.
How a parameter lies is asked of :func:`~rlightning_groups.sharding.shard_groups`. The results are those of
``torch.nn.utils`` on one process that holds the full model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from rlightning_groups.errors import GradientError, LayoutError
from rlightning_groups.sharding import local_tensor, shard_groups

__all__ = ["clip_grad_norm_", "clip_grad_value_", "grad_norms", "total_grad_norm"]


def total_grad_norm(parameters: Iterable[Tensor] | Tensor, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector, each element of the full model counted once.

    A collective over every group that a parameter is sharded over, one all-reduce for each; none where
    nothing is sharded. Partial gradients must have been summed before
    (:func:`~rlightning_groups.gradients.sum_partial_gradients`; the strategy does it).

    Args:
        parameters: DTensors, marked and unmarked plain tensors together, the same ones in the same order on
            all ranks; those without a gradient count as zero.
        norm_type: the p of the p-norm, above 0; ``math.inf`` gives the largest absolute value.

    Returns:
        A number in a float64 tensor, equal on all ranks (float32 where the device has no float64).

    Raises:
        LayoutError: ``norm_type`` is no number above 0.
        ModeError: a parameter is marked for a mode that has no group here.
    """
    return _norm_of_powers(_reduced(_once(parameters), _checked(norm_type), per_parameter=False), norm_type)


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients, in place, so that their norm is at most ``max_norm``.

    Args:
        parameters: see :func:`total_grad_norm`.
        max_norm: the norm that is not to be passed; torch's small constant of 1e-6 is added to the divisor.
        norm_type: see :func:`total_grad_norm`.
        error_if_nonfinite: raise where the norm is not finite instead of scaling by it.

    Returns:
        The norm before clipping.

    Raises:
        GradientError: the norm is not finite, with ``error_if_nonfinite``; on every rank.
        LayoutError, ModeError: see :func:`total_grad_norm`.
    """
    held = _once(parameters)
    norm = total_grad_norm(held, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise GradientError(
            f"the gradients have a norm of {float(norm)}, so they cannot be clipped to {max_norm}; leave "
            f"error_if_nonfinite off to scale them all the same"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in _gradients(held):
        gradient.mul_(factor.to(gradient))
    return norm


def clip_grad_value_(parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
    """Clamp every element of all gradients, in place; no communication but for gradients that are sums yet.

    Args:
        parameters: any parameters; those without a gradient are left alone.
        clip_value: the largest absolute value allowed.
    """
    for gradient in _gradients(_once(parameters)):
        gradient.clamp_(min=-clip_value, max=clip_value)


def grad_norms(module: nn.Module, norm_type: float = 2.0, group_separator: str = "/") -> dict[str, float]:
    """The norm of each parameter's full gradient and of all together, to be logged.

    Call it where gradients are complete, in ``on_before_optimizer_step`` say; a collective, as
    :func:`total_grad_norm` is.

    Args:
        module: the module whose parameters to take.
        norm_type: see :func:`total_grad_norm`.
        group_separator: what stands between the norm and the parameter's name.

    Returns:
        ``grad_2.0_norm/NAME`` for each parameter that has a gradient here, and ``grad_2.0_norm_total``, the
        keys that Lightning's ``grad_norm`` has; all equal on all ranks.

    Raises:
        LayoutError, ModeError: see :func:`total_grad_norm`.
    """
    named = dict(module.named_parameters())
    powers = _reduced(list(named.values()), _checked(norm_type), per_parameter=True)
    prefix = f"grad_{norm_type}_norm"
    norms = {
        f"{prefix}{group_separator}{name}": float(_norm_of_powers(power, norm_type))
        for (name, parameter), power in zip(named.items(), powers, strict=True)
        if parameter.grad is not None
    }
    return {**norms, f"{prefix}_total": float(_norm_of_powers(powers, norm_type))} if norms else {}


def _checked(norm_type: float) -> float:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise LayoutError(f"norm_type={norm_type} must be above 0; math.inf is the largest absolute value")
    return norm_type


def _once(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    """The parameters themselves, a shared one once."""
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    return list({id(parameter): parameter for parameter in given}.values())


@torch.no_grad()
def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    """The local parts of the gradients that are there, laid out as their parameters are."""
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            assert isinstance(parameter, DTensor)
            if gradient.placements != parameter.placements:
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
        if gradient is not None:
            local = local_tensor(gradient)
            gradients.append(local.coalesce()._values() if local.is_sparse else local)
    return gradients


@torch.no_grad()
def _reduced(parameters: list[Tensor], norm_type: float, per_parameter: bool) -> Tensor:
    """Sums of the elements' powers, or the largest ones: by parameter, or by the groups it is sharded over.

    One all-reduce for each group, of the sums that it shares.
    """
    groups: dict[str, ProcessGroup] = {}
    rows: dict[object, list[Tensor]] = {}
    shared: dict[object, tuple[str, ...]] = {}
    device = parameters[0].device if parameters else torch.device("cpu")
    for parameter in parameters:
        over = {str(group.group_name): group for group in shard_groups(parameter)}
        groups |= over
        key: object = id(parameter) if per_parameter else tuple(over)
        rows.setdefault(key, []).extend(_gradients([parameter]))
        shared[key] = tuple(over)
    largest = math.isinf(norm_type)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    powers = torch.stack(
        [_power(row, norm_type, dtype, device) for row in rows.values()] or [torch.zeros(())]
    )
    for name, group in groups.items():
        index = [number for number, key in enumerate(rows) if name in shared[key]]
        part = powers[index]
        dist.all_reduce(part, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        powers[index] = part
    return powers


def _power(gradients: list[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    norms = [
        # Half precision would overflow where its elements do not.
        torch.linalg.vector_norm(one, norm_type, dtype=torch.float32 if one.element_size() < 4 else None)
        for one in gradients
        if one.numel()
    ]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    together = torch.stack([norm.to(device, dtype) for norm in norms])
    return together.max() if math.isinf(norm_type) else together.pow(norm_type).sum()


def _norm_of_powers(powers: Tensor, norm_type: float) -> Tensor:
    return powers.max() if math.isinf(norm_type) else powers.sum().pow(1.0 / norm_type)
