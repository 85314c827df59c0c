"""Models, data and Trainers that the strategy's tests run on real ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from rlightning_groups import ParallelContext, ParallelMode, get_local_rank, get_world_size
from rlightning_groups.checkpoint import full_state
from rlightning_groups.collectives import copy_to, reduce_from
from rlightning_groups.sequence import ulysses_attention
from rlightning_groups.sharding import mark_sharded, marked_state_dict

Run = Callable[..., list[Any]]
Weights = dict[str, Tensor]
NAMESPACES = ["pytorch_lightning", "lightning.pytorch"]
DATA, SEQUENCE, TENSOR, TRAIN, GLOBAL = (
    ParallelMode.DATA_PARALLEL,
    ParallelMode.SEQUENCE_PARALLEL,
    ParallelMode.TENSOR_PARALLEL,
    ParallelMode.TRAIN_DATA_PARALLEL,
    ParallelMode.GLOBAL,
)
UNAVOIDABLE = [
    ".*LeafSpec.*",  # Lightning uses a name that torch deprecated
    ".*does not have many workers.*",
    ".*Using `DistributedSampler` with the dataloaders.*",
    ".*You defined a `validation_step` but have no `val_dataloader`.*",  # a matter of these tests' models
]


def be_quiet() -> None:
    """Ignore what Lightning warns of whatever one does."""
    for message in UNAVOIDABLE:
        warnings.filterwarnings("ignore", message=message)


def strategy_of(namespace: str = "pytorch_lightning", **options: Any) -> Any:
    module = {"pytorch_lightning": "pytorch_lightning", "lightning.pytorch": "lightning"}[namespace]
    return import_module(f"rlightning_groups.{module}").HybridParallelStrategy(**options)


def new_trainer(strategy: Any, namespace: str = "pytorch_lightning", **options: Any) -> Any:
    """A Trainer over all ranks that writes and prints nothing unless asked to."""
    be_quiet()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {
        **dict.fromkeys(quiet, False),
        **{"accelerator": "cpu", "devices": int(os.environ.get("WORLD_SIZE", 1)), "log_every_n_steps": 1},
        **{"max_epochs": 1, "num_sanity_val_steps": 0},
        **options,
    }
    return import_module(namespace).Trainer(strategy=strategy, **options)


def started(**sizes: Any) -> Any:
    """A strategy whose world and groups are up, outside of any fit."""
    strategy = strategy_of(**sizes)
    new_trainer(strategy).strategy.setup_environment()
    return strategy


# ------------------------------------------------------------------------- a small model of either namespace


class Numbers(Dataset[Tensor]):
    """Sample ``i`` is the number ``i``, ready for a linear layer."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class _Line:
    """Fits a line, and keeps which samples it saw by stage and epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[str, list[list[float]]] = {}

    def see(self, stage: str, batch: Tensor) -> None:
        epochs = self.seen.setdefault(stage, [])
        while len(epochs) <= self.current_epoch:  # type: ignore[attr-defined]
            epochs.append([])
        epochs[-1] += batch.flatten().tolist()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.see("train", batch)
        loss = (self.layer(batch) - 1).square().mean() / 64
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)  # type: ignore[attr-defined]
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.see("val", batch)
        self.log("val", self.layer(batch).mean(), sync_dist=True)  # type: ignore[attr-defined]

    def test_step(self, batch: Tensor, index: int) -> None:
        self.see("test", batch)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        self.see("predict", batch)
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # type: ignore[attr-defined]


def line(namespace: str = "pytorch_lightning", mixin: type = object) -> Any:
    """A :class:`_Line` of a namespace, with a mixin's methods in front."""
    bases = (_Line, import_module(namespace).LightningModule)
    return type("Line", bases if mixin is object else (mixin, *bases), {})()


def loader(count: int, batch_size: int = 1, shuffle: bool = False) -> DataLoader[Tensor]:
    return DataLoader(Numbers(count), batch_size=batch_size, shuffle=shuffle)


