"""State that is spread over ranks behaves as if it were in one place: through the Trainer's own options."""

from __future__ import annotations

import functools
import itertools
import math
import os
import resource
import signal
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.plugins.precision import MixedPrecision
from strategy_models import (
    BATCH,
    LM,
    TENSOR,
    TRAIN,
    AloneLM,
    Run,
    Windows,
    batches,
    new_optimizer,
    new_trainer,
    new_transformer,
    one_process,
    plain_attention,
    strategy_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from rlightning_groups import CheckpointError, ParallelContext, get_group, get_local_rank
from rlightning_groups.checkpoint import (
    full_state,
    gather_state,
    load_file,
    save_file,
    shard_model_state,
    shard_optimizer_state,
    sharded_optimizer_state,
)
from rlightning_groups.clipping import clip_grad_norm_, grad_norms
from rlightning_groups.sharding import local_tensor, mark_partial_gradient, marked_state_dict

Sizes = tuple[int, int, int]  # data, sequence, tensor
LAYOUTS: list[Sizes] = [(4, 1, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4), (2, 2, 2), (1, 1, 1)]
MODES, FORMATS, KINDS = ("replicate", "shard"), ("file", "directory"), ("dtensor", "hand")
PLAIN_RESUMES_UNDER = [(1, 1, 4), (2, 1, 2)]  # what plain Lightning saved on one device
COUNT = 5 * BATCH  # five steps an epoch


def scheduled(lm: LM) -> dict[str, Any]:
    optimizer = new_optimizer(lm.model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Scheduled(LM):
    """With a scheduler; keeps the optimizer's full state and the learning rate it ended with."""

    configure_optimizers = scheduled  # type: ignore[assignment]
    ended: tuple[dict[str, Any], float]

    def on_train_end(self) -> None:
        self.ended = (
            self.trainer.strategy.optimizer_state(self.trainer.optimizers[0]),
            self.trainer.optimizers[0].param_groups[0]["lr"],
        )


class AloneScheduled(AloneLM):
    configure_optimizers = scheduled  # type: ignore[assignment]


def layout(sizes: Sizes, mode: str = "replicate", **options: Any) -> Any:
    data, sequence, tensor = sizes
    return strategy_of(
        data_parallel_size=data,
        sequence_parallel_size=sequence,
        tensor_parallel_size=tensor,
        data_parallel=mode,
        **options,
    )


def kind_of(sizes: Sizes, kind: str) -> str:
    return kind if sizes[2] > 1 else "none"


def save(paths: dict[str, str], sizes: Sizes, mode: str, kind: str) -> list[float]:
    """Train one epoch, and save in the formats that there are paths for."""
    lm = Scheduled(tensor=kind_of(sizes, kind), count=COUNT)
    trainer = new_trainer(layout(sizes, mode), max_epochs=1, limit_val_batches=0)
    trainer.fit(lm)
    for form, path in paths.items():
        trainer.strategy._save_distributed_checkpoint = form == "directory"
        trainer.save_checkpoint(path)
    return lm.losses


Resumed = tuple[list[float], dict[str, Any] | None, float]


def resume(path: str, sizes: Sizes, mode: str, kind: str) -> Resumed:
    lm = Scheduled(tensor=kind_of(sizes, kind), count=COUNT)
    trainer = new_trainer(layout(sizes, mode), max_epochs=2, limit_val_batches=0)
    trainer.fit(lm, ckpt_path=path)
    state, rate = lm.ended
    return lm.losses, state if trainer.is_global_zero else None, rate


def resume_all(cases: list[tuple[str, Sizes, str, str]]) -> list[Resumed]:
    return [resume(*case) for case in cases]


@functools.cache
def uninterrupted() -> tuple[list[float], dict[str, Any], float]:
    """Ten steps of one device without this package: losses, optimizer state, learning rate."""
    alone = AloneScheduled(count=COUNT)
    trainer = new_trainer("auto", devices=1, max_epochs=2, limit_val_batches=0)
    trainer.fit(alone)
    optimizer = trainer.optimizers[0]
    return alone.losses, optimizer.state_dict(), optimizer.param_groups[0]["lr"]


def save_plain(path: Path) -> None:
    """What plain Lightning saves on one device after the first epoch."""
    alone = AloneScheduled(count=COUNT)
    trainer = new_trainer("auto", devices=1, max_epochs=1, limit_val_batches=0)
    trainer.fit(alone)
    trainer.save_checkpoint(path)


def check(results: list[Resumed], told: object) -> None:
    losses, state, rate = uninterrupted()
    for ours, _, our_rate in results:
        assert ours == pytest.approx(losses[5:], abs=1e-9, rel=0), told
        assert our_rate == pytest.approx(rate, rel=1e-12), told
    ours_in_full = results[0][1]
    assert ours_in_full is not None
    assert ours_in_full["state"].keys() == state["state"].keys(), told
    for number, entries in state["state"].items():
        for key, value in entries.items():
            ours_of_it = ours_in_full["state"][number][key]
            torch.testing.assert_close(ours_of_it, value, rtol=0, atol=1e-9, msg=lambda m: f"{told}: {m}")


def cases() -> list[tuple[Sizes, str, str, str, Sizes, str, str]]:
    """Saver's layout, mode, kind and format; resumer's layout, mode and kind.

    Each layout saves for two others and resumes from two others, with the other choices dealt out over them.
    All pairs with all choices, six minutes of work, where ``RLIGHTNING_GROUPS_FULL_MATRIX`` is set.
    """
    everyone = range(len(LAYOUTS))
    pairs = [(LAYOUTS[a], LAYOUTS[(a + step) % len(LAYOUTS)]) for a in everyone for step in (1, 3)]
    choices = list(itertools.product(MODES, KINDS, FORMATS, MODES, KINDS))
    if os.environ.get("RLIGHTNING_GROUPS_FULL_MATRIX"):
        pairs = [(a, b) for a, b in itertools.product(LAYOUTS, repeat=2) if a != b]
        return [
            (a, mode, "dtensor", form, b, other, "dtensor")
            for (a, b), mode, form, other in itertools.product(pairs, MODES, FORMATS, MODES)
        ]
    return [
        (a, mode, kind, form, b, other, other_kind)
        for number, (a, b) in enumerate(pairs)
        for mode, kind, form, other, other_kind in [choices[(7 * number) % len(choices)]]
    ]


def test_resume_matrix(run_ranks: Run, tmp_path: Path) -> None:
    """Law 6: a checkpoint resumes under any other layout, with the next losses and moments equal."""
    path_of: dict[Any, str] = {}
    for sizes, mode, kind, form, *_ in cases():
        path_of[sizes, mode, kind, form] = str(tmp_path / f"{sizes}-{mode}-{kind}-{form}.ckpt")
    for sizes, mode, kind in dict.fromkeys(key[:3] for key in path_of):
        paths = {
            form: path_of[sizes, mode, kind, form] for form in FORMATS if (sizes, mode, kind, form) in path_of
        }
        for losses in run_ranks(save, math.prod(sizes), paths, sizes, mode, kind):
            assert losses == pytest.approx(uninterrupted()[0][:5], abs=1e-9, rel=0)
    plain = tmp_path / "plain.ckpt"
    save_plain(plain)
    for sizes in LAYOUTS:
        mine = [case for case in cases() if case[4] == sizes]
        todo = [(path_of[case[:4]], sizes, case[5], case[6]) for case in mine]
        todo += [(str(plain), sizes, mode, "dtensor") for mode in MODES if sizes in PLAIN_RESUMES_UNDER]
        results = run_ranks(resume_all, math.prod(sizes), todo, timeout=300)
        for index, case in enumerate(todo):
            check([result[index] for result in results], case)


def test_one_device_without_the_package_resumes(run_ranks: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "sharded.ckpt")
    run_ranks(save, 8, {"file": path}, (2, 2, 2), "shard", "dtensor")
    alone = AloneScheduled(count=COUNT)
    new_trainer("auto", devices=1, max_epochs=2, limit_val_batches=0).fit(alone, ckpt_path=path)
    assert alone.losses == pytest.approx(uninterrupted()[0][5:], abs=1e-9, rel=0)
    loaded = AloneScheduled.load_from_checkpoint(path, count=COUNT)
    assert all(type(value) is Tensor for value in loaded.state_dict().values())


# ------------------------------------------------------------------------------------------------ gradients


class Clipped(LM):
    """Clips through whatever the Trainer is given; keeps the norms before clipping."""

    def __init__(self, manual: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = not manual
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(grad_norms(self)["grad_2.0_norm_total"])

    def training_step(self, window: Tensor, index: int) -> Tensor | None:
        if self.automatic_optimization:
            return super().training_step(window, index)
        optimizer, loss = self.optimizers(), super().training_step(window, index)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        return None


class AnyNorm(Clipped):
    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.05, math.inf)


CLIPS: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "manual": {},
    "inf": {},
}


def clip_by(name: str, parameters: list[Tensor]) -> None:
    if name == "value":
        torch.nn.utils.clip_grad_value_(parameters, 0.001)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, 0.05, math.inf if name == "inf" else 2.0)


