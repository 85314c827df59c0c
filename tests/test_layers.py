"""Layers built from collectives by mode, against dense ones in a single process: float64, within 1e-10."""

from __future__ import annotations

import contextlib
import io
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pytorch_lightning import LightningModule
from strategy_models import new_trainer, strategy_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from rlightning_groups import (
    LayoutError,
    ParallelContext,
    ParallelMode,
    get_group,
    get_local_rank,
    get_world_size,
)
from rlightning_groups.collectives import (
    all_reduce,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    split_to,
)
from rlightning_groups.gradients import sum_partial_gradients
from rlightning_groups.sharding import mark_partial_gradient, mark_sharded

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


def new_tokens(sample: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sample)
    tokens = torch.randint(VOCABULARY, (TOKENS + 1,), generator=generator)
    return tokens[:-1], tokens[1:]


def dense(weights: Tensors, sample: int = 4) -> tuple[Tensor, Tensor]:
    """Output and loss of embedding, norm, MLP, residual, head, cross-entropy."""
    tokens, labels = new_tokens(sample)
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


def parallel(
    weights: Any, sequence_sharded: bool, sample: int = 4, marked: bool = False
) -> tuple[Tensor, Tensor]:
    tokens, labels = new_tokens(sample)
    x = embed(tokens, weights["embedding"])
    if sequence_sharded:  # Megatron-style: between the layers each tensor rank holds a part of the tokens
        x = split_to(x, 0, TENSOR)
        # A marked weight's gradient is summed by the strategy, once per step; else by copy_to, in every pass.
        norm = weights["norm"] if marked else copy_to(weights["norm"], TENSOR)
        normed = F.layer_norm(x, (WIDTH,), norm)
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


class Samples(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Marked(LightningModule):
    """The sequence-sharded block, whose norm is marked instead of copied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.sums: list[int] = []

    def configure_model(self) -> None:
        self.weights = nn.ParameterDict({name: nn.Parameter(w) for name, w in own(new_weights()).items()})
        mark_partial_gradient(self.weights["norm"])
        for name, dim in CUT.items():
            mark_sharded(self.weights[name], dim)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(int(batch))
        return parallel(self.weights, True, int(batch), marked=True)[1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(Samples(), batch_size=1)


def train_marked() -> tuple[list[int], Tensors, int, list[int]]:
    """The samples in their order, this rank's weights, its tensor rank, and the sizes of sums over TENSOR."""
    model, sums = Marked(), []
    all_reduce_of_torch = torch.distributed.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is get_group(TENSOR):
            sums.append(tensor.numel())
        return all_reduce_of_torch(tensor, *args, **kwargs)

    trainer = new_trainer(strategy_of(tensor_parallel_size=2), max_epochs=2, accumulate_grad_batches=2)
    with mock.patch("torch.distributed.all_reduce", counted):
        trainer.fit(model)
    weights = {name: value.detach().clone() for name, value in model.weights.items()}
    return model.seen, weights, get_local_rank(TENSOR), sums


def test_a_marked_gradient_is_summed_once_per_step(run_ranks: Run) -> None:
    """Law 2: partial gradients are summed over TENSOR_PARALLEL, never per micro-batch."""
    results = run_ranks(train_marked, 4)
    seen = [results[0][0], results[2][0]]  # of the two data ranks
    assert [results[1][0], results[3][0]] == seen
    reference = {name: value.requires_grad_() for name, value in new_weights().items()}
    optimizer = torch.optim.AdamW(reference.values(), lr=1e-2)
    for step in range(4):
        samples = [sample for rank in seen for sample in rank[2 * step : 2 * step + 2]]
        assert len(samples) == 4
        optimizer.zero_grad()
        torch.stack([dense(reference, sample)[1] for sample in samples]).mean().backward()
        optimizer.step()
    for _, weights, rank, sums in results:
        assert sums == [WIDTH + 1] * 4  # the gradient and the flag that it is there, once in each of 4 steps
        for name, value in weights.items():
            wanted = reference[name].detach()
            mine = wanted.chunk(2, CUT[name])[rank] if name in CUT else wanted
            torch.testing.assert_close(value, mine, rtol=0, atol=1e-10)


def sum_by_hand() -> list[Any]:
    """Gradients that some, all and no ranks have, and an unmarked one."""
    ParallelContext().initialize(tensor_parallel_size=2, backend="gloo")
    rank = get_local_rank(TENSOR)
    some, both, none, unmarked = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    for parameter in (some, both, none):
        mark_partial_gradient(parameter)
        mark_partial_gradient(parameter)
    both.grad, unmarked.grad = torch.full((2,), 1.0 + rank), torch.full((2,), 1.0 + rank)
    if rank == 0:
        some.grad = torch.full((2,), 5.0)
    sum_partial_gradients([some, both, none, unmarked])
    return [None if p.grad is None else p.grad.tolist() for p in (some, both, none, unmarked)]


def test_partial_gradients_by_hand(run_ranks: Run) -> None:
    first, second, third, fourth = run_ranks(sum_by_hand, 4)
    assert first == third == [[5.0, 5.0], [3.0, 3.0], None, [1.0, 1.0]]
    assert second == fourth == [[5.0, 5.0], [3.0, 3.0], None, [2.0, 2.0]]


@pytest.mark.parametrize("wrong", [3, torch.zeros(2), torch.zeros(2, requires_grad=True) * 2], ids=str)
def test_what_cannot_be_marked(wrong: Any) -> None:
    with pytest.raises(LayoutError, match="only a parameter that needs a gradient can be marked"):
        mark_partial_gradient(wrong)
    with pytest.raises(LayoutError, match="must be the name of a mode"):
        mark_partial_gradient(nn.Parameter(torch.zeros(2)), 5)  # type: ignore[arg-type]


EXAMPLE = Path(__file__).parents[1] / "examples" / "tensor_parallel_by_hand.py"


def losses_of_the_example() -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return [line.split(",")[0] for line in printed.getvalue().splitlines() if line.startswith("step")]


def test_the_example_by_hand_does_not_depend_on_the_ranks(run_ranks: Run) -> None:
    no_launcher = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    (alone,) = run_ranks(losses_of_the_example, 1, env=no_launcher)
    assert run_ranks(losses_of_the_example, 2) == [alone, []]  # the first rank prints
    first, last = (float(line.split()[-1]) for line in (alone[0], alone[-1]))
    assert last < 0.1 * first
