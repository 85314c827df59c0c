"""How a parameter lies over the groups, where a DTensor's placements do not say it."""

from __future__ import annotations

from torch import Tensor

from rlightning_groups.errors import LayoutError
from rlightning_groups.modes import ParallelMode

__all__ = ["mark_partial_gradient", "partial_gradient_modes"]

_PARTIAL = "_rlightning_groups_partial_modes"


def mark_partial_gradient(parameter: Tensor, mode: str = ParallelMode.TENSOR_PARALLEL) -> None:
    """Say that each rank of a group computes a summand of a replicated parameter's gradient.

    Such is a norm's weight inside a sequence-sharded region: every tensor-parallel rank uses all of it, on
    its own tokens. The strategy sums the gradients over the group once per optimizer step, before unscaling
    and clipping; without the strategy call :func:`~rlightning_groups.gradients.sum_partial_gradients`.

    Args:
        parameter: a plain parameter that is equal on all ranks of the group; marking twice is marking once.
            The mark stays with this object: a copy made by ``copy.deepcopy`` needs its own.
        mode: over whose group the gradient is to be summed.

    Raises:
        LayoutError: ``parameter`` is not a leaf tensor that needs a gradient, or ``mode`` no string.
    """
    if not isinstance(parameter, Tensor) or not parameter.is_leaf or not parameter.requires_grad:
        raise LayoutError(
            f"only a parameter that needs a gradient can be marked, got {type(parameter).__name__}"
        )
    if not isinstance(mode, str) or not mode:
        raise LayoutError(f"mode={mode!r} must be the name of a mode")
    setattr(parameter, _PARTIAL, tuple(dict.fromkeys([*partial_gradient_modes(parameter), mode])))


def partial_gradient_modes(parameter: Tensor) -> tuple[str, ...]:
    """The modes over which a parameter's gradient is a summand; empty where it was not marked.

    Args:
        parameter: any tensor.
    """
    modes: tuple[str, ...] = getattr(parameter, _PARTIAL, ())
    return modes
