"""Layers built from collectives by mode, against dense ones in a single process: float64, within 1e-10."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rlightning_groups import ParallelContext, ParallelMode, get_local_rank, get_world_size
from rlightning_groups.collectives import (
    all_reduce,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    split_to,
)

Run = Callable[..., list[Any]]
TENSOR = ParallelMode.TENSOR_PARALLEL
VOCABULARY, WIDTH, TOKENS = 12, 8, 16
Tensors = dict[str, Tensor]


def new_weights() -> Tensors:
    torch.manual_seed(3)
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "norm": (WIDTH,),
        "up": (4 * WIDTH, WIDTH),
        "down": (WIDTH, 4 * WIDTH),
        "head": (VOCABULARY, WIDTH),
    }
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def new_tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCABULARY, (TOKENS + 1,), generator=generator)
    return tokens[:-1], tokens[1:]


def dense(weights: Tensors) -> tuple[Tensor, Tensor]:
    """Output and loss of embedding, norm, MLP, residual, head, cross-entropy."""
    tokens, labels = new_tokens()
    x = F.embedding(tokens, weights["embedding"])
    normed = F.layer_norm(x, (WIDTH,), weights["norm"])
    x = x + F.linear(F.gelu(F.linear(normed, weights["up"])), weights["down"])
    return x, F.cross_entropy(F.linear(x, weights["head"]), labels)


CUT = {"embedding": 0, "up": 0, "down": 1, "head": 0}  # the dim that tensor ranks share


def own(weights: Tensors) -> Tensors:
    size, rank = get_world_size(TENSOR), get_local_rank(TENSOR)
    return {
        name: (value.chunk(size, CUT[name])[rank] if name in CUT else value).clone().requires_grad_()
        for name, value in weights.items()
    }


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """Vocabulary-parallel: each rank looks up the tokens whose rows it holds."""
    local = tokens - get_local_rank(TENSOR) * weight.shape[0]
    here = (local >= 0) & (local < weight.shape[0])
    found = F.embedding(local.where(here, 0), weight) * here[:, None]
    return reduce_from(found, TENSOR)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Vocabulary-parallel: each rank holds the logits of some of the vocabulary, for all tokens."""
    highest = all_reduce(logits.detach().amax(-1), TENSOR, op="max")
    shifted = logits - highest[:, None]
    total = reduce_from(shifted.exp().sum(-1), TENSOR)
    local = labels - get_local_rank(TENSOR) * logits.shape[-1]
    here = (local >= 0) & (local < logits.shape[-1])
    chosen = shifted.gather(-1, local.where(here, 0)[:, None])[:, 0] * here
    return (total.log() - reduce_from(chosen, TENSOR)).mean()


def parallel(weights: Tensors, sequence_sharded: bool) -> tuple[Tensor, Tensor]:
    tokens, labels = new_tokens()
    x = embed(tokens, weights["embedding"])
    if sequence_sharded:  # Megatron-style: between the layers each tensor rank holds a part of the tokens
        x = split_to(x, 0, TENSOR)
        normed = F.layer_norm(x, (WIDTH,), copy_to(weights["norm"], TENSOR))
        whole = gather_from(normed, 0, TENSOR, grad="partial")
        part = F.linear(F.gelu(F.linear(whole, weights["up"])), weights["down"])
        x = gather_from(x + reduce_scatter_to(part, 0, TENSOR), 0, TENSOR, grad="replicated")
    else:
        normed = copy_to(F.layer_norm(x, (WIDTH,), weights["norm"]), TENSOR)
        x = x + reduce_from(F.linear(F.gelu(F.linear(normed, weights["up"])), weights["down"]), TENSOR)
    return x, cross_entropy(F.linear(copy_to(x, TENSOR), weights["head"]), labels)


def compare(size: int, sequence_sharded: bool) -> dict[str, float]:
    """The largest difference from the dense model, of what every rank holds."""
    ParallelContext().initialize(tensor_parallel_size=size, backend="gloo")
    reference = {name: value.requires_grad_() for name, value in new_weights().items()}
    weights = own(new_weights())
    wanted_x, wanted = dense(reference)
    wanted.backward()
    x, loss = parallel(weights, sequence_sharded)
    loss.backward()
    rank = get_local_rank(TENSOR)
    differences = {"output": (x - wanted_x).abs().max(), "loss": (loss - wanted).abs()}
    for name, value in weights.items():
        gradient = reference[name].grad
        assert gradient is not None
        assert value.grad is not None
        assert gradient.abs().max() > 1e-3
        mine = gradient.chunk(size, CUT[name])[rank] if name in CUT else gradient
        differences[name] = (value.grad - mine).abs().max()
    return {name: float(value.detach()) for name, value in differences.items()}


@pytest.mark.parametrize("sequence_sharded", [False, True], ids=["plain", "sequence-sharded"])
@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2), (4, 4)])
def test_layers_equal_dense_ones(run_ranks: Run, world: int, size: int, sequence_sharded: bool) -> None:
    """Law 9: no hidden factor. World 4 with size 2 has a group without rank 0."""
    for differences in run_ranks(compare, world, size, sequence_sharded):
        assert set(differences) == {"output", "loss", *new_weights()}
        assert max(differences.values()) < 1e-10, differences


EXAMPLE = Path(__file__).parents[1] / "examples" / "tensor_parallel_by_hand.py"


def losses(command: list[str]) -> list[str]:
    done = subprocess.run([*command, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split(",")[0] for line in done.stdout.splitlines() if line.startswith("step")]


def test_the_example_by_hand_does_not_depend_on_the_ranks() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    alone, together = losses([sys.executable]), losses(torchrun)
    assert together == alone
    first, last = (float(line.split()[-1]) for line in (alone[0], alone[-1]))
    assert last < 0.1 * first