# ------------------------------------------------------------------------------- a language model, float64

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 16, 16, 8, 16, 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """The model itself; it knows nothing of ranks but the share of the tokens it is told to take."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(1))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()

    def forward(self, window: Tensor, attend: Attend, rank: int = 0, size: int = 1) -> Tensor:
        """The mean loss over this share of the tokens."""
        places = torch.arange(LENGTH)
        tokens, labels, places = (
            part.chunk(size, -1)[rank] for part in (window[:, :-1], window[:, 1:], places)
        )
        x = self.embedding(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x, attend)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def new_transformer(seed: int = 7) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer()


class Windows(Dataset[Tensor]):
    """Random tokens, the same for an index on every rank."""

    def __init__(self, count: int) -> None:
        self.data = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


class Column(nn.Module):
    """A linear layer whose outputs are spread over tensor ranks, by hand."""

    dim = 0

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        part = linear.weight.detach().chunk(get_world_size(TENSOR), self.dim)[get_local_rank(TENSOR)]
        self.weight = nn.Parameter(part.clone())
        mark_sharded(self.weight, self.dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(copy_to(x, TENSOR), self.weight)


class Row(Column):
    """A linear layer whose inputs are spread over tensor ranks, by hand."""

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        return reduce_from(F.linear(x, self.weight), TENSOR)


COLUMNS, ROWS = ("query", "key", "value", "up"), ("out", "down")


class LM(LightningModule):
    """The transformer under the strategy.

    ``tensor`` says how tensor ranks share the weights: ``"dtensor"``, by ``"hand"``, or ``"none"``.
    """

    def __init__(self, tensor: str = "none", count: int = 5 * BATCH, micro_batches: int = 1) -> None:
        super().__init__()
        self.model = new_transformer()
        self.tensor, self.count, self.micro_batches = tensor, count, micro_batches
        self.parallelized = False
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.parallelized or self.tensor == "none":
            return
        self.parallelized = True
        for block in self.model.blocks:
            if self.tensor == "dtensor":
                plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
                plan |= {name: RowwiseParallel() for name in ROWS}
                parallelize_module(block, ParallelContext().device_mesh(TENSOR), plan)
            else:
                for name in COLUMNS + ROWS:
                    setattr(block, name, (Column if name in COLUMNS else Row)(getattr(block, name)))

    def loss(self, window: Tensor) -> Tensor:
        return self.model(
            window,
            lambda q, k, v: ulysses_attention(q, k, v, causal=True),
            get_local_rank(SEQUENCE),
            get_world_size(SEQUENCE),
        )

    def training_step(self, window: Tensor, index: int) -> Tensor:
        loss = self.loss(window)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, window: Tensor, index: int) -> None:
        self.log("val", self.loss(window), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return new_optimizer(self.model)

    def train_dataloader(self) -> DataLoader[Tensor]:
        share = BATCH // self.micro_batches // get_world_size(DATA)
        return DataLoader(Windows(self.count), batch_size=share, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Windows(BATCH), batch_size=BATCH // get_world_size(DATA))

    def full_weights(self) -> Weights:
        """The weights of one process's model; every rank calls it."""
        state = full_state(marked_state_dict(self.model))
        return {name: value.clone() for name, value in state.items()}


class AloneLM(LM):
    """The same on one device, without any of this package's groups."""

    def loss(self, window: Tensor) -> Tensor:
        return self.model(window, plain_attention)

    def train_dataloader(self) -> DataLoader[Tensor]:
        data = Windows(self.count)
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, num_replicas=1, rank=0))


class ManualLM(LM):
    """The same by manual optimization, with gradients accumulated by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, window: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(window)
        self.log("loss", loss, sync_dist=True)
        self.manual_backward(loss / self.micro_batches)
        if (index + 1) % self.micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()


def new_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def batches(count: int, size: int, epochs: int) -> Iterator[Tensor]:
    """The global batches that a DistributedSampler deals to any number of ranks, by set."""
    data = Windows(count).data
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        yield from data[order].split(size)


def one_process(
    epochs: int = 2, count: int = 5 * BATCH, micro_batches: int = 1
) -> tuple[list[float], Weights]:
    """Losses and final weights of a plain training loop, without Lightning and without ranks."""
    model = new_transformer()
    optimizer = new_optimizer(model)
    losses = []
    for index, batch in enumerate(batches(count, BATCH // micro_batches, epochs)):
        loss = model(batch, plain_attention)
        (loss / micro_batches).backward()
        losses.append(loss.item())
        if (index + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()
