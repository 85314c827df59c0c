"""Metrics of torchmetrics that synchronize over the ranks of a mode instead of over the whole world.

Over the world, whatever tensor-parallel ranks hold in common is counted once per rank. A metric keeps the
name of a mode, never a group: a metric that holds a group cannot be copied or pickled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rlightning_groups.context import get_group
from rlightning_groups.errors import LayoutError
from rlightning_groups.modes import ParallelMode

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["GatherOver", "sync_metrics_over", "sync_unconfigured_metrics"]

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class GatherOver:
    """Gathers a metric's state from the ranks of a mode: a metric's ``dist_sync_fn``.

    The group is looked up in every call, so that a metric can be built before the groups are, copied,
    pickled, and used after the groups were made anew.

    Attributes:
        mode: over whose group to gather where a call names no group.
    """

    mode: str

    def __call__(self, tensor: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
        """Gather one tensor of a metric's state; torchmetrics calls it.

        Args:
            tensor: this rank's; the dims' lengths may differ between ranks, their number may not.
            group: the metric's own ``process_group``, which wins; ``None`` is the mode's.

        Returns:
            The tensors of all ranks of the group, by group rank.

        Raises:
            ContextError: there are no groups.
            ModeError: this rank has no group of the mode.
        """
        # Only a metric calls this, so torchmetrics is loaded already.
        from torchmetrics.utilities.distributed import gather_all_tensors

        return gather_all_tensors(tensor, get_group(self.mode) if group is None else group)


def sync_metrics_over(module_or_metric: _Module, mode: str = ParallelMode.TRAIN_DATA_PARALLEL) -> _Module:
    """Make metrics synchronize over the group of a mode.

    TRAIN_DATA_PARALLEL, the default, counts each token once. Sequence peers share samples, so a metric that
    counts samples takes DATA_PARALLEL. A ``process_group`` given to a metric still wins; another
    ``dist_sync_fn`` is replaced. No group needs to be there yet: it is looked up when a metric is computed,
    and a mode that is not there raises ModeError then.

    Args:
        module_or_metric: a metric, a MetricCollection, or any module that holds some.
        mode: over whose group.

    Returns:
        The argument, so that the call can stand where the metric is made.

    Raises:
        LayoutError: there is no metric in the argument, or ``mode`` is no string.
    """
    if not isinstance(mode, str) or not mode:
        raise LayoutError(f"mode={mode!r} must be the name of a mode, such as ParallelMode.DATA_PARALLEL")
    metrics = list(_metrics_in(module_or_metric))
    if not metrics:
        raise LayoutError(
            f"sync_metrics_over needs a torchmetrics Metric, a MetricCollection or a module with some; "
            f"there is none in {type(module_or_metric).__name__}. Metrics in a plain list or dict are no "
            f"part of a module: keep them in a ModuleList, ModuleDict or MetricCollection"
        )
    for metric in metrics:
        metric.dist_sync_fn = GatherOver(mode)
    return module_or_metric


def sync_unconfigured_metrics(module: nn.Module, mode: str = ParallelMode.TRAIN_DATA_PARALLEL) -> int:
    """Make those metrics synchronize over the group of a mode of which nobody said where; for a strategy.

    A metric with a ``process_group`` or a ``dist_sync_fn``, by :func:`sync_metrics_over` for one, is left
    alone.

    Args:
        module: any module, with or without metrics.
        mode: over whose group.

    Returns:
        How many metrics were changed.
    """
    free = [m for m in _metrics_in(module) if m.process_group is None and m.dist_sync_fn is None]
    for metric in free:
        metric.dist_sync_fn = GatherOver(mode)
    return len(free)


def _metrics_in(module: object) -> Iterator[Metric]:
    """The metrics among a module and what it holds; without torchmetrics loaded there are none."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(module, nn.Module):
        yield from (one for one in module.modules() if isinstance(one, torchmetrics.Metric))
