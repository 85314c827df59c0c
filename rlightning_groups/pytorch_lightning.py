"""The strategy for ``pytorch_lightning``'s Trainer; importing it registers ``"hybrid_parallel"`` there."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from rlightning_groups.strategies.core import HybridParallelCore

__all__ = ["HybridParallelStrategy"]


class HybridParallelStrategy(HybridParallelCore, DDPStrategy):
    """:class:`~rlightning_groups.strategies.core.HybridParallelCore` for this Trainer; see there."""

    _namespace = "pytorch_lightning"

    @classmethod
    def register_strategies(cls, strategy_registry: object) -> None:
        """Nothing: the base class's names are the base class's."""


if "hybrid_parallel" not in StrategyRegistry:
    StrategyRegistry.register(
        "hybrid_parallel",
        HybridParallelStrategy,
        description="Data, sequence and tensor parallelism; sizes by the strategy's arguments",
    )
