"""Random streams: who draws alike, who draws otherwise, and what a restart keeps."""

from __future__ import annotations

import hashlib
import io
import random as python_random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.loops.fit_loop import _FitLoop as FitLoop
from strategy_models import DATA, GLOBAL, SEQUENCE, TENSOR, Run, new_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset

import rlightning_groups.random as streams
from rlightning_groups import (
    ContextError,
    LayoutError,
    ModeError,
    ParallelContext,
    ParallelLayout,
    ShapeError,
    get_local_rank,
    get_world_size,
)
from rlightning_groups.collectives import broadcast_object, copy_to, reduce_from
from rlightning_groups.pytorch_lightning import HybridParallelStrategy
from rlightning_groups.random import (
    init_full_then_shard,
    preserved_rng,
    rng_state,
    seed_everything_by_layout,
    set_rng_state,
    sharded_rng,
    start_streams,
    step_rng,
)

Draws = tuple[float, float, float]


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(streams, "_seed", None)
    with preserved_rng():
        yield


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context of one rank in this process."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    ParallelContext().initialize()
    yield
    ParallelContext().destroy()


def begin(seed: int | None = 1, **options: Any) -> None:
    streams._seed = None  # workers are reused
    if seed is not None:
        seed_everything_by_layout(seed)
    ParallelContext().initialize(backend="gloo", **options)


def draws() -> Draws:
    """One draw of each default generator."""
    return torch.rand(()).item(), python_random.random(), float(numpy.random.random())


def mask(length: int = 64) -> list[float]:
    return F.dropout(torch.ones(length)).tolist()


def all_differ(values: list[Any]) -> bool:
    return all(a != b for a, b in combinations(values, 2))


# ------------------------------------------------------------------------------------------- who draws alike


def by_kind(options: dict[str, Any]) -> dict[str, Any]:
    begin(**options)
    found: dict[str, Any] = {"built": draws()}
    with step_rng(3):
        found["step"], found["host"] = mask(), python_random.random()
        with sharded_rng():
            found["sharded"] = mask()
        found["replicated"] = mask()
    with step_rng(4):
        found["next"] = mask()
    with step_rng(3, "validation"):
        found["validation"] = mask()
    found["outside"] = draws()
    start_streams(3)
    found["started"] = mask()
    found["kinds"] = draws()
    return found


@pytest.mark.parametrize("order", ["tp-sp-dp", "dp-tp-sp"])
def test_law_7_tensor_peers_draw_alike_and_others_do_not(run_ranks: Run, order: str) -> None:
    """Equal while the model is built; then other by data and sequence rank, and inside by tensor rank."""
    sizes = {"tensor_parallel_size": 2, "sequence_parallel_size": 2, "order": order}
    found = run_ranks(by_kind, 8, sizes)
    layout = ParallelLayout(8, 2, 2, 2, order)
    for name in ("built", "host", "outside"):
        assert all(rank[name] == found[0][name] for rank in found), name
    for name in ("step", "replicated", "next", "validation", "kinds"):
        for peers in layout.groups(TENSOR):
            assert found[peers[0]][name] == found[peers[1]][name], name
        assert all_differ([found[peers[0]][name] for peers in layout.groups(TENSOR)]), name
    assert all_differ([rank["sharded"] for rank in found])
    for kind in range(3):
        assert all_differ([found[peers[0]]["kinds"][kind] for peers in layout.groups(TENSOR)])
    for rank in found:
        assert rank["started"] == rank["step"]  # the same stream, for good
        assert all_differ([rank[name] for name in ("step", "replicated", "next", "validation", "sharded")])
    seed_everything_by_layout(1)
    assert found[0]["built"] == draws()
    assert found[0]["outside"][0] == draws()[0]  # nothing but these two was drawn outside


def test_masks_depend_on_the_coordinates_not_on_the_layout(run_ranks: Run) -> None:
    """Where activations are replicated, another tensor-parallel size draws the same masks."""
    per_size = {
        tp: run_ranks(by_kind, 4 if tp == 4 else 2 * tp, {"tensor_parallel_size": tp}) for tp in (1, 2)
    }
    first, second = per_size[1], per_size[2]
    assert [rank["step"] for rank in first] == [second[0]["step"], second[2]["step"]]
    assert first[0]["sharded"] == second[0]["sharded"]
    assert first[0]["sharded"] != second[1]["sharded"]


