from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rlightning_groups import ParallelContext, ParallelMode, ShapeError, collectives
from rlightning_groups.context import get_global_rank, get_local_rank, get_ranks_in_group, get_world_size
from rlightning_groups.group_initializer import RankListInitializer

Run = Callable[..., list[Any]]

TP = ParallelMode.TENSOR_PARALLEL
BOTH = pytest.mark.parametrize("tp", [2, 4])  # of four ranks: two groups, one without rank 0; one group
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


class Case:
    """A differentiable call with what it is to return, and which of its two sides is replicated.

    ``given(rank, n)`` is the shape of a rank's tensor; ``expected(tensors, rank)`` reads every rank's tensor.
    """

    def __init__(
        self,
        call: Callable[[Tensor, int], Tensor],
        given: Callable[[int, int], tuple[int, ...]],
        expected: Callable[[list[Tensor], int], Tensor],
        replicated: str = "",
    ) -> None:
        self.call, self.given, self.expected = call, given, expected
        self.replicated_in, self.replicated_out = "in" in replicated, "out" in replicated


def chunks(length: int, n: int) -> tuple[int, ...]:
    return tuple(len(range(rank, length, n)) for rank in range(n))


def slices(x: Tensor, dim: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return x.split(sizes, dim)


def crossed(xs: list[Tensor], rank: int, scatter: int, gather: int, sizes: tuple[int, ...]) -> Tensor:
    return torch.cat([slices(x, scatter, sizes)[rank] for x in xs], gather)


def odd_sizes(n: int) -> tuple[int, ...]:
    return (3, 0, 1, 2)[:n]


def cases() -> dict[str, Case]:
    c = collectives
    square = lambda rank, n: (4, 3)  # noqa: E731
    sliced = lambda rank, n: (3, odd_sizes(n)[rank], 2)  # noqa: E731
    found = {
        "copy_to": Case(lambda x, n: c.copy_to(x, TP), square, lambda xs, r: xs[r], "in"),
        "reduce_from": Case(lambda x, n: c.reduce_from(x, TP), square, lambda xs, r: sum(xs), "out"),
        "ring_exchange": Case(lambda x, n: c.ring_exchange(x, TP), square, lambda xs, r: xs[r - 1]),
        "all_to_all even": Case(
            lambda x, n: c.all_to_all(x, 1, 0, TP),
            lambda r, n: (3, 2 * n),
            lambda xs, r: crossed(xs, r, 1, 0, (2,) * len(xs)),
        ),
        "all_to_all uneven": Case(
            lambda x, n: c.all_to_all(x, -1, 1, TP, gather_sizes=odd_sizes(n)),
            lambda r, n: (2, odd_sizes(n)[r], 5),
            lambda xs, r: crossed(xs, r, 2, 1, chunks(5, len(xs))),
        ),
        "all_to_all given sizes": Case(
            lambda x, n: c.all_to_all(x, 0, -1, TP, scatter_sizes=odd_sizes(n)),
            lambda r, n: (sum(odd_sizes(n)), 2),
            lambda xs, r: crossed(xs, r, 0, 1, odd_sizes(len(xs))),
        ),
    }
    for src in (0, 1):
        found[f"broadcast_from {src}"] = Case(
            lambda x, n, src=src: c.broadcast_from(x, src, TP), square, lambda xs, r, src=src: xs[src]
        )
    for length, dim in ((8, 0), (8, -1), (7, 1), (2, -2)):
        whole = (
            (lambda r, n, length=length: (length, 3))
            if dim in (0, -2)
            else (lambda r, n, length=length: (3, length))
        )
        cut = lambda x, r, n, dim=dim, length=length: slices(x, dim, chunks(length, n))[r]  # noqa: E731
        found[f"split_to {length} {dim}"] = Case(
            lambda x, n, dim=dim: c.split_to(x, dim, TP),
            whole,
            lambda xs, r, cut=cut: cut(xs[r], r, len(xs)),
            "in",
        )
        found[f"reduce_scatter_to {length} {dim}"] = Case(
            lambda x, n, dim=dim: c.reduce_scatter_to(x, dim, TP),
            whole,
            lambda xs, r, cut=cut: cut(sum(xs), r, len(xs)),
        )
    found["split_to given sizes"] = Case(
        lambda x, n: c.split_to(x, 1, TP, sizes=odd_sizes(n)),
        lambda r, n: (2, sum(odd_sizes(n))),
        lambda xs, r: slices(xs[r], 1, odd_sizes(len(xs)))[r],
        "in",
    )
    found["reduce_scatter_to given sizes"] = Case(
        lambda x, n: c.reduce_scatter_to(x, -1, TP, sizes=odd_sizes(n)),
        lambda r, n: (2, sum(odd_sizes(n))),
        lambda xs, r: slices(sum(xs), 1, odd_sizes(len(xs)))[r],
    )
    for grad in ("replicated", "partial"):
        out = "out" if grad == "replicated" else ""
        for dim in (0, -1):
            found[f"gather_from {grad} {dim}"] = Case(
                lambda x, n, dim=dim, grad=grad: c.gather_from(x, dim, TP, grad=grad),
                square,
                lambda xs, r, dim=dim: torch.cat(xs, dim),
                out,
            )
        found[f"gather_from {grad} uneven"] = Case(
            lambda x, n, grad=grad: c.gather_from(x, -2, TP, grad=grad, sizes=odd_sizes(n)),
            sliced,
            lambda xs, r: torch.cat(xs, 1),
            out,
        )
    return found


CASES = cases()


@contextmanager
def context(**arguments: Any) -> Iterator[tuple[int, int]]:
    ParallelContext().initialize(**arguments)
    yield get_local_rank(TP), get_world_size(TP)


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def draws(case: Case, n: int, seed: int = 0) -> list[Tensor]:
    """Every rank's tensor, the same one where the side is replicated; groups differ."""
    seed += 1000 * min(get_ranks_in_group(TP))
    return [draw(case.given(r, n), seed + (0 if case.replicated_in else r)) for r in range(n)]


def equal(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def total(x: Tensor, y: Tensor, rank: int, replicated: bool) -> Tensor:
    """The inner product over all ranks; what is replicated counts once."""
    product = (x * y).sum() if rank == 0 or not replicated else x.new_zeros(())
    return collectives.all_reduce(product, TP)


# ------------------------------------------------------------------------------------ values and gradients


def check_values(tp: int) -> None:
    with context(tensor_parallel_size=tp) as (rank, n):
        for case in CASES.values():
            xs = draws(case, n)
            expected = case.expected(xs, rank)
            strided = xs[rank].t() if xs[rank].dim() == 2 else xs[rank].transpose(0, 2)
            strided = (
                strided.contiguous().t() if xs[rank].dim() == 2 else strided.contiguous().transpose(0, 2)
            )
            for x in (xs[rank].clone(), strided):
                result = case.call(x, n)
                equal(result, expected)
                equal(x, xs[rank], 0)
                assert result.shape == expected.shape
                assert type(result) is Tensor


@BOTH
def test_values(run_ranks: Run, tp: int) -> None:
    run_ranks(check_values, 4, tp)


def check_gradients(tp: int) -> None:
    with context(tensor_parallel_size=tp) as (rank, n):
        for label, case in CASES.items():
            x = draws(case, n)[rank].requires_grad_()
            out = case.call(x, n)
            y = draw(out.shape, 50 + (0 if case.replicated_out else rank)).requires_grad_()
            (gradient,) = torch.autograd.grad(out, x, y, create_graph=True)
            # <Ax, y> == <x, A'y>
            left = total(out, y, rank, case.replicated_out)
            equal(left, total(x, gradient, rank, case.replicated_in))
            assert left.abs() > 1e-6, label
            # The gradient is linear in y, so its own gradient is A again, and that one's A'.
            z = draws(case, n, seed=100)[rank].requires_grad_()
            (again,) = torch.autograd.grad(gradient, y, z, create_graph=True)
            equal(again, case.expected(draws(case, n, seed=100), rank))
            (third,) = torch.autograd.grad(again, z, y)
            equal(third, gradient)


@BOTH
def test_each_backward_is_the_adjoint_to_any_order(run_ranks: Run, tp: int) -> None:
    """Law of the numbers 9: no hidden factor."""
    run_ranks(check_gradients, 4, tp)


def check_results_can_be_changed() -> None:
    with context(tensor_parallel_size=2) as (rank, n):
        for label, case in CASES.items():
            if label == "copy_to":
                continue  # shares memory, and says so
            for x in (draws(case, n)[rank], draws(case, n)[rank].requires_grad_()):
                before = x.detach().clone()
                case.call(x, n).mul_(2)
                equal(x.detach(), before, 0)


def test_results_can_be_changed_in_place(run_ranks: Run) -> None:
    run_ranks(check_results_can_be_changed, 2)


def mlp(x: Tensor, first: Tensor, second: Tensor, tp: bool) -> Tensor:
    """Column-parallel, then row-parallel, with a loss that uses the gradient with respect to the input."""
    hidden = torch.nn.functional.gelu((collectives.copy_to(x, TP) if tp else x) @ first.t())
    out = hidden @ second.t()
    return collectives.reduce_from(out, TP) if tp else out


def check_mlp(tp: int) -> None:
    with context(tensor_parallel_size=tp) as (rank, n):
        first, second, data = draw((8, 5), 1), draw((5, 8), 2), draw((3, 5), 3 + get_global_rank() // tp)
        results = []
        for sharded in (False, True):
            own = slice(rank * 8 // n, (rank + 1) * 8 // n) if sharded else slice(0, 8)
            x = data.clone().requires_grad_()
            w1, w2 = first[own].clone().requires_grad_(), second[:, own].clone().requires_grad_()
            out = mlp(x, w1, w2, sharded)
            gradients = torch.autograd.grad(out.square().sum(), (x, w1, w2), create_graph=True)
            penalty = torch.autograd.grad(gradients[0].square().sum(), (x, w1, w2))
            results.append([out, *gradients, *penalty])
        own = slice(rank * 8 // n, (rank + 1) * 8 // n)
        cut = [lambda t: t, lambda t: t, lambda t: t[own], lambda t: t[:, own]]
        for dense, sharded_result, take in zip(*results, [*cut, *cut[1:]], strict=True):
            equal(sharded_result, take(dense), 1e-10)


@BOTH
def test_column_and_row_parallel_mlp_equals_the_dense_one(run_ranks: Run, tp: int) -> None:
    run_ranks(check_mlp, 4, tp)


# -------------------------------------------------------------------------------------- dtypes and odd shapes


def check_dtypes() -> None:
    with context(tensor_parallel_size=2) as (rank, n):
        for label, case in CASES.items():
            xs = [
                torch.arange(x.numel(), dtype=torch.float32).view(x.shape) % 7 + r
                for r, x in enumerate(draws(case, n))
            ]
            sums = label.startswith("reduce")
            for dtype in (torch.bfloat16, torch.float16, torch.int64, *([] if sums else FP8)):
                result = case.call(xs[rank].to(dtype), n)
                assert result.dtype == dtype
                equal(result.float(), case.expected(xs, rank), 0)
            if not sums:
                half = xs[rank].bfloat16().requires_grad_()
                case.call(half, n).sum().backward()
                assert half.grad is not None
                assert half.grad.dtype == torch.bfloat16
            else:
                with pytest.raises(ShapeError, match="float8_e4m3fn cannot be summed"):
                    case.call(xs[rank].to(FP8[0]), n)


def test_low_precision_and_integers(run_ranks: Run) -> None:
    run_ranks(check_dtypes, 4)


def check_scalars_and_empty() -> None:
    c = collectives
    with context(tensor_parallel_size=2) as (rank, _):
        x = torch.tensor(rank + 1.0, requires_grad=True)
        results = (c.copy_to(x, TP), c.reduce_from(x, TP), c.broadcast_from(x, 1, TP), c.ring_exchange(x, TP))
        assert [r.item() for r in results] == [rank + 1, 3, 2, 2 - rank]
        assert all(r.dim() == 0 for r in results)
        gradients = [torch.autograd.grad(r, x, torch.tensor(rank + 1.0))[0].item() for r in results]
        assert gradients == [3, rank + 1, 3 * rank, 2 - rank]
        assert (c.all_reduce(x, TP).item(), c.broadcast(x, 0, TP).item()) == (3, 1)
        empty = torch.ones(2, 0, requires_grad=True)
        results = (
            *(c.copy_to(empty, TP), c.reduce_from(empty, TP), c.broadcast_from(empty, 1, TP)),
            *(c.ring_exchange(empty, TP), c.split_to(empty, 1, TP), c.reduce_scatter_to(empty, 1, TP)),
            *(c.gather_from(empty, 1, TP, grad="partial"), c.all_to_all(empty, 0, 1, TP)),
        )
        assert [tuple(r.shape) for r in results] == [(2, 0)] * 7 + [(1, 0)]
        for result in results:
            result.sum().backward()


def test_scalars_and_empty_tensors(run_ranks: Run) -> None:
    run_ranks(check_scalars_and_empty, 2)


def check_group_of_one() -> None:
    c, mode = collectives, ParallelMode.DATA_PARALLEL
    with context(tensor_parallel_size=2):
        x = draw((3, 2), 0).requires_grad_()
        for result in (
            *(
                c.copy_to(x, mode),
                c.reduce_from(x, mode),
                c.split_to(x, 0, mode),
                c.broadcast_from(x, 0, mode),
            ),
            *(c.gather_from(x, 1, mode, grad="partial"), c.gather_from(x, 1, mode, grad="replicated")),
            *(c.reduce_scatter_to(x, 0, mode), c.all_to_all(x, 0, 1, mode), c.ring_exchange(x, mode)),
        ):
            assert result is x
        for plain in (
            *(c.all_reduce(x, mode), c.all_gather(x, 0, mode), c.reduce_scatter(x, 0, mode)),
            c.broadcast(x, 0, mode),
        ):
            equal(plain, x.detach(), 0)
            assert not plain.requires_grad
            assert plain.data_ptr() != x.data_ptr()
        assert c.all_gather_object("a", mode) == ["a"]
        assert c.broadcast_object("a", 0, mode) == "a"
        with pytest.raises(ShapeError, match="no dim 2"):
            c.split_to(x, 2, mode)  # wrong input is wrong in a group of one too
        with pytest.raises(ShapeError, match="grad must be"):
            c.gather_from(x, 0, mode, grad="sum")  # type: ignore[arg-type]


def test_a_group_of_one_passes_through(run_ranks: Run) -> None:
    run_ranks(check_group_of_one, 2)


# ------------------------------------------------------------------------------- plain calls and named groups


def check_plain(tp: int) -> None:
    c = collectives
    with context(tensor_parallel_size=tp) as (rank, n):
        xs = [draw((5, 2 * n), r) for r in range(n)]
        x = xs[rank].clone().requires_grad_()
        stack = torch.stack(xs)
        reduced = {
            "sum": stack.sum(0),
            "avg": stack.mean(0),
            "min": stack.amin(0),
            "max": stack.amax(0),
            "product": stack.prod(0),
        }
        results = []
        for op, expected in reduced.items():
            results += [(c.all_reduce(x, TP, op=op), expected)]  # type: ignore[arg-type]
            cut = slices(expected, 0, chunks(5, n))[rank]
            results += [(c.reduce_scatter(x, -2, TP, op=op), cut)]  # type: ignore[arg-type]
        results += [(c.all_gather(x, -1, TP), torch.cat(xs, 1)), (c.broadcast(x, n - 1, TP), xs[-1])]
        mine = slices(xs[0], 0, chunks(5, n))[rank]
        results += [(c.all_gather(mine, 0, TP, sizes=c.chunk_sizes(5, TP)), xs[0])]
        for actual, expected in results:
            equal(actual, expected)
            assert not actual.requires_grad
            assert actual.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            equal(x.detach(), xs[rank], 0)
        fp8 = torch.ones(2).to(FP8[0])
        assert c.all_gather(fp8, 0, TP).dtype == c.broadcast(fp8, 0, TP).dtype == FP8[0]
        ranks = get_ranks_in_group(TP)
        assert c.all_gather_object({"rank": get_global_rank()}, TP) == [{"rank": r} for r in ranks]
        assert c.broadcast_object(get_global_rank() if rank == 1 else None, 1, TP) == ranks[1]
        assert c.chunk_sizes(10, TP) == ((5, 5) if n == 2 else (3, 3, 2, 2))
        c.barrier(TP)


@BOTH
def test_plain_calls(run_ranks: Run, tp: int) -> None:
    run_ranks(check_plain, 4, tp)


class Pair(RankListInitializer):
    mode = ParallelMode.WEIGHT_TRANSFER
    ranks: tuple[int, ...] = (1, 2)

    def own_ranks(self) -> tuple[int, ...]:
        return self.ranks


class Triple(Pair):
    ranks = (1, 2, 3)


def check_names() -> None:
    c, mode = collectives, ParallelMode.WEIGHT_TRANSFER
    with context(initializers={"pair": Pair, "triple": Triple}):
        rank = get_global_rank()
        if rank in (1, 2):
            x = torch.tensor([float(rank)], requires_grad=True)
            out = c.broadcast_from(x, 1, mode, name="pair")
            out.backward(torch.ones(1))
            assert (out.item(), x.grad) == (2, torch.tensor([2.0 * (rank == 2)]))
        if rank in (1, 2, 3):
            assert c.gather_from(torch.ones(1) * rank, 0, mode, grad="partial", name="triple").tolist() == [
                1,
                2,
                3,
            ]
            assert c.broadcast_object(rank, 2, mode, name="triple") == 3
            c.barrier(mode, name="triple")


def test_named_groups(run_ranks: Run) -> None:
    run_ranks(check_names, 4)


# -------------------------------------------------------------------------------------------------- compiling


def together(x: Tensor) -> Tensor:
    c = collectives
    y = c.reduce_from(c.copy_to(x, TP) * (get_local_rank(TP) + 1), TP)
    y = c.split_to(y[:5], 0, TP)
    y = c.all_to_all(y.sin(), 1, 0, TP, gather_sizes=c.chunk_sizes(5, TP))
    y = c.gather_from(y.cos(), 1, TP, grad="partial", sizes=c.chunk_sizes(4, TP))
    y = y * c.broadcast_from(y, 1, TP) + c.ring_exchange(y, TP)
    y = c.reduce_scatter_to(y.sin(), -1, TP)
    return c.gather_from(y, -1, TP, grad="replicated")


def around(x: Tensor) -> Tensor:
    return collectives.ring_exchange(collectives.reduce_scatter_to(x, 0, TP), TP)


def broadcast_last(x: Tensor) -> Tensor:
    """Its gradient is zero but on one rank, where the others' collectives must not be dropped as unused."""
    return collectives.broadcast_from(collectives.ring_exchange(x, TP), 1, TP)


def hollow(x: Tensor) -> Tensor:
    return collectives.split_to(x, 0, TP, sizes=(6, 0))


def check_compiled(function: Callable[[Tensor], Tensor], backend: str) -> None:
    with context(tensor_parallel_size=2), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, against itself
        eager, traced = (draw((6, 4), 0).requires_grad_() for _ in range(2))
        expected = function(eager)
        expected.square().sum().backward()
        before = collectives.debug(True)  # the check steps aside
        try:
            result = torch.compile(function, fullgraph=True, backend=backend)(traced)
            result.square().sum().backward()
        finally:
            collectives.debug(before)
            torch._dynamo.reset()
        equal(result.detach(), expected.detach())
        equal(traced.detach(), eager.detach(), 0)
        assert eager.grad is not None
        assert traced.grad is not None
        equal(traced.grad, eager.grad)


# The first backend partitions as inductor does, but writes no C++, whose compiler takes most of a minute; the
# function for inductor needs none.
@pytest.mark.parametrize(
    ("function", "backend"),
    [
        (together, "aot_eager_decomp_partition"),
        (broadcast_last, "aot_eager_decomp_partition"),
        (around, "inductor"),
    ],
)
def test_compile_traces_every_differentiable_call(run_ranks: Run, function: Any, backend: str) -> None:
    run_ranks(check_compiled, 2, function, backend, timeout=120)


def check_hollow() -> None:
    with context(tensor_parallel_size=2), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        x = draw((6, 4), 0)
        with pytest.raises(Exception, match="leave a rank without data"):
            torch.compile(hollow, fullgraph=True, backend="eager")(x)
        assert torch.compile(hollow, backend="eager")(x).shape == (6 - 6 * get_local_rank(TP), 4)
        torch._dynamo.reset()


def test_compile_refuses_a_rank_without_data(run_ranks: Run) -> None:
    """The compiler would drop that rank's collectives, and the others would hang."""
    run_ranks(check_hollow, 2)


# -------------------------------------------------------------------------------------------------- bad input


def check_bad_input() -> None:
    c = collectives
    x = torch.ones(4, 3)
    with context(tensor_parallel_size=2):
        bad: list[tuple[str, Callable[[], Any]]] = [
            ("split_to: there is no dim 2 in a tensor of shape", lambda: c.split_to(x, 2, TP)),
            ("no dim -3", lambda: c.reduce_scatter_to(x, -3, TP)),
            ("no dim 0", lambda: c.gather_from(torch.tensor(1.0), 0, TP, grad="partial")),
            ("are the same dim", lambda: c.all_to_all(x, 1, -1, TP)),
            ("'replicated' or 'partial', got 'mean'", lambda: c.gather_from(x, 0, TP, grad="mean")),  # type: ignore[arg-type]
            ("no group rank 2 among 2", lambda: c.broadcast_from(x, 2, TP)),
            ("no group rank -1", lambda: c.broadcast(x, -1, TP)),
            ("no group rank 5", lambda: c.broadcast_object(x, 5, TP)),
            ("do not add up to 4", lambda: c.split_to(x, 0, TP, sizes=[2, 3])),
            ("not one size for each of the 2", lambda: c.split_to(x, 0, TP, sizes=[1, 1, 2])),
            ("not one size for each of the 2", lambda: c.reduce_scatter_to(x, 0, TP, sizes=[5, -1])),
            ("but dim 0 of its tensor has 4", lambda: c.gather_from(x, 0, TP, grad="partial", sizes=[3, 3])),
            ("but dim 1 of its tensor has 3", lambda: c.all_to_all(x, 0, 1, TP, gather_sizes=[4, 4])),
            ("op must be one of sum, avg", lambda: c.all_reduce(x, TP, op="mean")),  # type: ignore[arg-type]
            ("op must be one of sum, avg", lambda: c.reduce_scatter(x, 0, TP, op="mean")),  # type: ignore[arg-type]
            ("cannot be summed", lambda: c.all_reduce(x.to(FP8[0]), TP)),
        ]
        for debugging in (False, True):
            before = c.debug(debugging)
            try:
                for message, call in bad:
                    with pytest.raises(ShapeError, match=message):
                        call()
            finally:
                c.debug(before)
        with pytest.raises(TypeError, match="grad"):
            c.gather_from(x, 0, TP)  # type: ignore[call-arg]


def test_bad_input(run_ranks: Run) -> None:
    run_ranks(check_bad_input, 2)


def check_errors_of_the_context() -> None:
    with pytest.raises(RuntimeError, match="needs a running context"):
        collectives.copy_to(torch.ones(1), TP)
    with context(), pytest.raises(RuntimeError, match="WEIGHT_TRANSFER"):
        collectives.barrier(ParallelMode.WEIGHT_TRANSFER)


def test_errors_of_the_context(run_ranks: Run) -> None:
    run_ranks(check_errors_of_the_context, 1)


def check_debug() -> list[str]:
    c = collectives
    messages: list[str] = []
    with context(tensor_parallel_size=2) as (rank, _):
        odd = get_global_rank() == 3
        x = torch.ones(2 + odd, 3)
        c.debug(True)
        try:
            for call in (
                lambda: c.reduce_from(x, TP),
                lambda: c.all_gather(torch.ones(2, dtype=torch.float64 if odd else None), 0, TP),
                lambda: c.gather_from(x, 0, TP, grad="partial"),
                lambda: c.gather_from(x, 0, TP, grad="partial", sizes=[2, 2]),
                lambda: c.ring_exchange(torch.ones(2, requires_grad=not odd), TP),
                lambda: c.split_to(torch.ones(2, 2), int(odd), TP),
            ):
                try:
                    call()
                    messages.append("")
                except ShapeError as error:
                    messages.append(str(error))
            # Plain calls have no gradient to differ in, and lengths that were told are no difference.
            c.all_reduce(torch.ones(2, requires_grad=not rank), TP)
            own = torch.ones(5 if rank else 1, 2)
            assert c.gather_from(own, 0, TP, grad="partial", sizes=[1, 5]).shape == (6, 2)
        finally:
            c.debug(False)
    return messages


def test_debug_names_the_rank_that_differs_on_every_rank(run_ranks: Run) -> None:
    results = run_ranks(check_debug, 4)
    assert results[0] == results[1] == [""] * 6
    assert results[2] == results[3]
    hints = ["[3, 3]", "float64", "[3, 3]", "[3, 3]", "[2])", "dim=1)"]
    for message, hint in zip(results[2], hints, strict=True):
        assert message.startswith("TENSOR_PARALLEL: rank 3 calls ")
        assert hint in message.split(";")[0]


@pytest.mark.parametrize("value", ["1", "0", None])
def test_debug_starts_as_the_environment_says(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("RLIGHTNING_GROUPS_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("RLIGHTNING_GROUPS_DEBUG", value)
    spec = importlib.util.find_spec("rlightning_groups.collectives")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.debug(False) is (value == "1")
