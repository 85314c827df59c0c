"""What keeps replicas equal, without a Trainer: every value is compared with one process's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategy_models import DATA, TENSOR, TRAIN, Run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rlightning_groups import ParallelContext, get_group, get_local_rank
from rlightning_groups.gradients import GradientReducer
from rlightning_groups.replicas import synchronize_replicas

WIDTH, TOKENS = 4, 2
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "partial": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
}
KINDS = list(PLANS)
Grads = dict[str, Tensor | None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.spare = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return y + self.spare(x) if spare else y


def new_net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def sample(rank: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + index)
    return torch.randn(1, TOKENS, WIDTH, dtype=torch.float64, generator=generator)


def loss_of(net: Net, x: Tensor, spare: bool = False) -> Tensor:
    return net(x, spare).square().sum()


def alone(passes: int = 1, spare: Callable[[int], bool] = lambda rank: False) -> Grads:
    """One process's gradients: summed over passes, averaged over two data-parallel ranks."""
    net = new_net()
    for rank in range(2):
        for index in range(passes):
            (loss_of(net, sample(rank, index), spare(rank)) / 2).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


class Ranks:
    """Two data-parallel by two tensor-parallel ranks, with a net of one kind and its reducer."""

    def __init__(self, kind: str, bucket_mb: float = 25.0) -> None:
        ParallelContext().initialize(tensor_parallel_size=2)
        self.kind, self.net = kind, new_net()
        if PLANS[kind]:
            mesh = ParallelContext().device_mesh(TENSOR)
            parallelize_module(self.net, mesh, copy.deepcopy(PLANS[kind]))
        self.reducer = GradientReducer(self.net.parameters(), get_group(TRAIN), bucket_mb)

    def backward(self, index: int = 0, spare: bool = False) -> None:
        x = sample(get_local_rank(DATA), index)
        if self.kind == "partial":  # each tensor-parallel rank has its tokens
            x = x.chunk(2, 1)[get_local_rank(TENSOR)]
        self.reducer.reset()
        loss_of(self.net, x, spare).backward()

    def local(self, name: str) -> Any:
        grad = self.net.get_parameter(name).grad
        return grad.placements if isinstance(grad, DTensor) else grad

    def grads(self) -> Grads:
        named = {name: parameter.grad for name, parameter in self.net.named_parameters()}
        return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named.items()}


@contextmanager
def counted() -> Iterator[list[int]]:
    """The number of elements of each all-reduce that starts inside."""
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield calls
    finally:
        dist.all_reduce = all_reduce


