"""The strategy under both Trainers, on real ranks."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from strategy_models import (
    BATCH,
    DATA,
    GLOBAL,
    LM,
    NAMESPACES,
    SEQUENCE,
    TENSOR,
    TRAIN,
    AloneLM,
    Run,
    Windows,
    line,
    loader,
    new_trainer,
    new_transformer,
    one_process,
    plain_attention,
    started,
    strategy_of,
)
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import DataLoader, Dataset

import rlightning_groups
from rlightning_groups import (
    ContextError,
    GroupsError,
    LayoutError,
    get_group,
    get_local_rank,
    get_ranks_in_group,
    get_world_size,
    is_initialized,
)
from rlightning_groups.checkpoint import shard_model_state
from rlightning_groups.sharding import is_sharded, mark_sharded

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
both = pytest.mark.parametrize("namespace", NAMESPACES)


# --------------------------------------------------------------------------------- names, classes, arguments


@both
def test_registry(namespace: str) -> None:
    ours, registry = type(strategy_of(namespace)), import_module(f"{namespace}.strategies").StrategyRegistry
    assert registry["hybrid_parallel"]["strategy"] is ours
    assert registry["ddp"]["strategy"] is import_module(f"{namespace}.strategies").DDPStrategy


@both
def test_the_other_namespaces_trainer_refuses(namespace: str) -> None:
    (other,) = set(NAMESPACES) - {namespace}
    with pytest.raises(Exception, match=r"strateg"):
        new_trainer(strategy_of(other), namespace)


def test_the_lazy_name_is_pytorch_lightnings() -> None:
    assert rlightning_groups.HybridParallelStrategy is type(strategy_of("pytorch_lightning"))


@both
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"sequence_parallel_size": True}, "sequence_parallel_size"),
        ({"tensor_parallel_size": "x"}, "tensor_parallel_size"),
        ({"data_parallel_size": -1}, "data_parallel_size"),
        ({"data_parallel_size": "big"}, "data_parallel_size='big'"),
        ({"order": "tp-dp"}, "order"),
        ({"order": "tp-tp-dp"}, "order"),
    ],
    ids=str,
)
def test_wrong_arguments(namespace: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        strategy_of(namespace, **arguments)


# ------------------------------------------------------------------------------------------------ life cycle


def fit_and_log(namespace: str, by_name: bool) -> dict[str, Any]:
    model, strategy = line(namespace), strategy_of(namespace)
    strategy = "hybrid_parallel" if by_name else strategy
    trainer = new_trainer(strategy, namespace, max_epochs=2)
    trainer.fit(model, loader(4), loader(2))
    return {
        "strategy": type(trainer.strategy).__module__,
        "steps": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weight": model.layer.weight.item(),
        "size": get_world_size(DATA),
    }


@both
@pytest.mark.parametrize("by_name", [False, True])
def test_fit(run_ranks: Run, namespace: str, by_name: bool) -> None:
    first, second = run_ranks(fit_and_log, 2, namespace, by_name)
    home = {"pytorch_lightning": "pytorch_lightning", "lightning.pytorch": "lightning"}[namespace]
    assert first["strategy"] == f"rlightning_groups.{home}"
    assert (first["steps"], first["size"]) == (4, 2)
    assert set(first["metrics"]) == {"loss", "loss_step", "loss_epoch", "val"}
    assert first == second


def life_cycle(namespace: str) -> dict[str, Any]:
    seen: dict[str, tuple[list[int], bool]] = {}

    def look(where: str) -> None:
        seen[where] = get_ranks_in_group(TENSOR), is_initialized(TRAIN)

    class Looks:
        def setup(self, stage: str) -> None:
            look("setup")

        def configure_model(self) -> None:
            look("configure_model")

        def on_fit_start(self) -> None:
            look("on_fit_start")

        def on_fit_end(self) -> None:
            look("on_fit_end")

        def teardown(self, stage: str) -> None:
            look("teardown")

    strategy = strategy_of(namespace, tensor_parallel_size=2)
    with pytest.raises(rlightning_groups.ContextError):
        _ = strategy.layout
    new_trainer(strategy, namespace).fit(line(namespace, Looks), loader(2))
    look("afterwards")
    assert strategy.layout.tensor_parallel_size == 2
    return seen


@both
def test_groups_are_there_in_every_hook(run_ranks: Run, namespace: str) -> None:
    stages = ["setup", "configure_model", "on_fit_start", "on_fit_end", "teardown", "afterwards"]
    for rank, seen in enumerate(run_ranks(life_cycle, 4, namespace)):
        ranks = [0, 1] if rank < 2 else [2, 3]
        assert seen == dict.fromkeys(stages, (ranks, True))


Counts = tuple[int, int, int]


def resources(expected: Counts | None = None) -> Counts:
    """Groups, file descriptors and threads; those take a moment to end, so expected counts are waited for."""
    end = time.monotonic() + 5
    while True:
        gc.collect()
        fds, threads = (sum(1 for _ in Path(f"/proc/self/{kind}").iterdir()) for kind in ("fd", "task"))
        counts = len(c10d._world.pg_map), fds, threads
        if expected is None or grown(expected, counts) == [0, 0, 0] or time.monotonic() > end:
            return counts
        time.sleep(0.05)


def grown(before: Counts, after: Counts) -> list[int]:
    """By how much; what an earlier test left may end meanwhile, which is no leak."""
    return [max(0, new - old) for old, new in zip(before, after, strict=True)]


def many_runs() -> tuple[list[Counts], list[str], list[int]]:
    """Resources after each of several runs, the warnings of the changes of sizes, and the sizes."""

    def run(tensor: int, lm_tensor: str = "dtensor") -> None:
        lm = LM(tensor=lm_tensor, count=BATCH)
        trainer = new_trainer(strategy_of(tensor_parallel_size=tensor))
        trainer.fit(lm)
        trainer.validate(lm, verbose=False)
        sizes.append(get_world_size(TENSOR))

    sizes: list[int] = []
    counts, told = [], []
    run(2)
    counts.append(resources())
    run(2)
    trainer, model = new_trainer(strategy_of(tensor_parallel_size=2)), line()
    trainer.fit(model, loader(4), loader(4))
    trainer.validate(model, loader(4), verbose=False)
    trainer.test(model, loader(4), verbose=False)
    trainer.predict(model, loader(4))
    counts.append(resources(counts[0]))
    for tensor in (4, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(tensor)
        told += [str(w.message) for w in caught if "made anew" in str(w.message)]
    counts.append(resources(counts[0]))
    return counts, told, sizes


def test_many_runs_in_one_process(run_ranks: Run) -> None:
    results = run_ranks(many_runs, 4, lazy=False)
    for counts, _, sizes in results:
        assert {groups for groups, _, _ in counts} == {counts[0][0]}
        assert [grown(counts[0], later) for later in counts[1:]] == [[0, 0, 0]] * 2
        assert sizes == [2, 2, 4, 2]
    told = results[0][1]
    assert len(told) == 2
    assert "tensor_parallel_size=4" in told[0]
    assert "tensor_parallel_size=2" in told[1]
    assert all(not told for _, told, _ in results[1:])


def fail_then_fit(namespace: str) -> tuple[str, int, int]:
    class Fails:
        failed = False

        def configure_model(self) -> None:
            if not self.failed:
                self.failed = True
                raise RuntimeError("no model today")

    model = line(namespace, Fails)
    trainer = new_trainer(strategy_of(namespace, tensor_parallel_size=2), namespace)
    with pytest.raises(RuntimeError, match="no model today") as error:
        trainer.fit(model, loader(2))
    trainer.fit(model, loader(2))
    second = new_trainer(strategy_of(namespace, tensor_parallel_size=2), namespace)
    second.fit(line(namespace), loader(2))
    return str(error.value), trainer.global_step, second.global_step


@both
def test_a_fit_that_failed_can_be_repeated(run_ranks: Run, namespace: str) -> None:
    assert run_ranks(fail_then_fit, 2, namespace) == [("no model today", 2, 2)] * 2


def fail_in_a_step(tensor: str) -> tuple[str, int]:
    """How an error of the model's own is told, and the steps of the fit after it."""

    class Fails(LM):
        fails = True

        def training_step(self, window: Tensor, index: int) -> Tensor:
            loss = super().training_step(window, index)
            if self.fails:
                raise OverflowError("too much")
            return loss

    model = Fails(tensor=tensor, count=BATCH)
    trainer = new_trainer(strategy_of(tensor_parallel_size=2), limit_val_batches=0)
    told = ""
    try:
        trainer.fit(model)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    model.fails = False
    trainer.fit(model)
    return told, trainer.global_step


