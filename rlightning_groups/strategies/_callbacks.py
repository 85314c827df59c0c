"""Lightning's callbacks and a model's metrics, made to count replicas and full parameters, not ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlightning_groups.context import get_group, get_world_size
from rlightning_groups.errors import ContextError
from rlightning_groups.metrics import sync_unconfigured_metrics
from rlightning_groups.modes import ParallelMode
from rlightning_groups.sharding import shard_groups, shard_spec
from rlightning_groups.strategies import _lightning_compat
from rlightning_groups.strategies._lightning_compat import names_of

if TYPE_CHECKING:
    from pytorch_lightning.utilities.model_summary.model_summary import ModelSummary as _Summary
else:
    _Summary = object


def adapt_callbacks(trainer: Any, module: nn.Module) -> None:
    """Make metrics and callbacks right under the strategy, or refuse those that cannot be.

    A collective over the world in a fit: every rank calls it, once the model is what will be trained.

    Args:
        trainer: the Trainer whose strategy is being set up.
        module: its LightningModule.

    Raises:
        ContextError: a callback that averages weights copied a model that is no longer the one to train; on
            every rank, whichever found it.
    """
    names = names_of(trainer.strategy._namespace)
    sync_unconfigured_metrics(module)
    for callback in trainer.callbacks:
        if isinstance(callback, names.throughput_monitor):
            _count_replicas(callback)
        if isinstance(callback, names.model_summary):
            summarize = functools.partial(_full_summary, trainer.strategy._namespace)
            _lightning_compat.replace_summary(callback, names.model_summary, summarize)
    if trainer.state.fn == "fit":
        averages = [callback for callback in trainer.callbacks if isinstance(callback, names.weight_averages)]
        reasons = [reason for callback in averages if (reason := _why_not_averaged(callback, module))]
        _raise_together(trainer.strategy, reasons[0] if reasons else None)


# --------------------------------------------------------------------------------------------- throughput


def _count_replicas(monitor: Any) -> None:
    """Tensor and sequence peers read the same samples: all together are one device to the monitor."""
    replicas = get_world_size(ParallelMode.DATA_PARALLEL)
    peers = get_world_size(ParallelMode.GLOBAL) // replicas
    for throughput in _lightning_compat.throughputs_of(monitor):
        throughput.world_size = replicas
        # From the monitor's, which is one device's: a second run of the Trainer must not multiply again.
        throughput.available_flops = monitor.available_flops and monitor.available_flops * peers


# ------------------------------------------------------------------------------------------ model summary


class _FullCounts(_Summary):
    """Counts the full parameters where plain tensors are marked as shards; DTensors have full shapes."""

    def __init__(self, model: Any, max_depth: int) -> None:
        self._full_model = model
        super().__init__(model, max_depth=max_depth)

    @property
    def param_nums(self) -> list[int]:
        counts = zip(self.layer_names, super().param_nums, strict=True)
        return [n + _held_by_others(self._full_model.get_submodule(name).parameters()) for name, n in counts]

    @property
    def total_parameters(self) -> int:
        return super().total_parameters + _held_by_others(self._full_model.parameters())

    @property
    def trainable_parameters(self) -> int:
        trained = (p for p in self._full_model.parameters() if p.requires_grad)
        return super().trainable_parameters + _held_by_others(trained)


def _held_by_others(parameters: Iterable[Tensor]) -> int:
    """How many elements Lightning misses when it counts this rank's tensors."""
    return sum(prod(shard_spec(p).global_shape) - p.numel() for p in parameters if shard_groups(p))


@functools.cache
def _full_summary_class(namespace: str) -> type[_FullCounts]:
    return type("FullModelSummary", (_FullCounts, names_of(namespace).summary), {})


def _full_summary(namespace: str, model: Any, max_depth: int) -> _FullCounts:
    return _full_summary_class(namespace)(model, max_depth)


# ---------------------------------------------------------------------------------------- averaged weights


def _why_not_averaged(callback: Any, module: nn.Module) -> str | None:
    """Why the copy that a callback keeps cannot average the model's parameters; ``None`` where it can."""
    copied = dict(_lightning_compat.averaged_model_of(callback).named_parameters())
    own = dict(module.named_parameters())
    wrong = [f"{name!r} is gone" for name in copied if name not in own]
    for name, parameter in own.items():
        if isinstance(parameter, DTensor):
            wrong.append(f"{name!r} is a DTensor")
        elif shard_groups(parameter):
            wrong.append(f"{name!r} is marked as a shard")
        elif name not in copied:
            wrong.append(f"{name!r} is not in the copy")
        elif copied[name].shape != parameter.shape:
            was, now = list(copied[name].shape), list(parameter.shape)
            wrong.append(f"{name!r} has the shape {now}, and {was} in the copy")
    if not wrong:
        return None
    return (
        f"{type(callback).__name__} copies the model when the fit begins, and averages and saves tensors "
        f"that are plain and full on every rank, but {len(wrong)} of {len(own)} parameters are not what it "
        f"copied: {'; '.join(wrong[:3])}{'; ...' if len(wrong) > 3 else ''}. Leave the callback out, or "
        f"train a model that is built in __init__ and not sharded"
    )


def _raise_together(strategy: Any, reason: str | None) -> None:
    """Raise on every rank of the world where any has a reason to; the others would wait for it."""
    if strategy.reduce_boolean_decision(reason is None):
        return
    reasons: list[str | None] = [None] * get_world_size(ParallelMode.GLOBAL)
    dist.all_gather_object(reasons, reason, group=get_group(ParallelMode.GLOBAL))
    rank, told = next((rank, told) for rank, told in enumerate(reasons) if told is not None)
    raise ContextError(reason or f"rank {rank} refused: {told}")
