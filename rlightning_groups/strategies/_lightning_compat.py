"""The one place that touches names Lightning keeps private.

Both namespaces, ``pytorch_lightning`` (with ``lightning_fabric``) and ``lightning.pytorch`` (with
``lightning.fabric``), carry the same code twice; everything is looked up in the namespace that is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class LightningNames:
    """What the strategy needs of one namespace.

    Attributes:
        optimizers_to_device: moves optimizer states; (optimizers, device).
        worker_init_function: seeds a dataloader worker; (worker_id, rank).
        rank_zero_info: logs on world rank 0.
        rank_zero_warn: warns on world rank 0.
    """

    optimizers_to_device: Callable[..., None]
    worker_init_function: Callable[..., None]
    rank_zero_info: Callable[..., None]
    rank_zero_warn: Callable[..., None]


@functools.cache
def names_of(namespace: str) -> LightningNames:
    """The names of ``pytorch_lightning`` or ``lightning.pytorch``.

    Args:
        namespace: one of the two.
    """
    fabric = {"pytorch_lightning": "lightning_fabric", "lightning.pytorch": "lightning.fabric"}[namespace]
    return LightningNames(
        optimizers_to_device=import_module(f"{fabric}.utilities.optimizer")._optimizers_to_device,
        worker_init_function=import_module(f"{fabric}.utilities.seed").pl_worker_init_function,
        rank_zero_info=import_module(f"{namespace}.utilities.rank_zero").rank_zero_info,
        rank_zero_warn=import_module(f"{namespace}.utilities.rank_zero").rank_zero_warn,
    )