@pytest.mark.parametrize("tensor", ["dtensor", "hand"])
def test_a_models_own_error_is_what_the_user_sees(run_ranks: Run, tensor: str) -> None:
    assert run_ranks(fail_in_a_step, 4, tensor) == [("OverflowError: too much", 1)] * 4


# ------------------------------------------------------------------------------------------------- refusals


def fit_with(tensor: int) -> tuple[str, str, float]:
    """The error that a fit ends with, and how long it took."""
    begin = time.monotonic()
    with pytest.raises(GroupsError) as error:
        new_trainer(strategy_of(tensor_parallel_size=tensor)).fit(line(), loader(4))
    return error.typename, str(error.value), time.monotonic() - begin


def test_sizes_that_do_not_divide(run_ranks: Run) -> None:
    for kind, message, seconds in run_ranks(fit_with, 4, 3):
        assert kind == "LayoutError"
        assert "tensor_parallel_size=3 does not divide world_size=4; sizes that do: 1, 2, 4" in message
        assert seconds < 10


def test_ranks_that_ask_for_different_sizes(run_ranks: Run) -> None:
    for kind, message, seconds in run_ranks(fit_with, 4, per_rank=[1, 1, 2, 1]):
        assert kind == "AgreementError"
        assert "tensor_parallel_size: 1 on ranks 0-1,3; 2 on rank 2" in message
        assert seconds < 10