def with_an_extra_axis() -> dict[str, Any]:
    begin(tensor_parallel_size=2, extra_axes={"pipeline": 2}, order="tp-pipeline-sp-dp")
    found = {}
    with step_rng(0):
        found["default"] = mask()
        with sharded_rng():
            found["sharded"] = mask()
    with step_rng(0, axes=("data", "sequence", "pipeline")):
        found["by axis"] = mask()
    with step_rng(0, axes=("pipeline", "sequence", "data")):
        found["any order"] = mask()
    return found


def test_extra_axes(run_ranks: Run) -> None:
    found = run_ranks(with_an_extra_axis, 4)
    assert all(rank["default"] == found[0]["default"] for rank in found)
    assert all_differ([rank["sharded"] for rank in found])
    assert found[0]["by axis"] == found[1]["by axis"] == found[0]["default"]
    assert found[2]["by axis"] == found[3]["by axis"] != found[0]["by axis"]
    assert all(rank["any order"] == rank["by axis"] for rank in found)


def uneven_draws() -> list[list[float]]:
    begin(tensor_parallel_size=2)
    if get_local_rank(TENSOR):
        torch.rand(5), python_random.random()
    masks = []
    for step in range(2):
        with step_rng(step):
            masks.append(mask())
    return masks


def test_a_draw_on_one_rank_does_not_part_the_peers(run_ranks: Run) -> None:
    first, second = run_ranks(uneven_draws, 2)
    assert first == second
    assert all_differ(first)


# --------------------------------------------------------------------------------------------------- in place


def test_seed_is_a_hash(alone: None) -> None:
    """What the documentation promises of a seed, written out once more."""
    seed_everything_by_layout(7)
    word = hashlib.sha256(repr(("step", "training", 7, 5)).encode()).digest()
    with step_rng(5):
        assert torch.initial_seed() == int.from_bytes(word[:8], "little") >> 1
        drawn = torch.rand(4)
    torch.manual_seed(int.from_bytes(word[:8], "little") >> 1)
    assert torch.equal(torch.rand(4), drawn)


def test_the_outer_stream_is_untouched(alone: None) -> None:
    seed_everything_by_layout(5)
    plain = [draws() for _ in range(2)]
    seed_everything_by_layout(5)
    with step_rng(0):
        mask()
    found = [draws()]
    with preserved_rng():
        draws()
        start_streams()
        draws()
    assert [*found, draws()] == plain

    torch.manual_seed(5)
    torch.randint(2**63 - 1, ())  # what a use costs
    expected = torch.rand(8)
    for length in (0, 1, 1000):
        torch.manual_seed(5)
        with sharded_rng():
            torch.rand(length)
        assert torch.equal(torch.rand(8), expected)


def test_reentry_goes_on(alone: None) -> None:
    def three() -> list[list[float]]:
        torch.manual_seed(5)
        found = []
        for _ in range(2):
            with sharded_rng():
                found.append(mask())
        with sharded_rng(), sharded_rng():
            found.append(mask())
        return [*found, mask()]

    assert all_differ(three())
    assert three() == three()


def test_nested_use_leaves_both_streams_as_they_were(alone: None) -> None:
    torch.manual_seed(5)
    with sharded_rng():
        torch.rand(2)
        with sharded_rng():
            inner = mask()
        middle = torch.rand(4)
    outer = torch.rand(4)
    torch.manual_seed(5)
    with sharded_rng():
        torch.rand(2)
        torch.randint(2**63 - 1, ())
        assert torch.equal(torch.rand(4), middle)
        assert mask() != inner
    assert torch.equal(torch.rand(4), outer)


@pytest.mark.parametrize("enter", [sharded_rng, partial(step_rng, 2), preserved_rng])
def test_exceptions_inside(alone: None, enter: Callable[[], Any]) -> None:
    seed_everything_by_layout(5)
    with enter():
        mask()
    expected = draws()
    seed_everything_by_layout(5)
    with pytest.raises(IndexError), enter():
        mask(3) and [][0]
    assert draws() == expected


@pytest.mark.parametrize("seed", [-1, 2**64, True, 1.0, "1", None])
def test_wrong_seeds(seed: Any) -> None:
    with pytest.raises(ValueError, match="must be an int from 0"):
        seed_everything_by_layout(seed)