def same(ours: Grads, theirs: Grads) -> bool:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        grad = ours[name]
        if value is None or grad is None:
            assert value is grad, f"{name}: {grad} instead of {value}"
        else:
            torch.testing.assert_close(grad, value, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    return True


# ------------------------------------------------------------------------------------------------ averaging


def average(kind: str) -> tuple[bool, int, int]:
    """Whether the gradients are right; all-reduces with one bucket and with tiny ones."""
    expected = alone()
    ranks = Ranks(kind)
    with counted() as calls:
        ranks.backward()
    same(ranks.grads(), expected)
    assert expected["spare.weight"] is None  # took no part on any rank
    tiny = Ranks(kind, bucket_mb=1e-9)
    with counted() as tiny_calls:
        tiny.backward()
    return same(tiny.grads(), expected), len(calls), len(tiny_calls)


@pytest.mark.parametrize("kind", KINDS)
def test_average(run_ranks: Run, kind: str) -> None:
    assert run_ranks(average, 4, kind) == [(True, 1, 5)] * 4  # the frozen parameter never travels


def average_with_spare(kind: str, spare_rank: int) -> bool:
    ranks = Ranks(kind)
    ranks.backward(spare=get_local_rank(DATA) == spare_rank)
    return same(ranks.grads(), alone(spare=lambda rank: rank == spare_rank))


@pytest.mark.parametrize("spare_rank", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_a_parameter_of_some_ranks_counts_as_zero_on_others(
    run_ranks: Run, kind: str, spare_rank: int
) -> None:
    assert run_ranks(average_with_spare, 4, kind, spare_rank) == [True] * 4


def sharded_on_some(kind: str) -> bool:
    """Data rank 0 alone uses the DTensors; the others' gradients must come in the same layout."""
    ranks = Ranks(kind)
    net = ranks.net
    first = get_local_rank(DATA) == 0
    ranks.reducer.reset()
    x = sample(get_local_rank(DATA), 0)
    x = x.chunk(2, 1)[get_local_rank(TENSOR)] if kind == "partial" else x
    (loss_of(net, x) if first else net.spare(x).square().sum()).backward()
    one = new_net()
    (loss_of(one, sample(0, 0)) / 2).backward()
    expected = {name: p.grad for name, p in one.named_parameters() if "spare" not in name}
    ours = {name: grad for name, grad in ranks.grads().items() if "spare" not in name}
    return same(ours, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_dtensors_that_took_part_on_some_ranks(run_ranks: Run, kind: str) -> None:
    assert run_ranks(sharded_on_some, 4, kind) == [True] * 4


def accumulate(kind: str, bucket_mb: float) -> tuple[int, int]:
    """All-reduces under ``no_sync`` and after it."""
    ranks = Ranks(kind, bucket_mb)
    with counted() as quiet, ranks.reducer.no_sync():
        ranks.backward(0)
        if kind == "partial":
            assert ranks.local("norm.weight")[0].is_partial()  # not summed per micro-batch
        ranks.backward(1)
    with counted() as loud:
        ranks.backward(2)
    if kind == "partial":
        assert ranks.local("norm.weight")[0].is_replicate()
    same(ranks.grads(), alone(passes=3))
    return len(quiet), len(loud)


@pytest.mark.parametrize("kind", KINDS)
def test_no_sync(run_ranks: Run, kind: str) -> None:
    assert run_ranks(accumulate, 4, kind, 25.0) == [(0, 1)] * 4
    assert run_ranks(accumulate, 4, kind, 1e-9) == [(0, 5)] * 4


def two_passes(kind: str) -> bool:
    ranks = Ranks(kind)
    ranks.backward(0)
    ranks.backward(1)
    return same(ranks.grads(), alone(passes=2))


@pytest.mark.parametrize("kind", KINDS)
def test_two_passes_that_both_synchronize(run_ranks: Run, kind: str) -> None:
    assert run_ranks(two_passes, 4, kind) == [True] * 4


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise OverflowError("too much")


def recover(kind: str) -> bool:
    """A backward pass that raises after the first buckets have left, then a good one."""
    ranks = Ranks(kind, bucket_mb=1e-9)
    hook = ranks.net.up.register_forward_hook(lambda module, args, output: _Fail.apply(output))
    with counted() as calls, pytest.raises(OverflowError):
        ranks.backward(spare=True)
    assert len(calls) > 0
    hook.remove()
    ranks.net.zero_grad()
    ranks.backward()
    return same(ranks.grads(), alone())


@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_recovery_after_a_backward_that_raised(run_ranks: Run, kind: str) -> None:
    assert run_ranks(recover, 4, kind) == [True] * 4


def discard() -> bool:
    """Gradients thrown away after ``no_sync``; the next pass does not use what they were of."""
    ranks = Ranks("plain")
    with ranks.reducer.no_sync():
        ranks.backward(spare=True)
    ranks.net.zero_grad()
    ranks.backward()
    return same(ranks.grads(), alone())


def test_gradients_that_were_thrown_away(run_ranks: Run) -> None:
    assert run_ranks(discard, 4) == [True] * 4


def remove() -> tuple[int, bool]:
    ranks = Ranks("plain")
    ranks.reducer.remove()
    with counted() as calls:
        ranks.backward()
    own = new_net()
    loss_of(own, sample(get_local_rank(DATA), 0)).backward()
    return len(calls), same(ranks.grads(), {name: p.grad for name, p in own.named_parameters()})


def test_remove(run_ranks: Run) -> None:
    assert run_ranks(remove, 4) == [(0, True)] * 4


def mixed_dtypes() -> tuple[list[float], list[str], int]:
    """Gradients of parameters in three dtypes, one of them without a dim."""
    ParallelContext().initialize()
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
    shapes: list[tuple[int, ...]] = [(2,), (), (3,), ()]
    parameters = [nn.Parameter(torch.ones(shape, dtype=t)) for t, shape in zip(dtypes, shapes, strict=True)]
    GradientReducer(parameters, get_group(TRAIN))
    scale = 1.0 + dist.get_rank()
    with counted() as calls:
        torch.stack([(p.double() * scale).sum() for p in parameters]).sum().backward()
    grads = [p.grad for p in parameters]
    assert all(grad is not None for grad in grads)
    return [g.flatten()[0].item() for g in grads if g is not None], [str(g.dtype) for g in grads], len(calls)


def test_dtypes(run_ranks: Run) -> None:
    names = ["torch.float32", "torch.float64", "torch.bfloat16", "torch.float32"]
    assert run_ranks(mixed_dtypes, 2) == [([1.5] * 4, names, 4)] * 2


# --------------------------------------------------------------------------------------------------- copying


class States(nn.Module):
    """Parameters and buffers of several dtypes that all say which rank they come from."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), float(rank), dtype=torch.float64))
        self.low = nn.Parameter(torch.full((4,), float(rank), dtype=torch.bfloat16), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(float(rank)))
        self.register_buffer("steps", torch.tensor(rank))
        self.register_buffer("flags", torch.tensor([rank > 1, True]))
        self.register_buffer("transposed", torch.full((2, 3), float(rank)).t())
        self.register_buffer("empty", torch.empty(0))

    def values(self) -> list[list[float]]:
        own = (self.weight, self.low, self.scale, self.steps, self.flags, self.transposed)
        return [sorted(set(state.detach().double().flatten().tolist())) for state in own]


def copy_states(bucket_mb: float) -> list[list[float]]:
    ParallelContext().initialize(tensor_parallel_size=2)
    module = States(dist.get_rank())
    synchronize_replicas(module, get_group(TRAIN), bucket_mb)
    return module.values()


@pytest.mark.parametrize("bucket_mb", [250.0, 1e-9])
def test_states_are_copied_within_the_group_only(run_ranks: Run, bucket_mb: float) -> None:
    """TRAIN_DATA_PARALLEL is 02 13."""
    even = [[0.0], [0.0], [0.0], [0.0], [0.0, 1.0], [0.0]]
    odd = [[1.0], [1.0], [1.0], [1.0], [0.0, 1.0], [1.0]]
    assert run_ranks(copy_states, 4, bucket_mb) == [even, odd, even, odd]


def copy_dtensors() -> tuple[list[float], list[float]]:
    """Local parts of a DTensor over TENSOR_PARALLEL, and of one over the group itself."""
    context = ParallelContext().initialize(tensor_parallel_size=2)
    module = nn.Module()
    full = torch.arange(4.0)
    for name, mode in (("other", TENSOR), ("own", DATA)):
        tensor = distribute_tensor(full + 10, context.device_mesh(mode), [Shard(0)])
        setattr(module, name, nn.Parameter(tensor))
    with torch.no_grad():
        module.other._local_tensor.fill_(float(dist.get_rank()))
    synchronize_replicas(module, get_group(TRAIN))
    return module.other._local_tensor.tolist(), module.own._local_tensor.tolist()


def test_dtensors_over_the_group_itself_are_left_alone(run_ranks: Run) -> None:
    low, high = [10.0, 11.0], [12.0, 13.0]
    assert run_ranks(copy_dtensors, 4) == [
        ([0.0, 0.0], low),
        ([1.0, 1.0], low),
        ([0.0, 0.0], high),
        ([1.0, 1.0], high),
    ]


def reducer_skips_own_shards() -> int:
    """Elements that travel when one of two parameters is spread over the group itself."""
    context = ParallelContext().initialize()
    mesh = context.device_mesh(DATA)
    sharded = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    plain = nn.Parameter(torch.ones(3))
    GradientReducer([sharded, plain], get_group(TRAIN))
    with counted() as calls:
        (sharded.to_local().sum() + plain.sum()).backward()
    return sum(calls)


def test_shards_over_the_group_itself_are_not_averaged(run_ranks: Run) -> None:
    assert run_ranks(reducer_skips_own_shards, 2) == [3 + 1] * 2  # and one flag
