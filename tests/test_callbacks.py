"""Lightning's own callbacks under the strategy, against one process."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from strategy_models import (
    BATCH,
    DATA,
    LM,
    NAMESPACES,
    SEQUENCE,
    TENSOR,
    AloneLM,
    Run,
    Weights,
    Windows,
    line,
    loader,
    new_trainer,
    new_transformer,
    one_process,
    strategy_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rlightning_groups import ContextError, get_local_rank
from rlightning_groups.sharding import mark_sharded

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
both = pytest.mark.parametrize("namespace", NAMESPACES)
TENSOR_2, SEQUENCE_2 = {"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}


def callbacks(namespace: str = "pytorch_lightning") -> Any:
    return import_module(f"{namespace}.callbacks")


def equal(ours: Weights, theirs: Weights) -> bool:
    """Whether two models hold the same, to the last few digits."""
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-9) for name in theirs
    )


# ---------------------------------------------------------------------------------------------- throughput


class Keeps:
    """A logger that keeps what it is handed."""

    def __init__(self, namespace: str) -> None:
        self.told: list[dict[str, float]] = []
        base = import_module(f"{namespace}.loggers").Logger
        kind = type(
            "Logger",
            (base,),
            {
                "name": "keeps",
                "version": 0,
                "log_hyperparams": lambda *_: None,
                "log_metrics": lambda _, metrics, step=None: self.told.append(dict(metrics)),
            },
        )
        self.logger = kind()


def measure(namespace: str, sizes: dict[str, int]) -> dict[str, list[dict[str, float]]]:
    """What is logged with a second to each look at the clock, by stage, and again on a second run."""

    class Flops:
        flops_per_batch = 600

    def trainer_of(**options: Any) -> tuple[Any, Keeps]:
        keeps = Keeps(namespace)
        trainer = new_trainer(
            strategy_of(namespace, **sizes), namespace, callbacks=[monitor], logger=keeps.logger, **options
        )
        return trainer, keeps

    home = import_module(f"{namespace}.callbacks.throughput_monitor")
    monitor = home.ThroughputMonitor(batch_size_fn=len, length_fn=lambda b: 5 * len(b), window_size=2)
    found = {}
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    with (
        mock.patch.object(home, "time", clock),
        mock.patch.object(home, "get_available_flops", return_value=1000),
    ):
        trainer, keeps = trainer_of(limit_val_batches=0)
        trainer.fit(line(namespace, Flops), loader(16, batch_size=2))
        found["fit"] = keeps.told
        trainer, keeps = trainer_of()
        trainer.validate(line(namespace, Flops), loader(16, batch_size=2), verbose=False)
        found["validate"] = keeps.told
    flops = {throughput.available_flops for throughput in monitor._throughputs.values()}
    assert len(flops) == 1  # the second run left the first one's alone
    return {
        stage: [{k: v for k, v in one.items() if "per_sec" in k or "mfu" in k} for one in told]
        for stage, told in found.items()
    }


@both
@pytest.mark.parametrize(
    ("sizes", "replicas"), [(TENSOR_2, 2), ({**TENSOR_2, **SEQUENCE_2}, 1), ({}, 4)], ids=["2", "1", "4"]
)
def test_throughput(run_ranks: Run, namespace: str, sizes: dict[str, int], replicas: int) -> None:
    """A step of one second trains two samples of five items on each replica, which has 600 flops to do."""
    per_device = {"batches_per_sec": 1, "samples_per_sec": 2, "items_per_sec": 10, "flops_per_sec": 600}
    first, *others = run_ranks(measure, 4, namespace, sizes)
    for stage, name in (("fit", "train"), ("validate", "validate")):
        expected = {f"{name}|device/{key}": value for key, value in per_device.items()}
        expected[f"{name}|device/mfu"] = 600 / (1000 * 4 / replicas)
        if replicas > 1:
            expected |= {f"{name}|{key}": replicas * value for key, value in per_device.items()}
        told = [{key.replace(f"{name}/", f"{name}|", 1): v for key, v in one.items()} for one in first[stage]]
        assert [one for one in told if one][-1] == pytest.approx(expected)
        assert not any(any(one) for rest in others for one in rest[stage])


# ------------------------------------------------------------------------------------------- model summary


class Alone(AloneLM):
    """The language model on one device, with a validation too."""

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Windows(BATCH), batch_size=BATCH)


def freeze_one(lm: LM) -> LM:
    """Keep one weight from being trained, whatever module comes to hold it."""
    configure = lm.configure_model

    def configure_model() -> None:
        configure()
        lm.model.blocks[0].up.weight.requires_grad_(False)

    lm.configure_model = configure_model  # type: ignore[method-assign]
    return lm


def summarize(name: str, lm: LM, strategy: Any, **options: Any) -> dict[str, Any]:
    """What a ModelSummary is about to print: parameters by layer, in total, trainable, megabytes."""
    found: dict[str, Any] = {}

    class Summary(getattr(callbacks(), name)):  # type: ignore[misc]
        @staticmethod
        def summarize(data: Any, total: int, trainable: int, megabytes: float, *_: Any, **__: Any) -> None:
            columns = dict(data)
            layers = dict(zip(columns["Name"], columns["Params"], strict=True))
            found.update(total=total, trainable=trainable, megabytes=megabytes, layers=layers)

    options |= {"enable_model_summary": True, "limit_val_batches": 0}
    new_trainer(strategy, callbacks=[Summary(max_depth=-1)], **options).fit(freeze_one(lm))
    return found


def summarize_on_ranks(tensor: str, sizes: dict[str, int]) -> list[dict[str, Any]]:
    return [
        summarize(name, LM(tensor=tensor, count=BATCH), strategy_of(**sizes))
        for name in ("ModelSummary", "RichModelSummary")
    ]


@pytest.mark.parametrize(
    ("tensor", "sizes"), [("hand", TENSOR_2), ("hand", {"tensor_parallel_size": 4}), ("dtensor", TENSOR_2)]
)
def test_summaries_count_full_parameters(run_ranks: Run, tensor: str, sizes: dict[str, int]) -> None:
    expected = summarize("ModelSummary", Alone(count=BATCH), "auto", devices=1)
    assert expected["total"] == sum(p.numel() for p in new_transformer().parameters())
    assert expected["trainable"] == expected["total"] - 16 * 32
    first, *others = run_ranks(summarize_on_ranks, 4, tensor, sizes)
    assert first == [expected, expected]
    assert others == [[{}, {}]] * 3


class Parted:
    """A layer of six outputs, of which each of two tensor ranks holds three."""

    def configure_model(self) -> None:
        self.part = nn.Linear(1, 3, bias=False).requires_grad_(False)
        mark_sharded(self.part.weight, 0)


def summarize_line(namespace: str, mixin: type, strategy: Any, **options: Any) -> tuple[int, int]:
    """The parameters in total and trainable, by the summary that Lightning adds by itself."""
    trainer = new_trainer(strategy, namespace, enable_model_summary=True, **options)
    (callback,) = (one for one in trainer.callbacks if isinstance(one, callbacks(namespace).ModelSummary))
    with mock.patch.object(callback, "summarize") as told:
        trainer.fit(line(namespace, mixin), loader(4))
    return told.call_args.args[1:3] if told.called else (0, 0)


def summarize_parted(namespace: str) -> tuple[int, int]:
    return summarize_line(namespace, Parted, strategy_of(namespace, **TENSOR_2))


@both
def test_the_summary_that_is_always_there(run_ranks: Run, namespace: str) -> None:
    assert run_ranks(summarize_parted, 2, namespace) == [(2 + 6, 2), (0, 0)]


# ---------------------------------------------------------------------------------------- averaged weights


def averaging(name: str) -> Any:
    # Two of them say so on rank 0, whether the model is sharded or not.
    warnings.filterwarnings("ignore", message=".*overrides the configure_model.*")
    arguments: dict[str, Any] = {
        "StochasticWeightAveraging": {"swa_lrs": 0.02, "swa_epoch_start": 1, "annealing_epochs": 2},
        "WeightAveraging": {},
        "EMAWeightAveraging": {"decay": 0.5},
    }
    return getattr(callbacks(), name)(**arguments[name])


def average(name: str, path: str, kind: type[LM], new_strategy: Any, **options: Any) -> dict[str, Any]:
    """Losses and final weights of a fit, and of one that goes on from its checkpoint."""
    found: dict[str, Any] = {"losses": []}
    for epochs in (3, 5):
        lm, callback = kind(count=2 * BATCH), averaging(name)
        trainer = new_trainer(new_strategy(), callbacks=[callback], max_epochs=epochs, **options)
        trainer.fit(lm, ckpt_path=path if epochs == 5 else None)
        trainer.save_checkpoint(path)
        found["losses"] += [*lm.losses, float(trainer.callback_metrics["val"])]
        found[f"weights {epochs}"] = {key: value.clone() for key, value in lm.model.state_dict().items()}
    return found


def average_on_ranks(name: str, path: str, sizes: dict[str, int]) -> dict[str, Any]:
    return average(name, path, LM, partial(strategy_of, **sizes))


AVERAGES = [
    name
    for name in ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
    if hasattr(callbacks(), name)  # two of them came with Lightning 2.6
]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(AVERAGES[0], TENSOR_2), *((name, SEQUENCE_2) for name in AVERAGES)],
    ids=str,
)
def test_averaged_weights(run_ranks: Run, tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    expected = average(name, str(tmp_path / "alone.ckpt"), Alone, lambda: "auto", devices=1)
    plain = one_process(epochs=3, count=2 * BATCH)[1]
    assert not equal(expected["weights 3"], plain)  # the average is not the last step's
    for found in run_ranks(average_on_ranks, 4, name, str(tmp_path / "ranks.ckpt"), sizes):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        for key in ("weights 3", "weights 5"):
            assert equal(found[key], expected[key]), key


def fit_averaging(name: str, tensor: str, **options: Any) -> tuple[str, int]:
    """What a fit says, and how many steps it made."""

    class Late(LM):
        def configure_model(self) -> None:
            if not hasattr(self, "late"):
                self.late = nn.Linear(1, 1).double()

    lm = Late() if tensor == "late" else LM(tensor=tensor)
    trainer = new_trainer(strategy_of(**options), callbacks=[averaging(name)] if name else [])
    with pytest.raises(ContextError) as error:
        trainer.fit(lm)
    return str(error.value), len(lm.losses)


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_of_sharded_models_are_refused(run_ranks: Run, name: str) -> None:
    for tensor, options, why in [
        ("hand", TENSOR_2, "6 of 15 parameters are not what it copied: 'model.blocks.0.query.weight' is m"),
        (
            "dtensor",
            TENSOR_2,
            "6 of 15 parameters are not what it copied: 'model.blocks.0.query.weight' is a D",
        ),
        ("none", {"data_parallel": "shard"}, "15 of 15 parameters are not what it copied"),
        ("late", {}, "2 of 17 parameters are not what it copied: 'late.weight' is not in the copy"),
    ]:
        if tensor == "late" and name != "StochasticWeightAveraging":
            continue  # the others configure the model before they copy it
        for message, steps in run_ranks(fit_averaging, 4, name, tensor, **options):
            assert message.startswith(f"{name} copies the model when the fit begins")
            assert why in message
            assert steps == 0


def test_one_ranks_reason_is_every_ranks(run_ranks: Run) -> None:
    names = ["", "", "StochasticWeightAveraging", ""]
    results = run_ranks(fit_averaging, 4, "dtensor", per_rank=names, **TENSOR_2)
    for rank, (message, steps) in enumerate(results):
        assert message.startswith("Stochastic" if rank == 2 else "rank 2 refused: Stochastic")
        assert steps == 0


# ------------------------------------------------------------------------------------------------- tuning


class Tuned(LM):
    """Keeps the weights and forgets the losses from before the training itself."""

    lr = 1e-3
    batch_size = 2

    def on_train_start(self) -> None:
        self.before = self.full_weights()
        self.losses.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class TunedAlone(Tuned, Alone):
    def full_weights(self) -> Weights:
        return {}


def find_learning_rate(tensor: str) -> tuple[float, float, Weights, list[float]]:
    """The suggestion, the rate that was set, and weights and losses of the training after it."""

    def trainer_of(**options: Any) -> Any:
        return new_trainer(strategy_of(tensor_parallel_size=2), limit_val_batches=0, **options)

    lm = Tuned(tensor=tensor, count=16 * BATCH)
    tuner = import_module("pytorch_lightning.tuner").Tuner(trainer_of())
    finder = tuner.lr_find(lm, min_lr=1e-6, max_lr=0.01, num_training=15)
    trainer_of().fit(lm)
    return finder.suggestion(), lm.lr, lm.before, lm.losses


@pytest.mark.parametrize("tensor", ["hand", "dtensor"])
def test_learning_rate_finder(run_ranks: Run, tensor: str) -> None:
    """One suggestion everywhere; the training after it is one process's with that rate, from the start."""
    results = run_ranks(find_learning_rate, 4, tensor)
    suggestion, *_ = results[0]
    assert 1e-6 < suggestion < 0.01
    alone = TunedAlone(count=16 * BATCH)
    alone.lr = suggestion
    new_trainer("auto", devices=1, limit_val_batches=0).fit(alone)
    for own, rate, weights, losses in results:
        assert own == rate == suggestion
        assert equal(weights, new_transformer().state_dict())
        assert losses == pytest.approx(alone.losses, abs=1e-6)