def test_errors(alone: None) -> None:
    with pytest.raises(ContextError, match="no seed was given"), step_rng(0):
        pass
    with pytest.raises(ContextError, match="no seed was given"):
        start_streams()
    seed_everything_by_layout(2**64 - 1)
    with pytest.raises(LayoutError, match=r"no axis 'tensr'; the layout has data, sequence, tensor"):
        start_streams(axes=("tensr",))
    with pytest.raises(ShapeError, match=r"no dim 2 in a tensor of shape \[4, 3\]"):
        init_full_then_shard(nn.init.normal_, (4, 3), 2)
    with pytest.raises(ModeError, match="never set up"):
        init_full_then_shard(nn.init.normal_, (4, 3), 0, "NONE")
    for state in ({}, None, {"version": 2}):
        with pytest.raises(ValueError, match="no state"):
            set_rng_state(state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda: sharded_rng().__enter__(),
        lambda: step_rng(0).__enter__(),
        start_streams,
        rng_state,
        partial(set_rng_state, {"version": 1}),
        partial(init_full_then_shard, nn.init.normal_, (2,), 0),
    ],
)
def test_without_a_context(call: Callable[[], Any]) -> None:
    seed_everything_by_layout(1)
    before = torch.random.get_rng_state()
    with pytest.raises(ContextError, match=r"initialize"):
        call()
    assert torch.equal(torch.random.get_rng_state(), before)


# ------------------------------------------------------------------------------------ activation checkpoints


