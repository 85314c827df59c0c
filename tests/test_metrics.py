"""Metrics over samples and tokens, against one process that sees all of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from strategy_models import (
    DATA,
    GLOBAL,
    NAMESPACES,
    TENSOR,
    TRAIN,
    Run,
    line,
    loader,
    new_trainer,
    started,
    strategy_of,
)
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, MinMaxMetric

from rlightning_groups import (
    ContextError,
    LayoutError,
    ModeError,
    ParallelContext,
    get_group,
    get_local_rank,
    get_ranks_in_group,
    get_world_size,
)
from rlightning_groups.collectives import all_reduce
from rlightning_groups.metrics import GatherOver, sync_metrics_over, sync_unconfigured_metrics
from rlightning_groups.sequence import shard_sequence, token_mean

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
both = pytest.mark.parametrize("namespace", NAMESPACES)
LAYOUTS = [{"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}]
layouts = pytest.mark.parametrize("sizes", LAYOUTS, ids=str)

CLASSES, PLACES, BATCH = 3, 8, 4
TOKENS = [5, 8, 3, 7, 8, 2, 1, 6]  # of each sample; the rest of its eight places is padding


class Sentences(Dataset[dict[str, Tensor]]):
    """Unequally long samples; sample ``i`` predicts some of its labels wrongly and has its own losses."""

    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = torch.arange(PLACES)
        labels = torch.where(place < TOKENS[index], (index + place) % CLASSES, -100)
        return {
            "labels": labels,
            "predictions": (index * place + index) % CLASSES,
            "losses": (index + 1) / (place + 1.0),
            "number": torch.tensor(float(index)),
        }


def batches(size: int, rank: int = 0, ranks: int = 1) -> Iterator[dict[str, Tensor]]:
    """The samples of one of several data-parallel ranks; by itself, everything."""
    sentences = [Sentences()[index] for index in range(rank, len(TOKENS), ranks)]
    for start in range(0, len(sentences), size):
        part = sentences[start : start + size]
        yield {name: torch.stack([one[name] for one in part]) for name in part[0]}


def own_tokens(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This sequence rank's share."""
    tokens = {name: value for name, value in batch.items() if name != "number"}
    return {**shard_sequence(tokens).batch, "number": batch["number"]}


