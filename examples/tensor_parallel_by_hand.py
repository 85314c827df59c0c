"""Tensor parallelism by hand: a column- and a row-parallel layer from collectives by mode, nothing else.

Each rank holds a slice of both weights. The loss is the same for any number of ranks::

    torchrun --nproc-per-node 4 examples/tensor_parallel_by_hand.py
    python examples/tensor_parallel_by_hand.py
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlightning_groups import ParallelContext, ParallelMode, get_global_rank, get_group
from rlightning_groups.collectives import copy_to, reduce_from
from rlightning_groups.random import init_full_then_shard, seed_everything_by_layout
from rlightning_groups.sharding import mark_sharded

TENSOR = ParallelMode.TENSOR_PARALLEL


def scaled(weight: Tensor) -> Tensor:
    """Fill a (out, in) weight so that activations keep their size."""
    return nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))


class ColumnParallel(nn.Module):
    """A linear layer whose outputs are spread over the ranks: each holds some rows of its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(init_full_then_shard(scaled, (outputs, inputs), dim=0))
        mark_sharded(self.weight, dim=0)  # for gradient norms and checkpoints

    def forward(self, x: Tensor) -> Tensor:
        # Every rank uses x for other outputs, so x's gradients are summands.
        return F.linear(copy_to(x, TENSOR), self.weight)


class RowParallel(nn.Module):
    """A linear layer whose inputs are spread over the ranks: each holds some columns of the weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(init_full_then_shard(scaled, (outputs, inputs), dim=1))
        mark_sharded(self.weight, dim=1)  # for gradient norms and checkpoints

    def forward(self, x: Tensor) -> Tensor:
        # Every rank has a summand of the output.
        return reduce_from(F.linear(x, self.weight), TENSOR)


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    context = ParallelContext().initialize(tensor_parallel_size=ranks, backend="gloo")
    seed_everything_by_layout(0)
    model = nn.Sequential(ColumnParallel(2, 64), nn.GELU(), RowParallel(64, 1)).double()
    x = torch.rand(256, 2, dtype=torch.float64) * 2 - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(201):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and get_global_rank() == 0:
            shard, size = list(model[0].weight.shape), get_group(TENSOR).size()
            print(f"step {step:3}: loss {loss:.8f}, {shard} of the first weight on each of {size} rank(s)")
    context.destroy()


if __name__ == "__main__":
    main()