# --------------------------------------------------------------------------------------------------- weights


class Shards(nn.Module):
    """A plain weight that is another one on every tensor rank, beside a buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))
        self.register_buffer("count", torch.full((1,), value))
        for tensor in (self.weight, self.count):
            mark_sharded(tensor, 0)


def fill(lm: LM) -> None:
    """Shards that say which tensor rank they are of; what tensor ranks hold in common stays equal."""
    value = 0.01 * (1 + get_local_rank(TENSOR))
    with torch.no_grad():
        for parameter in lm.parameters():
            if isinstance(parameter, DTensor):
                parameter._local_tensor.fill_(value)
            elif is_sharded(parameter):
                parameter.fill_(value)


def local_bytes(module: nn.Module) -> dict[str, bytes]:
    states = module.state_dict().items()
    return {name: (t._local_tensor if isinstance(t, DTensor) else t).numpy().tobytes() for name, t in states}


def validate_only(tensor: str, namespace: str = "pytorch_lightning") -> bool:
    """Whether a validation without a fit left the weights of this rank as they were."""
    if tensor == "shards":
        model: Any = line(namespace)
        model.shards = Shards(float(dist_rank() % 2))
        data: Any = loader(4)
    else:
        model, data = LM(tensor=tensor), None
    trainer = new_trainer(strategy_of(namespace, tensor_parallel_size=2), namespace)
    before: dict[str, bytes] = {}
    configure = getattr(model, "configure_model", lambda: None)

    def configure_model() -> None:
        configure()
        if tensor != "shards":
            fill(model)
        before.update(local_bytes(model))

    model.configure_model = configure_model
    trainer.validate(model, data, verbose=False)
    assert len(before) > 3
    return local_bytes(model) == before


def dist_rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize("tensor", ["dtensor", "hand"])
def test_validation_leaves_shards_alone(run_ranks: Run, tensor: str) -> None:
    assert run_ranks(validate_only, 4, tensor) == [True] * 4


@both
def test_validation_leaves_plain_shards_alone(run_ranks: Run, namespace: str) -> None:
    assert run_ranks(validate_only, 4, "shards", namespace) == [True] * 4


def replicas() -> list[float]:
    """Weights and buffers after the start of a fit, each rank having begun with its own number."""

    class Reads:
        def configure_model(self) -> None:
            self.shards = Shards(float(dist_rank()))

        def on_fit_start(self) -> None:
            values.extend([*self.shards.weight.tolist(), self.shards.count.item()])

    values: list[float] = []
    strategy = strategy_of(tensor_parallel_size=2, find_unused_parameters=True)
    new_trainer(strategy).fit(line(mixin=Reads), loader(2))
    return values


def test_a_fit_copies_weights_among_replicas_only(run_ranks: Run) -> None:
    assert run_ranks(replicas, 4) == [[0.0] * 4, [1.0] * 4, [0.0] * 4, [1.0] * 4]


# --------------------------------------------------------------------------------------------------- samples


def see_samples(sizes: dict[str, int]) -> tuple[int, dict[str, list[list[float]]]]:
    model = line()
    trainer = new_trainer(strategy_of(**sizes), max_epochs=2)
    trainer.fit(model, loader(8, shuffle=True), loader(8))
    trainer.predict(model, loader(8))
    return get_local_rank(DATA), model.seen


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        {"sequence_parallel_size": 2},
        {"tensor_parallel_size": 2, "order": "dp-tp-sp"},
    ],
    ids=str,
)
def test_each_sample_is_seen_once(run_ranks: Run, sizes: dict[str, Any]) -> None:
    results = run_ranks(see_samples, 8, sizes)
    by_data_rank: dict[int, dict[str, list[list[float]]]] = {}
    for data_rank, seen in results:
        assert by_data_rank.setdefault(data_rank, seen) == seen  # peers see the same, in the same order
    assert sorted(by_data_rank) == [0, 1, 2, 3]
    for stage in ("train", "val"):
        for epoch in range(2):
            dealt = [by_data_rank[rank][stage][epoch] for rank in range(4)]
            assert sorted(itertools.chain(*dealt)) == list(range(8))
            if stage == "val":
                assert dealt == [[rank, rank + 4] for rank in range(4)]
    trained = [[by_data_rank[rank]["train"][epoch] for rank in range(4)] for epoch in range(2)]
    assert trained[0] != trained[1]  # shuffled, and anew for each epoch
    predicted = [by_data_rank[rank]["predict"][-1] for rank in range(4)]
    assert sorted(itertools.chain(*predicted)) == list(range(8))


class Draws(Dataset[Tensor]):
    """Each sample is what the worker's four generators give."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        drawn = [torch.rand(()).item(), random.random(), numpy.random.rand()]
        return torch.tensor([torch.initial_seed() % 2**31, *drawn], dtype=torch.float64)


