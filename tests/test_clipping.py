"""The gradient norm of law 3: each element of the full model once, whatever it is spread over."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from strategy_models import TENSOR, Run
from test_gradients import counted
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlightning_groups import GradientError, LayoutError, ParallelContext, get_local_rank
from rlightning_groups.checkpoint import full_state
from rlightning_groups.clipping import clip_grad_norm_, clip_grad_value_, grad_norms, total_grad_norm
from rlightning_groups.collectives import chunk_sizes, split_to
from rlightning_groups.sharding import mark_sharded

NORMS = [1.0, 2.0, 3.0, math.inf]
LAYOUTS = [s for w in (4, 8) for s in itertools.product((1, 2, 4, 8), repeat=3) if math.prod(s) == w]


def start(sizes: tuple[int, ...]) -> None:
    data, sequence, tensor = sizes
    ParallelContext().initialize(
        tensor_parallel_size=tensor, sequence_parallel_size=sequence, data_parallel_size=data, backend="gloo"
    )


def with_gradient(gradient: Tensor, dim: int | None = None) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    if dim is not None:
        mark_sharded(parameter, dim)
    return parameter


def law_3() -> list[Any]:
    start((1, 1, 2))
    shard = torch.tensor([[3.0, 0.0], [0.0, 4.0]])[get_local_rank(TENSOR)]
    sharded, replicated = with_gradient(shard, 0), with_gradient(torch.tensor([12.0]))
    with counted() as calls:
        norm = clip_grad_norm_([sharded, replicated, replicated], 1.0)
    return [float(norm), replicated.grad.tolist(), sharded.grad.tolist(), len(calls)]  # type: ignore[union-attr]


def test_shards_and_a_copy_give_13(run_ranks: Run) -> None:
    """Law 3: shards [3,0] and [0,4] with a replicated 12 give 13, in one collective."""
    for rank, (norm, replicated, sharded, calls) in enumerate(run_ranks(law_3, 2)):
        assert norm == 13.0
        assert replicated == [pytest.approx(12 / 13, rel=1e-6)]
        assert sharded == [pytest.approx(part / 13, rel=1e-6) for part in ([3, 0], [0, 4])[rank]]
        assert calls == 1


FULL = {"up": (5, 3), "down": (3, 5), "norm": (4,), "plain up": (5, 3), "thin": (1, 2), "unused": (2,)}
CUT = {"up": 0, "down": 1, "plain up": 0, "thin": 0}


def gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in FULL.items()
    }


def net() -> nn.ParameterDict:
    """DTensors, marked plain tensors and copies in one module; ``up`` and ``norm`` are DTensors."""
    mesh, parameters = ParallelContext().device_mesh(TENSOR), nn.ParameterDict()
    for name, full in gradients().items():
        if name in ("up", "norm"):
            placements = [Shard(CUT[name]) if name in CUT else Replicate()]
            parameters[name] = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, placements))
            parameters[name].grad = distribute_tensor(full, mesh, placements)
        elif name in CUT:
            parameters[name] = with_gradient(split_to(full, CUT[name], TENSOR).clone())
            sizes = chunk_sizes(full.shape[CUT[name]], TENSOR)
            mark_sharded(parameters[name], CUT[name], sizes=sizes)
        else:
            parameters[name] = with_gradient(full.clone())
    parameters["unused"].grad = None
    return parameters


def norms(sizes: tuple[int, ...]) -> list[Any]:
    start(sizes)
    results: list[Any] = []
    for norm_type in NORMS:
        parameters = net()
        with counted() as calls:
            total = float(total_grad_norm(parameters.parameters(), norm_type))
        each = grad_norms(parameters, norm_type)
        clip_grad_norm_(parameters.parameters(), 0.5, norm_type)
        clipped = full_gradients(parameters)
        results.append((total, each, clipped, len(calls)))
    parameters = net()
    clip_grad_value_(parameters.parameters(), 0.3)
    return [*results, full_gradients(parameters)]


def full_gradients(parameters: nn.ParameterDict) -> dict[str, Tensor]:
    full = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            if name in CUT and not isinstance(parameter, DTensor):
                mark_sharded(parameter.grad, CUT[name], sizes=chunk_sizes(FULL[name][CUT[name]], TENSOR))
            full[name] = full_state(parameter.grad)
    return full


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_norms_are_those_of_one_process(run_ranks: Run, sizes: tuple[int, ...]) -> None:
    results = run_ranks(norms, math.prod(sizes), sizes)
    for norm_type, index in zip(NORMS, range(len(NORMS)), strict=True):
        alone = {name: with_gradient(full) for name, full in gradients().items() if name != "unused"}
        total = float(torch.nn.utils.clip_grad_norm_(alone.values(), 0.5, norm_type))
        for ours, each, clipped, calls in (result[index] for result in results):
            assert ours == pytest.approx(total, rel=1e-12)
            assert each[f"grad_{norm_type}_norm_total"] == pytest.approx(total, rel=1e-12)
            assert set(each) == {f"grad_{norm_type}_norm/{n}" for n in alone} | {
                f"grad_{norm_type}_norm_total"
            }
            assert calls == (sizes[2] > 1)
            for name, full in gradients().items():
                if name != "unused":
                    own = float(torch.linalg.vector_norm(full, norm_type))
                    assert each[f"grad_{norm_type}_norm/{name}"] == pytest.approx(own, rel=1e-12)
                    torch.testing.assert_close(clipped[name], alone[name].grad, rtol=1e-12, atol=0)
    for clamped in (result[-1] for result in results):
        for name, full in gradients().items():
            assert name == "unused" or torch.equal(clamped[name], full.clamp(-0.3, 0.3))


def edges() -> list[Any]:
    start((1, 1, 2))
    rank = get_local_rank(TENSOR)
    half = with_gradient(torch.full((4,), 300.0, dtype=torch.float16), 0)
    bad = with_gradient(torch.tensor([math.inf if rank else 1.0]), 0)
    with pytest.raises(GradientError, match="norm of inf"):
        clip_grad_norm_([bad], 1.0, error_if_nonfinite=True)
    with pytest.raises(LayoutError, match=r"norm_type=0.0 must be above 0"):
        total_grad_norm([half], 0)
    return [float(total_grad_norm([half])), float(total_grad_norm([])), float(total_grad_norm(bad))]


def test_half_precision_and_infinity(run_ranks: Run) -> None:
    """300 squared is no float16, and what is infinite on one rank is so on all."""
    assert run_ranks(edges, 2) == [[pytest.approx(300 * 8**0.5, rel=1e-6), 0.0, math.inf]] * 2
