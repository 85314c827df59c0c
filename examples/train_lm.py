"""Train a small byte-level transformer over data-, sequence- and tensor-parallel ranks.

The text is the source code of the running Python's standard library, so there is nothing to download::

    python examples/train_lm.py --devices 4 --tensor-parallel-size 2 --sequence-parallel-size 2

The losses do not depend on how the ranks are spread: try ``--tensor-parallel-size 4``, or one device.
"""

from __future__ import annotations

import argparse
import csv
import sysconfig
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from rlightning_groups import ParallelContext, ParallelMode, ShapeError, get_world_size
from rlightning_groups.pytorch_lightning import HybridParallelStrategy
from rlightning_groups.sequence import shard_sequence, ulysses_attention

DATA, SEQUENCE, TENSOR = (
    ParallelMode.DATA_PARALLEL,
    ParallelMode.SEQUENCE_PARALLEL,
    ParallelMode.TENSOR_PARALLEL,
)


class SourceText(Dataset[Tensor]):
    """Windows of consecutive bytes from the standard library; every 20th file is for validation."""

    def __init__(self, length: int, validation: bool, max_files: int = 400) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:max_files]
        chosen = [file for index, file in enumerate(files) if (index % 20 == 0) == validation]
        data = b"".join(file.read_bytes() for file in chosen)
        self.bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.bytes[start : start + self.length + 1].long()


class Attention(nn.Module):
    """Self-attention whose heads are spread over tensor ranks and whose tokens over sequence ranks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # On a tensor-parallel rank the projections give this rank's heads only.
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = ulysses_attention(q, k, v, causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# Which weights tensor ranks share: columns of what comes first, rows of what comes last.
BLOCK_PLAN = {
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class ByteLM(pl.LightningModule):
    """A transformer that predicts the next byte."""

    def __init__(
        self,
        length: int = 128,
        width: int = 128,
        depth: int = 3,
        heads: int = 8,
        batch_size: int = 16,
        lr: float = 3e-3,
        warmup_steps: int = 30,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.parallelized = False

    def configure_model(self) -> None:
        """Runs once the groups are there, and again for every fit, validate and test."""
        tensor, sequence = get_world_size(TENSOR), get_world_size(SEQUENCE)
        length, heads, batch = self.hparams.length, self.hparams.heads, self.hparams.batch_size
        if length % sequence or heads % (tensor * sequence) or batch % get_world_size(DATA):
            raise ShapeError(
                f"length {length} must divide by the sequence-parallel size {sequence}, {heads} heads by "
                f"tensor x sequence = {tensor * sequence}, batch size {batch} by the data-parallel size "
                f"{get_world_size(DATA)}"
            )
        if tensor > 1 and not self.parallelized:
            mesh = ParallelContext().device_mesh(TENSOR)
            for block in self.blocks:
                parallelize_module(block, mesh, BLOCK_PLAN)
            self.parallelized = True

    def on_fit_start(self) -> None:
        self.print(ParallelContext().layout.describe())

    def loss(self, window: Tensor) -> Tensor:
        # Shifted first, then cut: a byte's successor may be on another rank.
        shard = shard_sequence({"tokens": window[:, :-1], "labels": window[:, 1:]}, pad=False)
        x = self.embedding(shard.batch["tokens"]) + self.position(shard.positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), shard.batch["labels"].flatten())

    def training_step(self, window: Tensor, index: int) -> Tensor:
        loss = self.loss(window)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, window: Tensor, index: int) -> None:
        self.log("val_loss", self.loss(window), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95))
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        warmup = min(self.hparams.warmup_steps, steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min((step + 1) / warmup, max(0.1, 1 - step / steps)),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loader(self, validation: bool) -> DataLoader[Tensor]:
        # The batch size asked for is the job's; each data-parallel rank takes its share.
        share = self.hparams.batch_size // get_world_size(DATA)
        data = SourceText(self.hparams.length, validation)
        return DataLoader(data, batch_size=share, shuffle=not validation, drop_last=True)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(validation=False)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(validation=True)


def draw_losses(log: Path, picture: Path) -> None:
    """Draw the losses of a CSV log as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with log.open() as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in ("train_loss", "val_loss"):
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        axes.plot(*zip(*points, strict=True), label=name, marker="o" if name == "val_loss" else None)
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    figure.savefig(picture, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=4, help="processes on this machine")
    parser.add_argument("--num-nodes", type=int, default=1, help="machines")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu, gpu, ...")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--sequence-parallel-size", type=int, default=1)
    parser.add_argument(
        "--data-parallel", choices=["replicate", "shard"], default="replicate", help="copy or cut weights"
    )
    parser.add_argument("--order", default="tp-sp-dp", help="axes, fastest first")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per step, over all ranks")
    parser.add_argument("--length", type=int, default=128, help="bytes per window")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", default="runs/train_lm", help="folder for logs and checkpoints")
    parser.add_argument("--resume", help="checkpoint to go on from, written under any layout")
    parser.add_argument(
        "--save-distributed-checkpoint", action="store_true", help="checkpoints in parts instead of one file"
    )
    arguments = parser.parse_args()

    # Lightning's own use of a deprecated name in torch; nothing a reader of this example can act on.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    pl.seed_everything(arguments.seed, workers=True)
    logger = CSVLogger(arguments.output, name="")
    trainer = pl.Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        strategy=HybridParallelStrategy(
            tensor_parallel_size=arguments.tensor_parallel_size,
            sequence_parallel_size=arguments.sequence_parallel_size,
            data_parallel=arguments.data_parallel,
            save_distributed_checkpoint=arguments.save_distributed_checkpoint,
            order=arguments.order,
        ),
        max_steps=arguments.max_steps,
        gradient_clip_val=1.0,
        val_check_interval=min(100, arguments.max_steps),
        check_val_every_n_epoch=None,
        limit_val_batches=20,
        log_every_n_steps=10,
        logger=logger,
        callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True)],
    )
    model = ByteLM(length=arguments.length, batch_size=arguments.batch_size)
    trainer.fit(model, ckpt_path=arguments.resume)

    if trainer.is_global_zero:
        logger.save()
        picture = Path(logger.log_dir) / "losses.png"
        draw_losses(Path(logger.log_dir) / "metrics.csv", picture)
        print(f"validation loss: {trainer.callback_metrics['val_loss']:.3f} nats per byte")
        print(f"log, picture and checkpoints: {logger.log_dir}")


if __name__ == "__main__":
    main()