class Counts(nn.Module):
    """One metric of each kind; what a rank hands them is its own samples and its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.tokens, self.largest = MeanMetric(), SumMetric(), MaxMetric()
        self.samples, self.numbers = SumMetric(), CatMetric()
        self.scores = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(CLASSES, average="micro", ignore_index=-100),
                "f1": MulticlassF1Score(CLASSES, ignore_index=-100),
                "recall": ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None, ignore_index=-100)),
            }
        )
        self.range = MinMaxMetric(SumMetric())
        self.added = self.tokens + self.largest  # no metric of its own, but two others'

    def update(self, batch: dict[str, Tensor]) -> None:
        valid = batch["labels"] != -100
        losses = batch["losses"][valid]
        if valid.any():
            self.loss.update(losses.mean(), weight=valid.sum())
            self.largest.update(losses.max())
        self.tokens.update(valid.sum())
        self.range.update(valid.sum())
        self.samples.update(float(len(batch["number"])))
        self.numbers.update(batch["number"])
        self.scores.update(batch["predictions"], batch["labels"])

    def values(self) -> dict[str, Any]:
        named = {"loss": self.loss, "tokens": self.tokens, "largest": self.largest, "samples": self.samples}
        values = {name: metric.compute().item() for name, metric in named.items()}
        values |= {name: value.item() for name, value in self.scores.compute().items()}
        values |= {name: value.item() for name, value in self.range.compute().items()}
        return {
            **values,
            "added": self.added.compute().item(),
            "numbers": sorted(self.numbers.compute().tolist()),
        }


def alone() -> dict[str, Any]:
    counts = Counts()
    for batch in batches(2):
        counts.update(batch)
    return counts.values()


def test_what_one_process_counts() -> None:
    """The numbers that all tests below compare with, by hand."""
    values, samples = alone(), list(Sentences())
    valid = [one["labels"] != -100 for one in samples]
    losses = torch.cat([one["losses"][v] for one, v in zip(samples, valid, strict=True)])
    right = sum((one["labels"] == one["predictions"]).sum().item() for one in samples)  # -100 is never right
    assert values["tokens"] == sum(TOKENS) == 40
    assert values["samples"] == len(TOKENS)
    assert values["loss"] == pytest.approx(losses.mean().item())
    assert values["accuracy"] == pytest.approx(right / 40)
    assert values["largest"] == 8


# ----------------------------------------------------------------------------------------- by hand, on groups


def count_over_ranks(sizes: dict[str, int]) -> dict[str, Any]:
    """What all kinds of metrics give by each way of setting them up."""
    context = ParallelContext().initialize(**sizes)
    built = Counts()
    assert sync_metrics_over(built) is built
    sync_metrics_over(built.samples, DATA)
    sync_metrics_over(built.numbers, mode=DATA)
    collection = sync_metrics_over(MetricCollection([SumMetric()]))
    copies = {
        "built": built,
        "deep copy": copy.deepcopy(built),
        "pickled": pickle.loads(pickle.dumps(built)),
        "clone": built,
    }
    copies["clone"] = Counts()
    for name, metric in built.named_children():
        setattr(copies["clone"], name, metric.clone())
    copies["clone"].added = copies["clone"].tokens + copies["clone"].largest
    world = SumMetric()
    for batch in batches(2, get_local_rank(DATA), get_world_size(DATA)):
        mine = own_tokens(batch)
        for counts in copies.values():
            counts.update(mine)
        world.update((mine["labels"] != -100).sum())
        collection.update((mine["labels"] != -100).sum())
    found: dict[str, Any] = {name: counts.values() for name, counts in copies.items()}
    found["world"] = world.compute().item()
    found["collection"] = collection.compute()["SumMetric"].item()
    # The same metric in a context made anew, with other sizes: four data-parallel ranks.
    context.destroy()
    with pytest.raises(ContextError, match="context"):
        GatherOver(DATA)(torch.zeros(()))
    context.initialize()
    built.tokens.reset()
    for batch in batches(2, get_local_rank(DATA), get_world_size(DATA)):
        built.tokens.update((batch["labels"] != -100).sum())
    found["anew"] = built.tokens.compute().item()
    return found


@layouts
def test_metrics_count_each_sample_and_token_once(run_ranks: Run, sizes: dict[str, int]) -> None:
    expected, tokens = alone(), sum(TOKENS)
    for found in run_ranks(count_over_ranks, 4, sizes):
        for name in ("built", "deep copy", "pickled", "clone"):
            numbers = found[name].pop("numbers")
            assert numbers == expected["numbers"], name
            assert found[name] == pytest.approx({k: v for k, v in expected.items() if k != "numbers"}), name
        # Left to torchmetrics, tensor-parallel copies count as well.
        assert found["world"] == (2 * tokens if "tensor_parallel_size" in sizes else tokens)
        assert found["collection"] == found["anew"] == tokens


def sum_over(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Somebody's own way: this rank's alone, tenfold."""
    return [10 * tensor]


def set_up_by_the_user() -> dict[str, Any]:
    """Sums of 10**rank, over whichever ranks a metric was told to count."""
    ParallelContext().initialize(tensor_parallel_size=2)
    rank = torch.distributed.get_rank()
    train, tensor = get_group(TRAIN), get_group(TENSOR)
    metrics = {
        "free": SumMetric(),
        "group": SumMetric(process_group=tensor),
        "own function": SumMetric(dist_sync_fn=sum_over),
        "told": sync_metrics_over(SumMetric(), GLOBAL),
        "told, with a group": sync_metrics_over(SumMetric(process_group=train), GLOBAL),
        "told, with a function": sync_metrics_over(SumMetric(dist_sync_fn=sum_over), GLOBAL),
    }
    module = nn.Module()
    module.metrics = nn.ModuleDict(metrics)
    changed = sync_unconfigured_metrics(module), sync_unconfigured_metrics(module)
    tracker = MetricTracker(SumMetric(), maximize=True)
    assert sync_unconfigured_metrics(tracker) == 1
    tracker.increment()  # computes on a copy
    for metric in (*metrics.values(), tracker):
        metric.update(10.0**rank)
    values = {name: metric.compute().item() for name, metric in metrics.items()}
    return {**values, "tracker": tracker.compute().item(), "changed": changed}


