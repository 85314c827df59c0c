"""The strategy for ``lightning.pytorch``'s Trainer; importing it registers ``"hybrid_parallel"`` there."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from rlightning_groups.strategies.core import HybridParallelCore

__all__ = ["HybridParallelStrategy"]


class HybridParallelStrategy(HybridParallelCore, DDPStrategy):  # type: ignore[misc]  # typed against the other one
    """:class:`~rlightning_groups.strategies.core.HybridParallelCore` for this Trainer; see there."""

    _namespace = "lightning.pytorch"

    @classmethod
    def register_strategies(cls, strategy_registry: object) -> None:
        """Nothing: the base class's names are the base class's."""


if "hybrid_parallel" not in StrategyRegistry:
    StrategyRegistry.register(
        "hybrid_parallel",
        HybridParallelStrategy,
        description="Data, sequence and tensor parallelism; sizes by the strategy's arguments",
    )