@functools.cache
def clipped_alone(name: str) -> tuple[list[float], list[float]]:
    model = new_transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses, norms = [], []
    for batch in batches(COUNT, BATCH, 1):
        optimizer.zero_grad()
        loss = model(batch, plain_attention)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        clip_by(name, list(model.parameters()))
        optimizer.step()
    return losses, norms


def clip_all(sizes: Sizes, mode: str, kind: str) -> dict[str, tuple[list[float], list[float]]]:
    results = {}
    for name, options in CLIPS.items():
        lm = (AnyNorm if name == "inf" else Clipped)(
            manual=name == "manual", tensor=kind_of(sizes, kind), count=COUNT
        )
        lm.configure_optimizers = lambda lm=lm: torch.optim.SGD(lm.parameters(), lr=1.0)  # type: ignore[method-assign]
        new_trainer(layout(sizes, mode), limit_val_batches=0, **options).fit(lm)
        results[name] = (lm.losses, lm.norms)
    return results


@pytest.mark.parametrize(
    ("sizes", "mode", "kind"),
    [
        ((2, 1, 2), "replicate", "dtensor"),
        ((1, 2, 2), "replicate", "hand"),
        ((2, 1, 2), "shard", "dtensor"),
        ((1, 2, 2), "shard", "hand"),
    ],
)
def test_clipping_through_the_trainer(run_ranks: Run, sizes: Sizes, mode: str, kind: str) -> None:
    """Law 3, by norm, by value, by the largest element, and by hand; with the norm that is logged before."""
    for rank_results in run_ranks(clip_all, 4, sizes, mode, kind):
        for name, (losses, norms) in rank_results.items():
            alone, alone_norms = clipped_alone(name)
            manual = name == "manual"  # there the norm is looked at after clipping
            assert losses == pytest.approx(alone, abs=1e-9, rel=0), name
            wanted = [min(norm, 0.05) for norm in alone_norms] if manual else alone_norms
            assert norms == pytest.approx(wanted, rel=1e-4 if manual else 1e-9), name
        assert alone_norms[0] > 0.1  # or clipping would have done nothing


