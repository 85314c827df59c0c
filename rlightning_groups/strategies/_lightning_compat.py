"""The one place that touches names Lightning keeps private.

Both namespaces, ``pytorch_lightning`` (with ``lightning_fabric``) and ``lightning.pytorch`` (with
``lightning.fabric``), carry the same code twice; everything is looked up in the namespace that is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch.optim.swa_utils import AveragedModel


@dataclass(frozen=True)
class LightningNames:
    """What the strategy needs of one namespace.

    Attributes:
        optimizers_to_device: moves optimizer states; (optimizers, device).
        worker_init_function: seeds a dataloader worker; (worker_id, rank).
        rank_zero_info: logs on world rank 0.
        rank_zero_warn: warns on world rank 0.
        model_summary: the callback that prints a summary, from which the rich one derives.
        summary: the summary that it makes.
        throughput_monitor: the callback that measures throughput.
        weight_averages: the callbacks that keep an averaged copy of the model.
        precision: base class of the precision plugins.
        checkpoint_io: reads and writes a checkpoint in one file.
        wrapping_io: base class of what does it by another one.
    """

    optimizers_to_device: Callable[..., None]
    worker_init_function: Callable[..., None]
    rank_zero_info: Callable[..., None]
    rank_zero_warn: Callable[..., None]
    model_summary: type
    summary: type
    throughput_monitor: type
    weight_averages: tuple[type, ...]
    precision: Any
    checkpoint_io: Any
    wrapping_io: Any


@functools.cache
def names_of(namespace: str) -> LightningNames:
    """The names of ``pytorch_lightning`` or ``lightning.pytorch``.

    Args:
        namespace: one of the two.
    """
    fabric = {"pytorch_lightning": "lightning_fabric", "lightning.pytorch": "lightning.fabric"}[namespace]
    callbacks = import_module(f"{namespace}.callbacks")
    # WeightAveraging, the base of EMAWeightAveraging, came with 2.6.
    averages = [getattr(callbacks, n, None) for n in ("StochasticWeightAveraging", "WeightAveraging")]
    return LightningNames(
        optimizers_to_device=import_module(f"{fabric}.utilities.optimizer")._optimizers_to_device,
        worker_init_function=import_module(f"{fabric}.utilities.seed").pl_worker_init_function,
        rank_zero_info=import_module(f"{namespace}.utilities.rank_zero").rank_zero_info,
        rank_zero_warn=import_module(f"{namespace}.utilities.rank_zero").rank_zero_warn,
        model_summary=callbacks.ModelSummary,
        summary=import_module(f"{namespace}.utilities.model_summary").ModelSummary,
        throughput_monitor=callbacks.ThroughputMonitor,
        weight_averages=tuple(kind for kind in averages if kind is not None),
        precision=import_module(f"{namespace}.plugins.precision").Precision,
        checkpoint_io=import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO,
        wrapping_io=import_module(f"{namespace}.plugins.io.wrapper")._WrappingCheckpointIO,
    )


def throughputs_of(monitor: Any) -> Iterable[Any]:
    """What a ThroughputMonitor measures with, one for each stage of the Trainer.

    Args:
        monitor: the callback, after its ``setup``.
    """
    throughputs: dict[Any, Any] = monitor._throughputs
    return throughputs.values()


def replace_summary(callback: Any, base: type, summarize: Callable[..., Any]) -> None:
    """Make a ModelSummary print another summary, unless its class has one of its own.

    Args:
        callback: the callback, a rich one perhaps.
        base: the namespace's ModelSummary.
        summarize: makes the summary; (module, max_depth).
    """
    if type(callback)._summary is base._summary:  # type: ignore[attr-defined]
        callback._summary = functools.partial(_summarize, summarize, callback._max_depth)


def _summarize(summarize: Callable[..., Any], max_depth: int, trainer: Any, module: Any) -> Any:
    return summarize(module, max_depth)


def averaged_model_of(callback: Any) -> Any:
    """The copy of the model that a callback averages into, with the model's own names.

    Args:
        callback: one of :attr:`LightningNames.weight_averages`, after its ``setup``.
    """
    copy = callback._average_model
    return copy.module if isinstance(copy, AveragedModel) else copy