def draw(start: int, seed: int | None, sizes: dict[str, int]) -> tuple[int, list[list[float]]]:
    """What the workers of this rank drew in two epochs."""
    drawn: list[list[float]] = []

    class Keeps:
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            drawn.extend(batch.tolist())
            return self.layer(batch[:, 1:2].float()).mean()

    if seed is None:
        torch.manual_seed(start)
    else:
        import_module("pytorch_lightning").seed_everything(seed, workers=True, verbose=False)
    model = line(mixin=Keeps)
    trainer = new_trainer(strategy_of(**sizes), max_epochs=2)
    trainer.fit(model, DataLoader(Draws(), num_workers=1, shuffle=True))
    return get_local_rank(DATA), drawn


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}], ids=str)
def test_workers_draw_alike_among_peers_only(run_ranks: Run, seed: int | None, sizes: dict[str, int]) -> None:
    results = run_ranks(draw, 4, seed, sizes, per_rank=[11, 12, 13, 14])
    by_data_rank: dict[int, list[list[float]]] = {}
    for data_rank, drawn in results:
        assert len(drawn) == 8  # four samples in each of two epochs
        assert by_data_rank.setdefault(data_rank, drawn) == drawn
    first, second = by_data_rank[0], by_data_rank[1]
    for column in range(4):
        ours, theirs = ({row[column] for row in rows} for rows in (first, second))
        assert not ours & theirs, f"generator {column} draws the same for different samples"


# ----------------------------------------------------------------------------------------------------- seeds


def start_unseeded(start: int, built: str) -> dict[str, Any]:
    """What each rank begins with where nobody set a seed.

    ``built`` says where the model draws its weights: in ``configure_model``, or ``before`` the fit.
    """
    for generator in (torch.manual_seed, random.seed, numpy.random.seed):
        generator(start)
    found: dict[str, Any] = {}

    class Built:
        def configure_model(self) -> None:
            found["draws"] = [torch.rand(()).item(), random.random(), numpy.random.rand()]
            if built == "configure_model":
                self.layer = nn.Linear(1, 1)

        def on_fit_start(self) -> None:
            found["weights"] = [self.layer.weight.item(), self.layer.bias.item()]

    new_trainer(strategy_of(tensor_parallel_size=2)).fit(line(mixin=Built), loader(2))
    return found