class Once(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Partial(LightningModule):
    """One marked weight, whose gradient on tensor rank r is r + 1 in every micro-batch."""

    def __init__(self, manual: bool, extra: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.extra = extra
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        mark_partial_gradient(self.weight)
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = (self.weight * (1 + get_local_rank(TENSOR))).sum() / 2
        if self.automatic_optimization:
            return loss * 2
        self.manual_backward(loss)
        optimizer = self.optimizers()
        if self.extra:  # looks at the gradient, and goes on accumulating
            self.clip_gradients(optimizer, gradient_clip_val=100.0, gradient_clip_algorithm="norm")
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.weight.grad is not None
        self.seen.append(float(self.weight.grad))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(Once(), batch_size=1)


def partial_sums() -> list[Any]:
    results = []
    for manual, extra, mode in [
        (False, False, "replicate"),
        (True, False, "replicate"),
        (True, True, "replicate"),
        (False, False, "shard"),
    ]:
        model = Partial(manual, extra)
        trainer = new_trainer(
            strategy_of(tensor_parallel_size=2, data_parallel=mode),
            accumulate_grad_batches=1 if manual else 2,
        )
        trainer.fit(model)
        results.append((model.seen, float(full_state(model.weight.detach()))))
    return results


def test_partial_gradients_over_micro_batches(run_ranks: Run) -> None:
    """Law 2: gradients 1 and 2 over two micro-batches give 3.0, whoever steps, clips or looks in between."""
    assert run_ranks(partial_sums, 2) == [[([3.0, 3.0], -6.0)] * 4] * 2


class Overflows(LM):
    """Rank 1 finds an infinite gradient in its second step."""

    def on_after_backward(self) -> None:
        if self.global_step == 1 and dist.get_rank() == 1 and not self.overflown:
            self.overflown = True
            next(iter(self.model.parameters())).grad.fill_(math.inf)  # type: ignore[union-attr]

    overflown = False


def overflow(kind: str, mode: str) -> tuple[list[bool], list[float]]:
    """Whether the weights of this rank moved in each step, and the scale after it."""
    lm = Overflows(tensor=kind, count=4 * BATCH)
    moved, scales = [], []

    def begin(*_: Any) -> None:
        lm.before = [local_tensor(p).detach().clone() for p in lm.parameters()]

    def end(*_: Any) -> None:
        after = [local_tensor(p) for p in lm.parameters()]
        moved.append(any(not torch.equal(a, b) for a, b in zip(after, lm.before, strict=True)))
        scales.append(scaler.get_scale())

    lm.on_train_batch_start, lm.on_train_batch_end = begin, end  # type: ignore[method-assign, assignment]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    strategy = strategy_of(tensor_parallel_size=2, data_parallel=mode)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    plugin.forward_context = nullcontext  # float64 is what is compared
    trainer = new_trainer(strategy, plugins=plugin, limit_val_batches=0, gradient_clip_val=1.0)
    trainer.fit(lm)
    return moved, scales


@pytest.mark.parametrize(
    ("kind", "mode"), [("dtensor", "replicate"), ("hand", "replicate"), ("dtensor", "shard")]
)
def test_overflow_on_one_rank_is_overflow_on_all(run_ranks: Run, kind: str, mode: str) -> None:
    """Law 4: one rank with an infinite gradient skips the step everywhere."""
    for moved, scales in run_ranks(overflow, 4, kind, mode):
        assert moved == [True, False, True, True]
        assert scales == [8.0, 4.0, 4.0, 4.0]


class Zero(LM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's module uses what torch has deprecated
            from torch.distributed.optim import ZeroRedundancyOptimizer
        group = get_group(TRAIN if self.right else "GLOBAL")
        return ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2, weight_decay=0.1
        )

    right = True


def with_zero(path: str, kind: str, resumes: bool, right: bool = True) -> tuple[list[float], int]:
    """Losses, and how many parameters' moments this rank keeps."""
    lm = Zero(tensor=kind, count=COUNT)
    lm.right = right
    trainer = new_trainer(strategy_of(tensor_parallel_size=2), max_epochs=1 + resumes, limit_val_batches=0)
    trainer.fit(lm, ckpt_path=path if resumes else None)
    held = len(trainer.optimizers[0].optim.state)
    if not resumes:
        trainer.save_checkpoint(path)
    return lm.losses, held


def test_zero_redundancy_optimizer(run_ranks: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "zero.ckpt")
    losses, _ = one_process(epochs=2, count=COUNT)
    count = len(list(new_transformer().parameters()))
    for sizes, resumes in [(4, False), (4, True), (2, True)]:
        results = run_ranks(with_zero, sizes, path, "hand", resumes)
        assert all(ours == pytest.approx(losses[5 * resumes :][:5], abs=1e-9) for ours, _ in results)
        assert sum(held for _, held in results) == 2 * count  # each tensor rank's once
    alone = AloneLM(count=COUNT)
    new_trainer("auto", devices=1, max_epochs=2, limit_val_batches=0).fit(alone, ckpt_path=path)
    assert alone.losses == pytest.approx(losses[5:], abs=1e-9, rel=0)
    for kind, right, message in [
        ("dtensor", True, "ZeroRedundancyOptimizer sends plain tensors only, and the model has DTensors"),
        ("hand", False, r"runs over ranks \[0, 1, 2, 3\], which do not all hold the same weights"),
    ]:
        with pytest.raises(RankFailure, match=message):
            run_ranks(with_zero, 4, path, kind, False, right)


class Mixing(LM):
    """Steps by an optimizer that looks at whole parameters."""

    optimizer = ""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        return getattr(torch.optim, self.optimizer)(matrices, lr=1e-2)


def fit_mixing(optimizer: str, kind: str, mode: str) -> None:
    lm = Mixing(tensor=kind, count=COUNT)
    lm.optimizer = optimizer
    new_trainer(strategy_of(tensor_parallel_size=2, data_parallel=mode), limit_val_batches=0).fit(lm)


@pytest.mark.parametrize(
    ("optimizer", "kind", "mode"),
    [
        ("LBFGS", "dtensor", "replicate"),
        ("LBFGS", "none", "shard"),
        ("Muon", "hand", "replicate"),
        ("Adafactor", "hand", "shard"),
    ],
)
def test_optimizers_that_would_see_one_part_are_refused(
    run_ranks: Run, optimizer: str, kind: str, mode: str
) -> None:
    with pytest.raises(
        RankFailure, match=rf"{optimizer} computes with all elements.* this rank's part of model"
    ):
        run_ranks(fit_mixing, 4, optimizer, kind, mode)


def test_optimizers_that_see_the_whole_are_not_refused(run_ranks: Run) -> None:
    run_ranks(fit_mixing, 4, "Muon", "dtensor", "replicate")
    run_ranks(fit_mixing, 2, "LBFGS", "none", "replicate")


# -------------------------------------------------------------------------------------------------- failures


class Raises(LM):
    """Raises on some ranks in the third step."""

    ranks: tuple[int, ...] = ()

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 2 and dist.get_rank() in self.ranks:
            raise ZeroDivisionError(f"rank {dist.get_rank()} fails")


def fail_with_checkpoint(folder: str, ranks: tuple[int, ...], form: str) -> tuple[str, float]:
    """The error this rank ends with, and after how long."""
    lm = Raises(tensor="dtensor", count=COUNT)
    lm.ranks = ranks
    strategy = strategy_of(tensor_parallel_size=2, timeout=6, save_distributed_checkpoint=form == "directory")
    keep = OnExceptionCheckpoint(folder)
    keep.teardown = lambda *_, **__: None  # type: ignore[method-assign]  # which removes it again
    trainer = new_trainer(strategy, limit_val_batches=0, callbacks=[keep], enable_checkpointing=True)
    start = time.monotonic()
    with warnings.catch_warnings(), pytest.raises(Exception) as error:  # noqa: PT012
        warnings.simplefilter("ignore")  # Lightning's, that there is no checkpoint yet
        trainer.fit(lm)
    return f"{type(error.value).__name__}: {error.value}", time.monotonic() - start


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_on_exception(run_ranks: Run, tmp_path: Path, form: str) -> None:
    """One rank that raises ends in its error without a checkpoint; where all raise, there is one."""
    if form == "file":  # the other one makes no difference where nothing is written
        message, seconds = run_ranks(fail_with_checkpoint, 4, str(tmp_path), (1,), form)[1]
        assert message == "ZeroDivisionError: rank 1 fails"
        assert seconds < 25
        assert not list(tmp_path.glob("on_exception*"))
    for rank, (message, _) in enumerate(
        run_ranks(fail_with_checkpoint, 4, str(tmp_path), (0, 1, 2, 3), form)
    ):
        assert message == f"ZeroDivisionError: rank {rank} fails"
    path = str(tmp_path / "on_exception.ckpt")
    losses, _ = one_process(epochs=1, count=COUNT)
    assert run_ranks(go_on, 2, path) == [pytest.approx(losses[2], abs=1e-9)] * 2


def loss_of_third_batch(lm: LM) -> float:
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(lm.loss(Windows(COUNT).data[order][2 * BATCH : 3 * BATCH]))


def go_on(path: str) -> float:
    """The loss of the third batch with the weights of a checkpoint; Lightning starts an epoch's data over."""
    lm = LM(tensor="dtensor", count=COUNT)
    trainer = new_trainer(strategy_of(tensor_parallel_size=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the callback is not there that wrote the checkpoint
        trainer.validate(lm, ckpt_path=path, verbose=False)
    return loss_of_third_batch(lm)


def load_what(path: str, change: str) -> str:
    """The error on loading a checkpoint for a model that is another one in some way."""
    lm = LM(tensor="dtensor", count=COUNT)
    if change == "names":
        lm.model.extra = nn.Linear(2, 2)
    elif change == "shapes":
        lm.model.norm = nn.LayerNorm(3)
    elif change == "optimizers":
        lm.configure_optimizers = lambda: [new_optimizer(lm.model.blocks), new_optimizer(lm.model.head)]  # type: ignore[method-assign, assignment]
        lm.automatic_optimization = False
    elif change == "groups":
        lm.configure_optimizers = lambda: new_optimizer(lm.model.blocks)  # type: ignore[method-assign]
    elif change == "lenient":
        del lm.model.head
        lm.strict_loading = False
    trainer = new_trainer(strategy_of(tensor_parallel_size=2), max_epochs=2, limit_val_batches=0)
    with pytest.raises(Exception) as error:
        trainer.fit(lm, ckpt_path=path)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("form", FORMATS)
def test_checkpoints_of_another_model(run_ranks: Run, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "good.ckpt")
    run_ranks(save, 2, {form: path}, (1, 1, 2), "replicate", "dtensor")
    expected = {
        "names": [
            "CheckpointError: the checkpoint is of another model: ",
            "Missing key",
            "model.extra.weight",
        ],
        "shapes": [
            "CheckpointError: the checkpoint is of another model; shapes differ: ",
            "model.norm.weight: [16] instead of [3]",
        ],
        "optimizers": ["CheckpointError: the checkpoint holds 1 optimizers, the model has 2"],
        "groups": [
            "CheckpointError: the checkpoint's optimizer has groups of [15] parameters, AdamW has [10]"
        ],
        "lenient": ["groups of [15] parameters, AdamW has [14]"],  # the model's part went well
    }
    for change, parts in expected.items():
        for message in run_ranks(load_what, 2, path, change):
            assert all(part in message for part in parts), (change, message)


def keep_many(folder: str, form: str) -> tuple[list[str], bool, list[float]]:
    """What ModelCheckpoint leaves: the best two, the last one; and weights alone."""
    lm = LM(tensor="dtensor", count=COUNT)
    best = ModelCheckpoint(
        folder, filename="{step}", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=1
    )
    light = ModelCheckpoint(folder, filename="light", save_weights_only=True)
    strategy = strategy_of(tensor_parallel_size=2, save_distributed_checkpoint=form == "directory")
    trainer = new_trainer(strategy, callbacks=[best, light], enable_checkpointing=True)
    trainer.fit(lm)
    (metrics,) = trainer.validate(lm, ckpt_path=str(Path(folder, "light.ckpt")), verbose=False)
    names = sorted(path.name for path in Path(folder).iterdir())
    return (
        names,
        metrics["val"] == pytest.approx(float(trainer.validate(lm, verbose=False)[0]["val"])),
        lm.losses,
    )


@pytest.mark.parametrize("form", FORMATS)
def test_model_checkpoint(run_ranks: Run, tmp_path: Path, form: str) -> None:
    for names, equal, losses in run_ranks(keep_many, 2, str(tmp_path), form):
        best = sorted(sorted(range(1, 6), key=lambda step: losses[step - 1])[:2])
        assert names == ["last.ckpt", "light.ckpt", *(f"step={step}.ckpt" for step in best)]
        assert equal
    assert all(path.is_dir() == (form == "directory") for path in tmp_path.iterdir())


def fill_the_disk(path: str, form: str) -> tuple[str, list[str], float]:
    """Save once; then again, with other weights, where rank 0 cannot write more than a few bytes."""
    lm = LM(tensor="dtensor", count=BATCH)
    strategy = strategy_of(tensor_parallel_size=2, save_distributed_checkpoint=form == "directory")
    trainer = new_trainer(strategy, limit_val_batches=0)
    trainer.fit(lm)
    trainer.save_checkpoint(path)
    before = loss_of_third_batch(lm)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.zero_()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if dist.get_rank() == 0 else limits[0], limits[1]))
    try:
        with pytest.raises(CheckpointError) as error:
            trainer.save_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(error.value), [other.name for other in Path(path).parent.iterdir()], before


@pytest.mark.parametrize("form", FORMATS)
def test_a_full_disk(run_ranks: Run, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "last.ckpt")
    results = run_ranks(fill_the_disk, 2, path, form)
    for message, names, before in results:
        assert path in message
        assert "File too large" in message
        assert names == ["last.ckpt"]
        assert run_ranks(go_on, 2, path) == [pytest.approx(before, abs=1e-12)] * 2


def save_in_the_background(path: str) -> list[float]:
    lm = LM(tensor="dtensor", count=COUNT)
    strategy = strategy_of(
        tensor_parallel_size=2, data_parallel="shard", save_distributed_checkpoint=True, async_checkpoint=True
    )
    keep = ModelCheckpoint(path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    new_trainer(strategy, limit_val_batches=0, callbacks=[keep], enable_checkpointing=True).fit(lm)
    return lm.losses


def test_saves_in_the_background_hold_the_step_they_are_named_after(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(save_in_the_background, 4, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=2.ckpt", "step=4.ckpt"]
    losses, _ = one_process(epochs=1, count=COUNT)
    assert run_ranks(go_on, 2, str(tmp_path / "step=2.ckpt")) == [pytest.approx(losses[2], abs=1e-9)] * 2


def by_hand(path: str, sizes: Sizes, saves: bool) -> list[float]:
    """Three steps without Lightning, from the start or from a file."""
    ParallelContext().initialize(tensor_parallel_size=sizes[2], backend="gloo")
    lm = LM(tensor=kind_of(sizes, "hand"))
    lm.configure_model()
    optimizer = new_optimizer(lm.model)
    if not saves:
        saved = load_file(path)
        lm.model.load_state_dict(shard_model_state(saved["model"], lm.model))
        optimizer.load_state_dict(shard_optimizer_state(saved["optimizer"], optimizer))
    losses = []
    for batch in list(batches(COUNT, BATCH, 2))[0 if saves else 3 :][:3]:
        optimizer.zero_grad()
        loss = lm.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if saves:
        state = {
            "model": marked_state_dict(lm.model),
            "optimizer": sharded_optimizer_state(optimizer.state_dict(), optimizer),
        }
        full = gather_state(state)
        if full is not None:
            save_file(full, path)
    return losses


def test_state_without_lightning(run_ranks: Run, tmp_path: Path) -> None:
    path, (losses, _) = str(tmp_path / "state.ckpt"), one_process(epochs=2, count=COUNT)
    assert run_ranks(by_hand, 2, path, (1, 1, 2), True) == [pytest.approx(losses[:3], abs=1e-9)] * 2
    for tensor in (4, 1):
        for ours in run_ranks(by_hand, tensor, path, (1, 1, tensor), False):
            assert ours == pytest.approx(losses[3:6], abs=1e-9, rel=0)