def test_what_the_user_said_wins(run_ranks: Run) -> None:
    for rank, found in enumerate(run_ranks(set_up_by_the_user, 4)):
        train = [101, 1010][rank % 2]
        assert found == {
            "changed": (1, 0),
            "free": train,
            "group": [11, 1100][rank // 2],
            "own function": 10 * 10**rank,
            "told": 1111,
            "told, with a group": train,
            "told, with a function": 1111,
            "tracker": train,
        }


# ----------------------------------------------------------------------------------------------------- errors


def compute_over_a_mode_that_is_not_there() -> list[str]:
    ParallelContext().initialize(tensor_parallel_size=2)
    metric = sync_metrics_over(SumMetric(), "EXPERT")
    metric.update(1.0)
    with pytest.raises(ModeError) as error:
        metric.compute()
    return [str(error.value), *get_ranks_in_group(TRAIN)]


def test_a_mode_that_is_not_there(run_ranks: Run) -> None:
    for message, *_ in run_ranks(compute_over_a_mode_that_is_not_there, 2):
        assert "EXPERT" in message
        assert "TENSOR_PARALLEL" in message


@pytest.mark.parametrize("nothing", [nn.Linear(1, 1), MetricCollection([]), [SumMetric()], None], ids=repr)
def test_nothing_to_synchronize(nothing: Any) -> None:
    with pytest.raises(LayoutError, match=f"there is none in {type(nothing).__name__}"):
        sync_metrics_over(nothing)


@pytest.mark.parametrize("mode", ["", None, 3])
def test_a_mode_is_a_name(mode: Any) -> None:
    with pytest.raises(LayoutError, match="must be the name of a mode"):
        sync_metrics_over(SumMetric(), mode)


def test_one_process_needs_no_groups() -> None:
    metric = sync_metrics_over(SumMetric())
    metric.update(3.0)
    assert metric.compute() == 3


# ------------------------------------------------------------------------------------------------ all_gather


def gather_over_replicas() -> tuple[list[list[float]], list[float], list[int]]:
    """A DTensor of each replica, the gradient of a loss on each, and what a LightningModule gathers."""
    strategy = started(tensor_parallel_size=2)
    mesh, replica = ParallelContext().device_mesh(TENSOR), get_local_rank(DATA)
    own = distribute_tensor(torch.arange(4.0) * (replica + 1), mesh, [Shard(0)]).requires_grad_()
    gathered = strategy.all_gather(own, sync_grads=True)
    # On replica i, part j counts 10 * i + j + 1 times.
    (gathered.sum(1) * torch.tensor([10.0 * replica + part + 1 for part in range(2)])).sum().backward()
    assert own.grad is not None
    module = line()
    module.trainer = SimpleNamespace(strategy=strategy)  # which is all that it asks of a Trainer
    return (
        gathered.tolist(),
        own.grad.full_tensor().tolist(),
        module.all_gather(torch.tensor(replica)).tolist(),
    )


def test_all_gather_takes_each_replica_once_and_in_full(run_ranks: Run) -> None:
    for rank, (gathered, grad, by_module) in enumerate(run_ranks(gather_over_replicas, 4)):
        assert gathered == [[0, 1, 2, 3], [0, 2, 4, 6]]
        part = rank // 2
        assert grad == [(part + 1) + (10 + part + 1)] * 4
        assert by_module == [0, 1]


# ----------------------------------------------------------------------------------------- under the strategy


class Logs:
    """Logs values in training and metrics in validation, as Lightning's users do."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.own = SumMetric(dist_sync_fn=sum_over)
        self.steps: list[dict[str, float]] = []

    def setup(self, stage: str) -> None:
        sync_metrics_over(self.counts.samples, DATA)  # every other metric is the strategy's

    def configure_model(self) -> None:
        self.late = SumMetric()

    def share(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return own_tokens(batch)

    def group_of_samples(self) -> Any:
        return get_group(DATA)

    def mean(self, losses: Tensor) -> Tensor:
        return token_mean(losses.sum(), losses.numel()).value

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        mine = self.share(batch)
        losses = mine["losses"][mine["labels"] != -100]
        tokens, some = losses.numel(), losses.numel() > 0
        both: dict[str, Any] = {"sync_dist": True, "on_step": True, "on_epoch": True}
        weighted = losses.mean() if some else torch.zeros(())
        self.log("weighted", weighted, batch_size=tokens, sync_dist=True, on_step=False, on_epoch=True)
        self.log("mean", self.mean(losses), batch_size=int(self.total(tokens)), **both)
        self.log("sum", losses.sum(), reduce_fx="sum", **both)
        self.log("largest", losses.max() if some else torch.tensor(-1.0), reduce_fx="max", **both)
        self.log("least", losses.min() if some else torch.tensor(99.0), reduce_fx="min", **both)
        count, group = float(len(batch["number"])), self.group_of_samples()
        self.log("samples", count, reduce_fx="sum", sync_dist_group=group, **both)
        self.log("number", batch["number"].mean(), **both)
        return self.layer(torch.ones(1, 1)).sum()

    def total(self, tokens: int) -> float:
        return float(all_reduce(torch.tensor(float(tokens)), TRAIN))

    def on_train_batch_end(self, *_: Any) -> None:
        logged = self.trainer.logged_metrics.items()
        self.steps.append({name: float(value) for name, value in logged if name.endswith("_step")})

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        mine = self.share(batch)
        self.counts.update(mine)
        self.own.update(1.0)
        self.late.update((mine["labels"] != -100).sum())
        metrics = dict(self.counts.named_children())
        for name in ("loss", "tokens", "largest", "samples"):
            self.log(f"metric {name}", metrics[name])
        self.log("metric late", self.late)
        self.log("metric own", self.own)
        self.log("metric accuracy", self.counts.scores["accuracy"])


class LogsAlone(Logs):
    """The same without this package."""

    def setup(self, stage: str) -> None:
        pass

    def share(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def group_of_samples(self) -> Any:
        return None

    def mean(self, losses: Tensor) -> Tensor:
        return losses.mean()

    def total(self, tokens: int) -> float:
        return tokens


def fit(kind: type, strategy: Any, namespace: str, size: int, **options: Any) -> list[dict[str, float]]:
    """The values of the epoch, and those of each step."""
    model, data = line(namespace, kind), Sentences()
    # As the Trainer deals them to any number of ranks.
    sampler = DistributedSampler(data, num_replicas=1, rank=0) if isinstance(strategy, str) else None
    shuffle = None if sampler else True
    trainer = new_trainer(strategy, namespace, **options)
    train = DataLoader(data, batch_size=size, sampler=sampler, shuffle=shuffle)
    trainer.fit(model, train, DataLoader(data, batch_size=size))
    return [{name: float(value) for name, value in trainer.callback_metrics.items()}, *model.steps]


def fit_on_ranks(sizes: dict[str, int], namespace: str) -> list[dict[str, float]]:
    return fit(Logs, strategy_of(namespace, **sizes), namespace, BATCH // 2)  # two data-parallel ranks


@both
@layouts
def test_logged_values_and_metrics(run_ranks: Run, sizes: dict[str, int], namespace: str) -> None:
    epoch, *steps = fit(LogsAlone, "auto", namespace, BATCH, devices=1)
    assert epoch["sum_epoch"] > 10  # there is something to compare
    assert epoch["metric tokens"] == sum(TOKENS)
    assert len(steps) == 2
    epoch["metric own"] = 10 * len(steps)  # left as the user set it up: this rank's alone
    for ours, *our_steps in run_ranks(fit_on_ranks, 4, sizes, namespace):
        assert ours == pytest.approx(epoch)
        assert our_steps == [pytest.approx(step) for step in steps]


class UsesAModeThatIsNotThere:
    def __init__(self) -> None:
        super().__init__()
        self.metric = sync_metrics_over(SumMetric(), "EXPERT")

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.metric.update(1.0)
        self.log("metric", self.metric)


def validate_with_a_mode_that_is_not_there() -> str:
    with pytest.raises(ModeError) as error:
        new_trainer(strategy_of(tensor_parallel_size=2)).validate(
            line(mixin=UsesAModeThatIsNotThere), loader(4), verbose=False
        )
    return str(error.value)


def test_a_mode_that_is_not_there_under_the_strategy(run_ranks: Run) -> None:
    assert all("EXPERT" in message for message in run_ranks(validate_with_a_mode_that_is_not_there, 4))