def test_without_a_seed_all_start_from_rank_0s(run_ranks: Run) -> None:
    results = run_ranks(start_unseeded, 4, "configure_model", per_rank=[21, 22, 23, 24])
    assert results == [results[0]] * 4
    assert len(set(results[0]["draws"])) == 3


def start_unseeded_lm(start: int, tensor: str) -> list[float]:
    torch.manual_seed(start)
    lm = LM(tensor=tensor, count=BATCH)
    lm.model.embedding.reset_parameters()  # the one weight that this rank draws by itself
    lm.on_fit_start = lambda: found.extend(lm.model.embedding.weight[0].tolist())  # type: ignore[method-assign]
    found: list[float] = []
    new_trainer(strategy_of(tensor_parallel_size=2)).fit(lm)
    return found


def test_replicated_weights_drawn_before_the_fit_without_a_seed(run_ranks: Run) -> None:
    """Tensor-parallel peers must hold the same embedding, or the model is no model."""
    results = run_ranks(start_unseeded_lm, 4, "dtensor", per_rank=[21, 22, 23, 24])
    assert results == [results[0]] * 4


def keep_generators() -> bool:
    """Whether the start left generators alone that were seeded alike."""
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    torch.rand(5)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    started(tensor_parallel_size=2)
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    return bool(torch.equal(before[0], after[0])) and before[1:] == after[1:]


def test_equal_seeds_are_left_alone(run_ranks: Run) -> None:
    assert run_ranks(keep_generators, 4) == [True] * 4


def seed_on_some_ranks(seeded: bool) -> float:
    if seeded:
        import_module("pytorch_lightning").seed_everything(4, verbose=False)
    else:
        torch.manual_seed(5 + dist_rank())
    started(tensor_parallel_size=2)
    return torch.rand(()).item()


def test_a_seed_on_some_ranks_does_not_hang(run_ranks: Run) -> None:
    results = run_ranks(seed_on_some_ranks, 4, per_rank=[True, False, False, False], timeout=8)
    assert results == [results[0]] * 4


# ----------------------------------------------------------------------------------------------- collectives


def collectives() -> dict[str, Any]:
    strategy = started(tensor_parallel_size=2)
    rank = dist_rank()
    tensor_group, train_group = get_group(TENSOR), get_group(TRAIN)
    value = torch.tensor([float(10**rank)])
    reduced = {
        "mean": strategy.reduce(value),
        "default sum": strategy.reduce(value, reduce_op="sum"),
        "none": strategy.reduce(value, reduce_op=None),
        "max": strategy.reduce(value, reduce_op="max"),
        "tensor": strategy.reduce(value, group=tensor_group, reduce_op="sum"),
        "world": strategy.reduce(value, group=get_group(GLOBAL), reduce_op=dist.ReduceOp.SUM),
        "int mean": strategy.reduce(torch.tensor([rank]), group=get_group(GLOBAL)),
        "int sum": strategy.reduce(torch.tensor([rank]), reduce_op="sum"),
    }
    assert value.item() == 10**rank  # the argument is left as it is
    with pytest.raises(ValueError, match="median"):
        strategy.reduce(value, reduce_op="median")
    strategy.barrier("here")
    return {
        **{name: (one.item(), one.dtype.is_floating_point) for name, one in reduced.items()},
        "object": strategy.reduce("a word"),
        "broadcast": [strategy.broadcast({"from": rank}), strategy.broadcast({"from": rank}, src=2)],
        "decisions": [
            strategy.reduce_boolean_decision(True),
            strategy.reduce_boolean_decision(rank != 2),
            strategy.reduce_boolean_decision(rank == 2, all=False),
            strategy.reduce_boolean_decision(False, all=False),
        ],
        "gathered": [
            strategy.all_gather(value).flatten().tolist(),
            strategy.all_gather(value, group=tensor_group).flatten().tolist(),
            strategy.all_gather(value, group=train_group).flatten().tolist(),
        ],
    }


