"""The same model, data and global batch give the same losses and weights under every layout."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from strategy_models import LM, ManualLM, Run, Weights, new_trainer, one_process, strategy_of

EPOCHS = 2  # of five steps each; the second one is shuffled anew
LAYOUTS = [
    sizes
    for world in (4, 8)
    for sizes in itertools.product((1, 2, 4, 8), repeat=3)
    if math.prod(sizes) == world
]
Result = tuple[list[float], Weights | None, str]


def train(
    kind: type[LM], tensor: str, sizes: tuple[int, ...], micro_batches: int = 1, **strategy: Any
) -> Result:
    """Losses, full weights on rank 0, and what averaged the gradients."""
    data, sequence, tensor_size = sizes
    strategy |= {"data_parallel_size": data, "sequence_parallel_size": sequence}
    lm = kind(tensor=tensor, micro_batches=micro_batches)
    trainer = new_trainer(
        strategy_of(**strategy, tensor_parallel_size=tensor_size),
        max_epochs=EPOCHS,
        limit_val_batches=0,
        accumulate_grad_batches=micro_batches if lm.automatic_optimization else 1,
    )
    averaging: list[str] = []
    lm.on_train_start = lambda: averaging.append(type(trainer.strategy.model).__name__)  # type: ignore[method-assign]
    trainer.fit(lm)
    weights = lm.full_weights()
    return lm.losses, weights if trainer.is_global_zero else None, averaging[0]


@functools.cache
def reference(micro_batches: int = 1) -> tuple[list[float], Weights]:
    return one_process(EPOCHS, micro_batches=micro_batches)


def check(results: list[Result], micro_batches: int = 1) -> None:
    losses, weights = reference(micro_batches)
    assert len(losses) == 10 * micro_batches
    for rank, (ours, _, _) in enumerate(results):
        assert ours == pytest.approx(losses, abs=1e-9, rel=0), f"rank {rank}"
    ours_in_full = results[0][1]
    assert ours_in_full is not None
    assert ours_in_full.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(
            ours_in_full[name], value, rtol=0, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_reference_learns() -> None:
    """Otherwise equal losses would say little."""
    losses, _ = reference()
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda s: "dp{}-sp{}-tp{}".format(*s))
def test_dtensor(run_ranks: Run, sizes: tuple[int, ...]) -> None:
    results = run_ranks(train, math.prod(sizes), LM, "dtensor", sizes)
    check(results)
    assert results[0][2] == "LM"  # no DistributedDataParallel: it refuses DTensors


@pytest.mark.parametrize("order", ["dp-tp-sp", "sp-dp-tp"])
def test_orders(run_ranks: Run, order: str) -> None:
    check(run_ranks(train, 8, LM, "dtensor", (2, 2, 2), order=order))


@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2)])
def test_tensor_parallelism_by_hand(run_ranks: Run, sizes: tuple[int, ...]) -> None:
    results = run_ranks(train, math.prod(sizes), LM, "hand", sizes)
    check(results)
    wrapped = sizes[0] * sizes[1] > 1
    assert results[0][2] == ("DistributedDataParallel" if wrapped else "LM")


@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 4, 1)])
def test_without_tensor_parallelism(run_ranks: Run, sizes: tuple[int, ...]) -> None:
    results = run_ranks(train, math.prod(sizes), LM, "none", sizes)
    check(results)
    assert results[0][2] == ("DistributedDataParallel" if math.prod(sizes) > 1 else "LM")


@pytest.mark.parametrize("kind", [LM, ManualLM])
@pytest.mark.parametrize(
    ("tensor", "sizes"),
    [("dtensor", (2, 1, 2)), ("dtensor", (1, 2, 2)), ("hand", (2, 1, 2)), ("none", (2, 2, 1))],
)
def test_accumulated_gradients(run_ranks: Run, kind: type[LM], tensor: str, sizes: tuple[int, ...]) -> None:
    check(run_ranks(train, 4, kind, tensor, sizes, micro_batches=2), micro_batches=2)


@pytest.mark.parametrize(("tensor", "sizes"), [("dtensor", (2, 1, 2)), ("hand", (1, 2, 2))])
def test_manual_optimization(run_ranks: Run, tensor: str, sizes: tuple[int, ...]) -> None:
    check(run_ranks(train, 4, ManualLM, tensor, sizes))
