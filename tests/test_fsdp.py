"""Fully sharded data parallelism: the losses, weights and initial values of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule
from strategy_models import DATA, LM, TENSOR, ManualLM, Run, new_trainer, strategy_of
from test_parity import check, train
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader

from rlightning_groups import LayoutError, ParallelContext, get_world_size
from rlightning_groups.checkpoint import full_state
from rlightning_groups.fsdp import shard_fully
from rlightning_groups.materialize import materialize
from rlightning_groups.random import seed_everything_by_layout
from rlightning_groups.sharding import local_tensor, mark_sharded, marked_state_dict


@pytest.mark.parametrize(
    ("kind", "tensor", "sizes", "options"),
    [
        (LM, "none", (4, 1, 1), {}),
        (LM, "none", (1, 4, 1), {"reshard_after_forward": False}),
        (LM, "dtensor", (2, 1, 2), {}),
        (LM, "dtensor", (1, 2, 2), {"shard_units": ["Block", "Embedding"]}),
        (LM, "dtensor", (1, 1, 4), {}),
        (LM, "dtensor", (2, 2, 2), {"micro_batches": 2}),
        (LM, "hand", (2, 2, 2), {}),
        (ManualLM, "dtensor", (2, 1, 2), {"micro_batches": 2}),
        (ManualLM, "hand", (1, 2, 2), {}),
    ],
    ids=str,
)
def test_parity(
    run_ranks: Run, kind: type[LM], tensor: str, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    results = run_ranks(train, math.prod(sizes), kind, tensor, sizes, data_parallel="shard", **options)
    check(results, options.get("micro_batches", 1))
    assert results[0][2].startswith("FSDP")


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + 0.1


class Net(nn.Module):
    """Draws in the order of its modules; two of its weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.blocks = nn.ModuleList(Tanh() for _ in range(2))
        self.last = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.first.weight)


def net_on_meta(kind: str) -> Net:
    with torch.device("meta"):
        net = Net()
    if kind == "dtensor":
        mesh = ParallelContext().device_mesh(TENSOR)
        parallelize_module(
            net, mesh, {"blocks.0.layer": ColwiseParallel(), "blocks.1.layer": RowwiseParallel()}
        )
    elif kind == "hand":
        for block in net.blocks:
            block.layer.weight = nn.Parameter(block.layer.weight.detach().chunk(get_world_size(TENSOR))[0])
            mark_sharded(block.layer.weight, 0)
    return net


def initial(kind: str) -> dict[str, Any]:
    """Initial weights in full and the number of elements held, made real as they are and under FSDP."""
    ParallelContext().initialize(tensor_parallel_size=2, backend="gloo")
    results: dict[str, Any] = {}
    for way in (materialize, shard_fully):
        net = net_on_meta(kind)
        parameter = net.blocks[0].layer.weight
        seed_everything_by_layout(5)
        if dist.get_rank() == 1:
            torch.rand(3)  # ranks that have drawn otherwise get rank 0's stream
        way(net)
        assert net.last.weight is net.first.weight
        assert net.blocks[0].layer.weight is not parameter
        held = sum(local_tensor(p).numel() for p in net.parameters())
        state = marked_state_dict(net)
        results[way.__name__] = ({k: v.clone() for k, v in full_state(state).items()}, held)
    return results


@pytest.mark.parametrize("kind", ["none", "dtensor", "hand"])
def test_a_module_on_the_meta_device_starts_as_one_process_does(run_ranks: Run, kind: str) -> None:
    """Law 7: a sharded weight is a slice of the full initial weight."""
    torch.manual_seed(5)
    wanted = Net().state_dict()
    cut = {"none": 0, "dtensor": 8 + 2 + 8, "hand": 8 + 8}[kind]  # half of two weights and of a bias
    whole = sum(p.numel() for p in Net().parameters())
    for result in run_ranks(initial, 4, kind):
        for weights, _ in result.values():
            assert weights.keys() == wanted.keys()
            assert all(torch.equal(weights[name], value) for name, value in wanted.items())
        assert result["materialize"][1] == whole - cut
        assert result["shard_fully"][1] == (whole - cut) // 2


def refused() -> list[str]:
    ParallelContext().initialize(backend="gloo")
    with torch.device("meta"):
        mute = nn.Sequential(nn.Linear(2, 2), nn.Module())
        mute[1].weight = nn.Parameter(torch.zeros(2))
    messages = []
    for call in (lambda: materialize(mute), lambda: shard_fully(Net(), units=["Linear", "Block"])):
        with pytest.raises(LayoutError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_made_real_or_cut(run_ranks: Run) -> None:
    for first, second in run_ranks(refused, 2):
        assert first.startswith("1 (Module): built on the meta device, without a reset_parameters()")
        assert second == "no module is of class 'Block'; there are Linear, ModuleList, Net, Tanh"


class Trained(LightningModule):
    """Built in configure_model on the meta device; the same whatever the layout."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = net_on_meta("dtensor" if get_world_size(TENSOR) > 1 else "none")

    def loss(self, batch: Tensor) -> Tensor:
        x = (
            torch.stack([batch.double(), batch.double() ** 2, torch.ones_like(batch), -batch], -1).double()
            / 8
        )
        return self.net(x).square().sum(-1).mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(list(range(8)), batch_size=4 // get_world_size(DATA))  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def train_from_meta(sizes: dict[str, Any]) -> tuple[list[float], float]:
    torch.manual_seed(11)
    model = Trained()
    trainer = new_trainer(strategy_of(**sizes), max_epochs=2, gradient_clip_val=0.1)
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    return model.losses, float(trainer.callback_metrics["val"])


def test_training_from_the_meta_device_under_any_layout(run_ranks: Run) -> None:
    (alone,) = run_ranks(train_from_meta, 1, {})
    assert len(alone[0]) == 4
    assert alone[0][-1] != pytest.approx(alone[0][0], rel=1e-3)
    for sizes in [
        {"data_parallel": "shard"},
        {"data_parallel": "shard", "tensor_parallel_size": 2},
        {"tensor_parallel_size": 2},
    ]:
        for losses, val in run_ranks(train_from_meta, 4, sizes):
            assert losses == pytest.approx(alone[0], abs=1e-12, rel=0), sizes
            assert val == pytest.approx(alone[1], abs=1e-12, rel=0), sizes


def in_bfloat16() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    seen: list[torch.dtype] = []

    class Looks(Trained):
        def loss(self, batch: Tensor) -> Tensor:
            self.net.blocks[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
            seen.append(batch.dtype)
            return self.net(torch.ones(1, 4, dtype=torch.bfloat16)).sum()

    model = Looks()
    options: dict[str, Any] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    trainer = new_trainer(strategy_of(data_parallel="shard", **options), limit_val_batches=0)
    trainer.fit(model)
    return seen[0], seen[1], model.net.blocks[0].layer.weight.dtype


def test_mixed_precision(run_ranks: Run) -> None:
    """Blocks compute in bfloat16; batches and the weights that are stepped keep their dtype."""
    for types in run_ranks(in_bfloat16, 2):
        assert types == (torch.int64, torch.bfloat16, torch.float64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel": "split"}, "data_parallel='split' must be 'replicate' or 'shard'"),
        ({"shard_units": ["Block"]}, "shard_units: for data_parallel='shard' only"),
        (
            {"data_parallel": "shard", "param_dtype": "int8"},
            "'int8' is no dtype to shard with; use 'bfloat16', ",
        ),
        ({"async_checkpoint": True}, "async_checkpoint=True needs save_distributed_checkpoint=True"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        strategy_of(**options)