def test_collectives(run_ranks: Run) -> None:
    """TENSOR_PARALLEL is 01 23, TRAIN_DATA_PARALLEL is 02 13."""
    for rank, got in enumerate(run_ranks(collectives, 4)):
        train, tensor = [[0, 2], [1, 3]][rank % 2], [[0, 1], [2, 3]][rank // 2]
        powers = [10.0**r for r in train]
        assert got["mean"] == (sum(powers) / 2, True)
        assert got["default sum"] == got["none"] == (sum(powers), True)
        assert got["max"] == (max(powers), True)
        assert got["tensor"] == (sum(10.0**r for r in tensor), True)
        assert got["world"] == (1111.0, True)
        assert got["int mean"] == (1.5, True)
        assert got["int sum"] == (sum(train), False)
        assert got["object"] == "a word"
        assert got["broadcast"] == [{"from": 0}, {"from": 2}]
        assert got["decisions"] == [True, False, True, False]
        assert got["gathered"] == [powers, [10.0**r for r in tensor], powers]


def gather_with_gradients(mode: str) -> tuple[list[float], list[float]]:
    """What is gathered, and the gradient of a loss that weighs part j on rank i by 10*i + j + 1."""
    strategy = started(tensor_parallel_size=2)
    rank = get_local_rank(mode)
    x = torch.tensor([dist_rank() + 1.0], requires_grad=True)
    gathered = strategy.all_gather(x, group=get_group(mode), sync_grads=True)
    weights = torch.tensor([10.0 * rank + part + 1 for part in range(get_world_size(mode))])
    (gathered.flatten() * weights).sum().backward()
    assert x.grad is not None
    return gathered.flatten().tolist(), x.grad.tolist()


@pytest.mark.parametrize("mode", [TENSOR, TRAIN])
def test_gradients_through_all_gather(run_ranks: Run, mode: str) -> None:
    groups = {TENSOR: [[0, 1], [2, 3]], TRAIN: [[0, 2], [1, 3]]}[mode]
    for rank, (gathered, grad) in enumerate(run_ranks(gather_with_gradients, 4, mode)):
        (group,) = [group for group in groups if rank in group]
        assert gathered == [r + 1.0 for r in group]
        assert grad == [sum(10.0 * i + group.index(rank) + 1 for i in range(len(group)))]


# --------------------------------------------------------------------------------------------------- metrics


def log_metrics(sizes: dict[str, int], namespace: str) -> dict[str, float]:
    """What is logged of samples 0..5 by two data-parallel ranks with batches of two and one."""

    class Logs:
        def validation_step(self, batch: Tensor, index: int) -> None:
            tokens = batch.numel() * 4 / get_world_size(SEQUENCE)  # four to a sample
            samples = float(len(batch))
            self.log("mean", batch.mean(), sync_dist=True)
            self.log("tokens", torch.tensor(tokens), reduce_fx="sum", sync_dist=True)
            group = get_group(DATA)
            self.log("samples", torch.tensor(samples), reduce_fx="sum", sync_dist=True, sync_dist_group=group)
            self.log("largest", batch.max(), reduce_fx="max", sync_dist=True)

    model = line(namespace, Logs)
    trainer = new_trainer(strategy_of(namespace, **sizes), namespace)
    trainer.validate(model, loader(6, batch_size=2), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@both
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}], ids=str)
def test_logged_sums_and_means(run_ranks: Run, sizes: dict[str, int], namespace: str) -> None:
    expected = {"mean": 2.5, "tokens": 24.0, "samples": 6.0, "largest": 5.0}
    assert run_ranks(log_metrics, 4, sizes, namespace) == [pytest.approx(expected)] * 4


def log_uneven() -> float:
    """The mean over batches of three samples on data rank 0 and of one on data rank 1."""

    class Logs:
        def validation_step(self, batch: Tensor, index: int) -> None:
            size = 3 if get_local_rank(DATA) == 0 else 1
            value = torch.tensor(1.0 if size == 3 else 5.0)
            self.log("mean", value, batch_size=size, sync_dist=True)

    model = line(mixin=Logs)
    trainer = new_trainer(strategy_of(tensor_parallel_size=2))
    trainer.validate(model, loader(2), verbose=False)
    return float(trainer.callback_metrics["mean"])


def test_logged_means_are_weighted(run_ranks: Run) -> None:
    assert run_ranks(log_uneven, 4) == [pytest.approx(2.0)] * 4  # (3 * 1 + 1 * 5) / 4


# ------------------------------------------------------------------------------------------------- gradients