class Layer(nn.Module):
    """A column- and row-parallel pair, with dropout where activations are cut and where they are not."""

    def __init__(self, kind: str, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.kind, self.masks = kind, []  # type: ignore[var-annotated]
        fill = partial(nn.init.normal_, std=0.3)
        double = torch.float64
        mesh = ParallelContext().device_mesh(TENSOR)
        up = init_full_then_shard(fill, (hidden, width), 0, dtype=double)
        down = init_full_then_shard(fill, (width, hidden), 1, dtype=double)
        self.up = nn.Parameter(DTensor.from_local(up, mesh, [Shard(0)]))
        self.down = nn.Parameter(DTensor.from_local(down, mesh, [Shard(1)]))

    def body(self, x: Tensor) -> Tensor:
        y = F.linear(copy_to(x, TENSOR), self.up.to_local()).tanh()
        with sharded_rng():
            y = F.dropout(y, 0.5, self.training)
        self.masks.append((y == 0).tolist())
        return F.dropout(reduce_from(F.linear(y, self.down.to_local()), TENSOR), 0.3, self.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "plain":
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.kind == "reentrant")


def recompute() -> dict[str, Any]:
    begin(tensor_parallel_size=2)
    found = {}
    for kind in ("plain", "reentrant", "other"):
        torch.manual_seed(3)
        layers = nn.Sequential(Layer(kind), Layer(kind))
        x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
        with step_rng(1):
            y = layers(x)
            after = torch.rand(()).item()
        y.square().sum().backward()
        grads = [x.grad.tolist(), *(p.grad.to_local().tolist() for p in layers.parameters())]
        found[kind] = (y.tolist(), grads, after, torch.rand(()).item())
        for layer in layers:
            assert all(masks == layer.masks[0] for masks in layer.masks)
            assert len(layer.masks) == (1 if kind == "plain" else 2)
        found[f"{kind} masks"] = layers[0].masks[0]
    return found


def test_activation_checkpoints_recompute_the_same_masks(run_ranks: Run) -> None:
    found = run_ranks(recompute, 2)
    for rank in found:
        assert rank["reentrant"] == rank["plain"]
        assert rank["other"] == rank["plain"]
    assert found[0]["plain"][0] == found[1]["plain"][0]  # replicated
    assert found[0]["plain"][1][0] == found[1]["plain"][1][0]
    assert found[0]["plain masks"] != found[1]["plain masks"]


@pytest.mark.parametrize("saved", ["mm", "mm randint"])
def test_selective_activation_checkpoints(alone: None, saved: str) -> None:
    """Whether the draw of the seed is made again or was saved."""
    masks = []

    def body(x: Tensor) -> Tensor:
        with sharded_rng():
            y = F.dropout(x)
        masks.append((y == 0).tolist())
        return (y @ torch.ones(6, 6)).tanh()

    def choose(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        save = str(op).split(".")[1] in saved.split()
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, choose)
    x = torch.ones(3, 6, requires_grad=True)
    checkpoint(body, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert len(masks) == 2
    assert masks[0] == masks[1]


# ------------------------------------------------------------------------------------------------------ state


def save_and_go_on(sizes: dict[str, int], started: bool) -> dict[str, Any]:
    begin(**sizes)
    if started:
        start_streams()
    draws()
    state = broadcast_object(rng_state(), 0, GLOBAL)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    expected = [draws() for _ in range(3)]
    seed_everything_by_layout(99)
    draws()
    set_rng_state(state)
    assert [draws() for _ in range(3)] == expected
    with step_rng(7):
        masks = mask()
    assert streams._seed == 1
    return {"state": state, "expected": expected, "mask": masks, "mine": ParallelContext().coordinates()}


def go_on(state: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    begin(seed=99, **sizes)
    set_rng_state(state)
    found = [draws() for _ in range(3)]
    set_rng_state(state)
    assert [draws() for _ in range(3)] == found
    with step_rng(7):
        masks = mask()
    return {"drawn": found, "mask": masks, "mine": ParallelContext().coordinates()}


def test_state_is_given_back_to_each_rank(run_ranks: Run) -> None:
    """On the same layout; on another by the documented rule."""
    sizes = {"tensor_parallel_size": 2}
    saved = run_ranks(save_and_go_on, 4, sizes, True)
    state = saved[0]["state"]
    assert state["state_of_rank"] == [0, 0, 1, 1]
    assert len(state["states"]) == 2
    assert saved[0]["expected"] != saved[2]["expected"]

    def of(data: int) -> Any:
        return saved[2 * data]["expected"]

    for rank in run_ranks(go_on, 4, state, {**sizes, "order": "dp-sp-tp"}):
        assert rank["drawn"] == of(rank["mine"]["data"])
    for rank in run_ranks(go_on, 2, state, {}):  # another tensor-parallel size
        assert rank["drawn"] == of(rank["mine"]["data"])
        assert rank["mask"] == saved[2 * rank["mine"]["data"]]["mask"]
    for rank in run_ranks(go_on, 8, state, {"tensor_parallel_size": 4}):
        assert rank["drawn"] == of(rank["mine"]["data"])
    other = run_ranks(go_on, 4, state, {"tensor_parallel_size": 2, "sequence_parallel_size": 2})
    assert other[0]["drawn"] == other[1]["drawn"] != other[2]["drawn"] == other[3]["drawn"]
    assert other[0]["drawn"] not in (of(0), of(1))


def test_one_shared_state_goes_on_anywhere(run_ranks: Run) -> None:
    saved = run_ranks(save_and_go_on, 4, {"tensor_parallel_size": 2}, False)
    state = saved[0]["state"]
    assert len(state["states"]) == 1
    for rank in run_ranks(go_on, 2, state, {"sequence_parallel_size": 2}):
        assert rank["drawn"] == saved[0]["expected"]
    (alone,) = run_ranks(go_on, 1, state, {})
    assert (alone["drawn"], alone["mask"]) == (saved[0]["expected"], saved[0]["mask"])


def accelerator_of(name: str) -> Any:
    generator = torch.Generator()
    return SimpleNamespace(
        __name__=name,
        generator=generator,
        get_rng_state=generator.get_state,
        set_rng_state=generator.set_state,
        manual_seed=generator.manual_seed,
    )


def test_the_accelerators_generator_follows(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in: there is no accelerator where this runs."""
    device = accelerator_of("torch.first")

    def drawn() -> float:
        return torch.rand((), generator=device.generator).item()

    monkeypatch.setattr(streams, "_accelerator", lambda: device)
    seed_everything_by_layout(1)
    device.manual_seed(1)
    expected = drawn(), drawn()
    device.manual_seed(1)
    found = [drawn()]
    with step_rng(0):
        inside = drawn()
        with sharded_rng():
            assert drawn() != inside
    with preserved_rng():
        drawn()
    assert (*found, drawn()) == expected
    state = rng_state()
    assert state is not None
    after = drawn()
    set_rng_state(state)
    assert drawn() == after
    device = accelerator_of("torch.second")
    reseeded = []
    for _ in range(2):
        set_rng_state(state)
        reseeded.append(drawn())
    assert reseeded[0] == reseeded[1] != after

    seeded = []
    fake = SimpleNamespace(manual_seed=lambda seed, mesh: seeded.append((seed, mesh.device_type)))
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor._random", fake)
    with step_rng(0):
        assert seeded == []  # a mesh on the CPU has no tracker
        monkeypatch.setattr(ParallelContext, "device_mesh", lambda *_: SimpleNamespace(device_type="first"))
    with step_rng(0):
        assert seeded == [(torch.initial_seed(), "first")]


# --------------------------------------------------------------------------------------------- initialisation


def initialise(sizes: dict[str, int]) -> dict[str, Any]:
    begin(**sizes)
    fills = {"xavier": (nn.init.xavier_uniform_, (8, 6), 0), "normal": (nn.init.normal_, (3, 7), -1)}
    found: dict[str, Any] = {"group": ParallelContext().get_ranks_in_group(TENSOR)}
    for name, (fill, shape, dim) in fills.items():
        weight = init_full_then_shard(fill, shape, dim)
        assert weight.is_contiguous()
        assert weight.untyped_storage().nbytes() == 4 * weight.numel()
        assert not weight.requires_grad
        found[name] = weight
    assert init_full_then_shard(nn.init.zeros_, (5,), 0, GLOBAL, dtype=torch.float64).dtype == torch.float64
    found["after"] = torch.rand(()).item()
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_law_7_a_sharded_weight_is_a_slice_of_the_full_one(run_ranks: Run, tp: int) -> None:
    found = run_ranks(initialise, 4, {"tensor_parallel_size": tp})
    seed_everything_by_layout(1)
    xavier, normal = nn.init.xavier_uniform_(torch.empty(8, 6)), nn.init.normal_(torch.empty(3, 7))
    after = torch.rand(()).item()
    for rank in found:
        assert rank["after"] == after
        members = [found[peer] for peer in rank["group"]]
        assert torch.equal(torch.cat([member["xavier"] for member in members], 0), xavier)
        assert torch.equal(torch.cat([member["normal"] for member in members], 1), normal)
    sizes = {1: [7], 2: [4, 3], 4: [2, 2, 2, 1]}[tp]
    assert [found[peer]["normal"].shape[1] for peer in found[0]["group"]] == sizes


# ------------------------------------------------------------------------------------------- DTensor on a CPU


@contextmanager
def dtensor_may_warn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*DTensor random operators.*")
        yield


def dtensor_draws() -> dict[str, Any]:
    begin(tensor_parallel_size=2)
    mesh = ParallelContext().device_mesh(TENSOR)
    ones = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    uneven = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    found: dict[str, Any] = {}
    with dtensor_may_warn():
        with step_rng(0):
            found["outside"] = F.dropout(ones).to_local().tolist()
        with step_rng(0):
            with sharded_rng():
                found["inside"] = F.dropout(ones).to_local().tolist()
                F.dropout(uneven)
            found["after inside"] = mask()
            found["replicated"] = F.dropout(ones.redistribute(placements=[Replicate()])).to_local().tolist()
            F.dropout(uneven)
            found["after uneven"] = torch.random.get_rng_state().tolist()
        with step_rng(1):
            found["next step"] = mask()
        torch.manual_seed(0)
        full = nn.init.normal_(torch.empty(6, 4))
        torch.manual_seed(0)
        own = init_full_then_shard(nn.init.normal_, (6, 4), 0)
    found["weight"] = torch.equal(DTensor.from_local(own, mesh, [Shard(0)]).full_tensor(), full)
    return found


def test_dtensor_agrees_inside_sharded_rng(run_ranks: Run) -> None:
    """On a CPU, torch draws each shard from the default generator as it is; on an accelerator, by offsets."""
    first, second = run_ranks(dtensor_draws, 2)
    assert first["outside"] == second["outside"]  # torch's own limit: shards of one size drop the same
    assert first["inside"] != second["inside"]
    assert first["after inside"] == second["after inside"]
    assert first["replicated"] == second["replicated"]
    assert first["after uneven"] != second["after uneven"]  # and of unequal sizes part the peers,
    assert first["next step"] == second["next step"]  # until the next step
    assert first["weight"]
    assert second["weight"]


# -------------------------------------------------------------------------------------------- in the Trainer


# At resuming, an older Lightning makes a dataloader's iterator once more: one more draw outside the steps.
AUGMENT = hasattr(FitLoop, "is_resuming")


class Noisy(Dataset[Tensor]):
    """Augmented in the main process by each of the default generators."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((6,), index / 8, dtype=torch.float64) + AUGMENT * sum(draws()) / 8


class Net(LightningModule):
    """Two checkpointed layers with both kinds of dropout; keeps what every rank saw and lost."""

    def __init__(self, draws_in_validation: bool = True) -> None:
        super().__init__()
        self.draws_in_validation = draws_in_validation
        self.layers: nn.Sequential | None = None
        self.losses: list[float] = []
        self.seen: list[list[float]] = []
        self.validated: list[float] = []

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = nn.Sequential(Layer("reentrant"), Layer("other"))

    def forward(self, x: Tensor) -> Tensor:
        assert self.layers is not None
        return self.layers(x.requires_grad_())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(batch.flatten().tolist())
        loss = (self(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        if self.draws_in_validation:
            self.validated.append((batch.mean() + torch.rand(())).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Noisy(), batch_size=4 // get_world_size(DATA), shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Noisy(), batch_size=4)


def fitted(sizes: dict[str, int], epochs: int = 2, path: str | None = None, **options: Any) -> Net:
    net = Net()
    trainer = new_trainer(HybridParallelStrategy(**sizes), max_epochs=epochs, **options)
    trainer.fit(net, ckpt_path=path)
    if path is None and epochs == 1:
        trainer.save_checkpoint("after.ckpt")
    return net


def fit_and_resume(directory: str, sizes: dict[str, int]) -> dict[str, Any]:
    def start() -> None:
        torch.manual_seed(11), python_random.seed(11), numpy.random.seed(11)

    start()
    whole = fitted(sizes)
    start()
    half = fitted(sizes, 1)
    trainer_path = str(Path(directory) / "after.ckpt")
    if get_local_rank(GLOBAL) == 0:
        Path("after.ckpt").replace(trainer_path)
    ParallelContext().destroy()
    python_random.random()
    torch.manual_seed(5)  # another seed: the checkpoint's counts
    rest = fitted(sizes, 2, trainer_path)
    return {
        "whole": (whole.losses, whole.seen, whole.validated),
        "parts": (half.losses + rest.losses, half.seen + rest.seen, half.validated + rest.validated),
        "masks": [layer.masks for layer in whole.layers or ()],
    }


def test_law_7_a_resumed_fit_draws_the_same(run_ranks: Run, tmp_path: Path) -> None:
    """Dropout masks, augmentation in the main process and shuffling, by the hooks above."""
    found = run_ranks(fit_and_resume, 4, str(tmp_path), {"tensor_parallel_size": 2})
    for rank in found:
        assert len(rank["whole"][0]) == 4
        assert rank["parts"] == rank["whole"]
        assert all_differ(rank["whole"][0])
    assert found[0]["whole"] == found[1]["whole"]  # tensor peers: same samples, same losses
    assert found[2]["whole"] == found[3]["whole"]
    assert found[0]["whole"][0] != found[2]["whole"][0]
    assert found[0]["masks"] != found[1]["masks"]
    checkpoint = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert len(checkpoint["rlightning_groups_rng"]["states"]) == 1  # the same for every layout


def fit_after(options: dict[str, Any]) -> dict[str, Any]:
    seed_everything_by_layout(2)
    net = fitted({"tensor_parallel_size": 2, "sequence_parallel_size": 2}, 2, **options)
    return {"losses": net.losses, "seen": net.seen, "place": get_local_rank(SEQUENCE)}


def test_the_sanity_check_changes_nothing(run_ranks: Run) -> None:
    """And law 1: sequence peers, whose masks differ, see the same augmented samples."""
    without, with_check = (
        run_ranks(fit_after, 4, {"num_sanity_val_steps": steps, "check_val_every_n_epoch": 3})
        for steps in (0, 2)
    )
    assert with_check == without
    assert all(rank["seen"] == without[0]["seen"] for rank in without)
    by_sequence = [next(r["losses"] for r in without if r["place"] == place) for place in (0, 1)]
    assert all_differ(by_sequence)
