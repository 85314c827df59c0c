"""Data-, sequence- and tensor-parallel process groups for PyTorch Lightning.

Names resolve when they are first used: the layout needs no torch, and nothing here needs Lightning until
the strategy is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlightning_groups._version import __version__

if TYPE_CHECKING:
    from rlightning_groups.context import ParallelContext as ParallelContext
    from rlightning_groups.context import get_cpu_group as get_cpu_group
    from rlightning_groups.context import get_global_rank as get_global_rank
    from rlightning_groups.context import get_group as get_group
    from rlightning_groups.context import get_local_rank as get_local_rank
    from rlightning_groups.context import get_ranks_in_group as get_ranks_in_group
    from rlightning_groups.context import get_world_size as get_world_size
    from rlightning_groups.context import is_initialized as is_initialized
    from rlightning_groups.errors import AgreementError as AgreementError
    from rlightning_groups.errors import CheckpointError as CheckpointError
    from rlightning_groups.errors import ContextError as ContextError
    from rlightning_groups.errors import GradientError as GradientError
    from rlightning_groups.errors import GroupsError as GroupsError
    from rlightning_groups.errors import LayoutError as LayoutError
    from rlightning_groups.errors import ModeError as ModeError
    from rlightning_groups.errors import ShapeError as ShapeError
    from rlightning_groups.layout import ParallelLayout as ParallelLayout
    from rlightning_groups.modes import CommMode as CommMode
    from rlightning_groups.modes import ParallelMode as ParallelMode
    from rlightning_groups.pytorch_lightning import HybridParallelStrategy as HybridParallelStrategy

_HOME = {
    "CommMode": "modes",
    "ParallelMode": "modes",
    "ParallelLayout": "layout",
    "ParallelContext": "context",
    "get_group": "context",
    "get_cpu_group": "context",
    "get_world_size": "context",
    "get_local_rank": "context",
    "get_ranks_in_group": "context",
    "get_global_rank": "context",
    "is_initialized": "context",
    "GroupsError": "errors",
    "LayoutError": "errors",
    "ShapeError": "errors",
    "ContextError": "errors",
    "ModeError": "errors",
    "AgreementError": "errors",
    "CheckpointError": "errors",
    "GradientError": "errors",
}

# The strategy is left out: a star import must work where there is no Lightning.
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "HybridParallelStrategy":
        value = _strategy()
    elif name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _strategy() -> Any:
    """The strategy of whichever Lightning is installed, pytorch_lightning first."""
    for module, needs in (("pytorch_lightning", "pytorch_lightning"), ("lightning", "lightning")):
        try:
            return import_module(f"{__name__}.{module}").HybridParallelStrategy
        except ModuleNotFoundError as error:
            if error.name != needs:
                raise
    raise ImportError(
        "HybridParallelStrategy needs Lightning; install it with: pip install 'rlightning_groups[lightning]'"
    )


def __dir__() -> list[str]:
    return sorted([*__all__, "HybridParallelStrategy"])