def accumulate(tensor: str) -> list[tuple[int, bool]]:
    """For each micro-batch: all-reduces in its backward pass, and whether all replicas hold one gradient."""
    seen: list[tuple[int, bool]] = []
    calls: list[Any] = []
    all_reduce = dist.all_reduce

    class Watched(LM):
        def on_before_backward(self, loss: Tensor) -> None:
            calls.clear()
            dist.all_reduce = lambda *args, **kwargs: (calls.append(kwargs), all_reduce(*args, **kwargs))[1]

        def on_after_backward(self) -> None:
            dist.all_reduce = all_reduce
            grads: list[Any] = [None] * get_world_size(TRAIN)
            own = self.model.norm.weight.grad.tolist()
            dist.all_gather_object(grads, own, group=get_group(TRAIN))
            seen.append((len(calls), all(grad == own for grad in grads)))

    lm = Watched(tensor=tensor, count=2 * BATCH, micro_batches=2)
    trainer = new_trainer(strategy_of(tensor_parallel_size=2), accumulate_grad_batches=2, limit_val_batches=0)
    trainer.fit(lm)
    return seen


def test_nothing_is_reduced_while_gradients_accumulate(run_ranks: Run) -> None:
    assert run_ranks(accumulate, 4, "dtensor") == [[(0, False), (1, True)] * 2] * 4
    # DistributedDataParallel's calls do not pass through Python.
    assert run_ranks(accumulate, 4, "hand") == [[(0, False), (0, True)] * 2] * 4


def mixed_optimizer() -> tuple[Any, list[str], int, bool]:
    """The optimizer's foreach, what was told, the steps, and whether the weights moved."""
    lm = LM(tensor="dtensor", count=BATCH)
    kept: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    logger = rank_zero.log  # of whichever namespace was imported last
    logger.addHandler(handler)
    try:
        trainer = new_trainer(strategy_of(tensor_parallel_size=2), limit_val_batches=0)
        before = new_transformer().head.weight
        trainer.fit(lm)
    finally:
        logger.removeHandler(handler)
    told = [text for text in kept if "foreach" in text]
    foreach = trainer.optimizers[0].param_groups[0]["foreach"]
    return foreach, told, trainer.global_step, torch.equal(before, lm.model.head.weight)


def test_plain_tensors_beside_dtensors_under_adamw(run_ranks: Run) -> None:
    first, second = run_ranks(mixed_optimizer, 2)
    assert first[0] is False
    assert first[2:] == second[2:] == (1, False)
    assert len(first[1]) == 1
    assert "AdamW runs with foreach=False" in first[1][0]


# ----------------------------------------------------------------------------------------------- checkpoints


def train_to_checkpoint(path: str, tensor: str) -> list[float]:
    lm = LM(tensor=tensor, count=2 * BATCH)
    trainer = new_trainer(strategy_of(tensor_parallel_size=2), limit_val_batches=0)
    trainer.fit(lm)
    trainer.save_checkpoint(path)
    return lm.losses


def resume(path: str, tensor: str, sizes: dict[str, int]) -> tuple[list[float], dict[str, Tensor]]:
    lm = LM(tensor=tensor, count=2 * BATCH)
    trainer = new_trainer(strategy_of(**sizes), max_epochs=2, limit_val_batches=0)
    trainer.fit(lm, ckpt_path=path)
    return lm.losses, lm.full_weights()


def validate_checkpoint(path: str, tensor: str, sizes: dict[str, int]) -> float:
    lm = LM(tensor=tensor)
    (metrics,) = new_trainer(strategy_of(**sizes)).validate(lm, ckpt_path=path, verbose=False)
    return float(metrics["val"])