def find_batch_size() -> list[str]:
    told = []
    trainer = new_trainer(strategy_of(tensor_parallel_size=2), callbacks=[callbacks().BatchSizeFinder()])
    tuner = import_module("pytorch_lightning.tuner").Tuner(new_trainer(strategy_of(tensor_parallel_size=2)))
    for find in (lambda: trainer.fit(Tuned()), lambda: tuner.scale_batch_size(Tuned())):
        try:
            find()
        except Exception as error:
            told.append(str(error))
    return told


def test_batch_size_finder_is_refused_by_lightning(run_ranks: Run) -> None:
    for told in run_ranks(find_batch_size, 4):
        assert len(told) == 2
        assert all("not supported with distributed strategies" in one for one in told)


# ---------------------------------------------------------------------------------------------- decisions


class Scores:
    """Sample ``i`` scores best in epoch ``i``, so that ranks alone would decide differently."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, index: int) -> None:
        score = (batch - self.current_epoch).square().mean()
        self.log("score", score, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "score"}}

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def decide(strategy: Any, size: int, **options: Any) -> dict[str, Any]:
    """When a fit was stopped, its learning rates, and the checkpoint that was taken for the best."""
    stop = callbacks().EarlyStopping("score", patience=2)
    best = callbacks().ModelCheckpoint(monitor="score", filename="{epoch}")
    model = line(mixin=Scores)
    options |= {"callbacks": [stop, best], "max_epochs": 12, "enable_checkpointing": True}
    new_trainer(strategy, **options).fit(model, loader(8, size), loader(8, size))
    return {
        "stopped": stop.stopped_epoch,
        "rates": model.rates,
        "best": (Path(best.best_model_path).name, float(best.best_model_score)),
    }


def decide_on_ranks(sizes: dict[str, int], ranks: int) -> dict[str, Any]:
    return decide(strategy_of(**sizes), 4 // ranks)


@pytest.mark.parametrize("sizes", [TENSOR_2, SEQUENCE_2], ids=str)
def test_all_ranks_decide_alike(
    run_ranks: Run, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = decide("auto", 4, devices=1)
    assert expected["stopped"] == 5  # the mean is least in epochs 3 and 4
    assert expected["rates"][-1] < 1
    assert run_ranks(decide_on_ranks, 4, sizes, 2) == [expected] * 4


# -------------------------------------------------------------------------------------------- predictions


def write_predictions(count: int) -> dict[str, Any]:
    """What a writer is handed on the ranks that write, by batch and by epoch."""
    written: dict[str, Any] = {"batch": [], "epoch": []}

    class Writer(callbacks().BasePredictionWriter):  # type: ignore[misc]
        def write_on_batch_end(self, trainer: Any, module: Any, value: Tensor, indices: Any, *_: Any) -> None:
            written["batch"] += zip(indices, value.flatten().tolist(), strict=True)

        def write_on_epoch_end(self, trainer: Any, module: Any, values: Any, indices: Any) -> None:
            for numbers, value in zip(indices[0], values, strict=True):
                written["epoch"] += zip(numbers, value.flatten().tolist(), strict=True)

    strategy = strategy_of(tensor_parallel_size=2, sequence_parallel_size=2)
    new_trainer(strategy, callbacks=[Writer("batch_and_epoch")]).predict(line(), loader(count, batch_size=2))
    return {**written, "place": (get_local_rank(DATA), get_local_rank(TENSOR), get_local_rank(SEQUENCE))}


def test_prediction_writers(run_ranks: Run) -> None:
    """Seven samples, which do not divide over two data-parallel ranks, each written once."""
    results = run_ranks(write_predictions, 8, 7)
    for interval in ("batch", "epoch"):
        by_place = {one["place"]: one[interval] for one in results}
        assert sorted(by_place[0, 0, 0] + by_place[1, 0, 0]) == [(i, float(i)) for i in range(7)]
        for (data, *_), written in by_place.items():
            assert written == by_place[data, 0, 0]  # peers are handed the same