def test_checkpoint_of_dtensors(run_ranks: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "tp2.ckpt")
    losses, _ = one_process(epochs=2, count=2 * BATCH)
    _, weights = one_process(epochs=1, count=2 * BATCH)
    _, last_weights = one_process(epochs=2, count=2 * BATCH)
    assert run_ranks(train_to_checkpoint, 2, path, "dtensor") == [pytest.approx(losses[:2], abs=1e-9)] * 2

    # One process and plain torch read it.
    checkpoint = torch.load(path, weights_only=True)
    saved = {name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()}
    assert all(type(value) is Tensor for value in saved.values())
    plain = new_transformer(seed=99)
    plain.load_state_dict(saved)
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-8)
    moments = checkpoint["optimizer_states"][0]["state"]
    shapes = [parameter.shape for parameter in plain.parameters()]
    assert [moments[number]["exp_avg"].shape for number in sorted(moments)] == shapes
    assert all(type(entry["exp_avg_sq"]) is Tensor for entry in moments.values())

    # One device goes on from it without a strategy of ours, and any layout does.
    alone = AloneLM(count=2 * BATCH)
    new_trainer("auto", devices=1, max_epochs=2, limit_val_batches=0).fit(alone, ckpt_path=path)
    assert alone.losses == pytest.approx(losses[2:], abs=1e-9, rel=0)
    for sizes, world, kind in [
        ({"tensor_parallel_size": 2}, 2, "dtensor"),
        ({"tensor_parallel_size": 1}, 2, "none"),
        ({"tensor_parallel_size": 4}, 4, "dtensor"),
        ({"tensor_parallel_size": 2, "sequence_parallel_size": 2}, 4, "dtensor"),
    ]:
        results = run_ranks(resume, world, path, kind, sizes)
        for ours, full in results:
            assert ours == pytest.approx(losses[2:], abs=1e-9, rel=0)
            for name, value in last_weights.items():
                torch.testing.assert_close(full[name], value, rtol=0, atol=1e-8)

    # An evaluation starts from it, too.
    with torch.no_grad():
        plain.load_state_dict(weights)
        expected = plain(Windows(BATCH).data, plain_attention).item()
    sizes = {"tensor_parallel_size": 2}
    assert (
        run_ranks(validate_checkpoint, 4, path, "dtensor", sizes) == [pytest.approx(expected, abs=1e-9)] * 4
    )


# --------------------------------------------------------------------------------------- what users ran into


def two_sizes_with_one_model() -> str:
    lm = LM(tensor="dtensor", count=BATCH)
    new_trainer(strategy_of(tensor_parallel_size=2), max_epochs=1).fit(lm)
    with pytest.raises(ContextError) as error:
        new_trainer(strategy_of(tensor_parallel_size=1), max_epochs=1).fit(lm)
    return str(error.value)


def test_a_sharded_model_is_not_taken_to_other_groups(run_ranks: Run) -> None:
    for message in run_ranks(two_sizes_with_one_model, 2):
        assert message.startswith("the model is sharded over groups that are gone")


class Norms(LM):
    """Logs what is a DTensor, and predicts one too."""

    def training_step(self, window: Tensor, index: int) -> Tensor:
        self.log("norm", self.model.blocks[0].up.weight.detach().norm(), sync_dist=True)
        return super().training_step(window, index)

    def predict_step(self, window: Tensor, index: int) -> Any:
        weight = self.model.blocks[0].up.weight
        return {"full": weight, "late": (weight.redistribute(placements=[Replicate()]).to_local(),)}

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()


def log_and_predict() -> tuple[float, float, list[type], bool]:
    lm = Norms(tensor="dtensor", count=BATCH)
    trainer = new_trainer(strategy_of(tensor_parallel_size=2), max_epochs=1)
    before = float(new_transformer().blocks[0].up.weight.detach().norm())
    trainer.fit(lm)
    logged = float(trainer.callback_metrics["norm"])
    (predicted,) = trainer.predict(lm)
    full, (late,) = predicted["full"], predicted["late"]
    return logged, before, [type(full), type(late)], torch.equal(full, late)


def test_dtensors_are_logged_and_predicted_in_full(run_ranks: Run) -> None:
    for logged, norm, kinds, equal in run_ranks(log_and_predict, 2):
        assert logged == pytest.approx(norm, rel=1e-6)
        assert kinds == [Tensor, Tensor]
        assert equal


class Loads(LM):
    """Loads a full checkpoint where it is sharded already, as the documentation says."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = shard_model_state(checkpoint["state_dict"], self)


def load_by_hand(path: str) -> dict[str, Tensor]:
    started(tensor_parallel_size=get_size())
    return Loads.load_from_checkpoint(path, tensor="dtensor").full_weights()


def get_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def test_load_from_checkpoint_without_a_trainer(run_ranks: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "tp2.ckpt")
    run_ranks(train_to_checkpoint, 2, path, "dtensor")
    (alone,), (first, second) = run_ranks(load_by_hand, 1, path), run_ranks(load_by_hand, 2, path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    for name, value in saved.items():
        short = name.removeprefix("model.")
        assert all(torch.equal(one[short], value) for one in (alone, first, second)), name
