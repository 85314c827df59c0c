from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from sequence_reference import (
    CALLS,
    Largest,
    Pair,
    attend_and_mix,
    cases,
    check_adjoint,
    compare,
    dense_attention,
    dense_results,
    equal,
    gathering,
    nested_batch,
    spy,
    start,
    visible,
)
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from rlightning_groups import ModeError, ParallelMode, ShapeError, collectives
from rlightning_groups.context import get_global_rank, get_world_size
from rlightning_groups.sequence import (
    _blocks,
    hybrid_attention,
    register_hybrid_groups,
    ring_attention,
    shard_sequence,
    token_mean,
    ulysses_attention,
    unshard_sequence,
)
from rlightning_groups.sequence.layout import SequenceLayout, tile_pairs

Run = Callable[..., list[Any]]

TP = ParallelMode.TENSOR_PARALLEL
TRAIN = ParallelMode.TRAIN_DATA_PARALLEL
SCHEMES = ("contiguous", "zigzag")


# ------------------------------------------------------------------------------------------------- attention


def check_attention(size: int) -> None:
    _, group = start(size)
    if size == 4:
        register_hybrid_groups(2)
    for case in cases(seed=group):
        expected = dense_results(case)
        compare(ring_attention, case, expected)
        calls: list[tuple[int, Callable[..., Tensor]]] = [(size, ulysses_attention)]
        if size == 4:
            calls.append((2, lambda *qkv, **rest: hybrid_attention(*qkv, ulysses_size=2, **rest)))
        for divisor, call in calls:
            if case.heads[0] % divisor:
                with pytest.raises(ShapeError, match=f"use a multiple of {divisor} heads"):
                    compare(call, case, expected)
            else:
                compare(call, case, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_attention_is_that_of_one_process(run_ranks: Run, size: int) -> None:
    """Over lengths, heads, masks and schemes; in float64, with gradients."""
    run_ranks(check_attention, 4, size, timeout=120)


def check_tiles() -> None:
    _, group = start(2)
    with mock.patch.multiple(_blocks, _SCORES_ON_CPU=1, _SMALLEST_TILE=5):
        for case in cases(seed=group):
            if case.length == 31:
                compare(ring_attention, case, dense_results(case))


def test_ring_attention_in_several_tiles(run_ranks: Run) -> None:
    run_ranks(check_tiles, 2)


def check_variants() -> None:
    rank, _ = start(4)
    register_hybrid_groups(2)
    register_hybrid_groups(2)  # as configure_model does, for every fit
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    # Values of another size; one key head of three for each two query heads; no shard.
    q, k, v = draw(1, 12, 32, 6), draw(1, 3, 32, 6), draw(1, 3, 32, 5)
    expected = dense_attention(q, k, v, visible(32, True, None, None))
    own = [x.chunk(4, 2)[rank] for x in (q, k, v, expected)]
    low = [x.bfloat16() for x in own[:3]]
    for call in CALLS.values():
        equal(call(*own[:3], causal=True), own[3])
        result = call(*low, causal=True)
        assert result.dtype == torch.bfloat16
        equal(result.double(), own[3], 3e-2)
        before = collectives.debug(True)
        try:
            equal(call(*own[:3], causal=True), own[3])
        finally:
            collectives.debug(before)
        with torch.autocast("cpu", torch.bfloat16):
            qkv = [x.float().requires_grad_() for x in own[:3]]
            out = call(*qkv, causal=True)
        out.sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in qkv)
    # A group of one, and a hybrid of one axis.
    one = ParallelMode.DATA_PARALLEL
    for call in (ulysses_attention, ring_attention):
        equal(call(q, k, v, causal=True, mode=one), expected)
    for size in (1, 4):
        register_hybrid_groups(size)
        equal(hybrid_attention(*own[:3], causal=True, ulysses_size=size), own[3])


def test_other_shapes_dtypes_and_groups_of_one(run_ranks: Run) -> None:
    run_ranks(check_variants, 4)


def check_own_attention() -> None:
    rank, _ = start(2)
    x, small = torch.ones(1, 4, 4, 4), torch.ones(1, 2, 4, 4)
    shard = shard_sequence(torch.zeros(1, 8), cu_seqlens=torch.tensor([0, 3, 8]))
    out = ulysses_attention(x, small, small, causal=True, shard=shard, attention=spy)
    assert out[0, 0, :, 0].tolist() == ([3, 3, 3, 5] if rank == 0 else [5] * 4)


def test_any_attention_sees_one_document_at_a_time(run_ranks: Run) -> None:
    run_ranks(check_own_attention, 2)


def check_memory(size: int) -> dict[tuple[str, str], int]:
    start(size)
    found = {}
    for call, scheme in itertools.product((ring_attention, gathering), SCHEMES):
        qkv = [torch.randn(2, 4, 16, 8).requires_grad_() for _ in range(3)]
        shard = shard_sequence(torch.zeros(2, 16 * size), scheme=scheme)
        with Largest() as largest:
            call(*qkv, causal=True, shard=shard).sum().backward()
        found[call.__name__, scheme] = largest.bytes
    return found


def test_ring_memory_follows_the_local_length(run_ranks: Run) -> None:
    """The largest allocation of forward and backward does not grow with the number of ranks."""
    small, large = run_ranks(check_memory, 4, 2), run_ranks(check_memory, 4, 4)
    for name, scheme in small[0]:
        two, four = (max(found[name, scheme] for found in ranks) for ranks in (small, large))
        if name == "ring_attention":
            assert four <= two <= 2 * 4 * 16 * 16 * 4  # a block's scores, or less
        else:
            assert four == 2 * two


def test_zigzag_gives_every_rank_the_same_work() -> None:
    work = {}
    for scheme in SCHEMES:
        layout = SequenceLayout(scheme, size=4, local_length=8, length=32)
        spans = [layout.spans([rank]) for rank in range(4)]
        work[scheme] = [
            sum(
                pair.queries.length * pair.keys.length
                for keys in spans
                for pair in tile_pairs(queries, keys, 4, True, None)
            )
            for queries in spans
        ]
    assert work["zigzag"] == [144] * 4
    assert work["contiguous"] == [48, 112, 176, 240]


def check_compiled() -> None:
    rank, _ = start(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, against itself
        everything = {"scheme": "zigzag", "cu_seqlens": [0, 6, 15], "valid": torch.arange(15) > 4}
        for kv_heads, cut in ((4, None), (1, everything)):
            shard = None if cut is None else shard_sequence(torch.zeros(1, 15), **cut)
            generator = torch.Generator().manual_seed(rank)
            qkv = [
                torch.randn(1, heads, 8, 4, dtype=torch.float64, generator=generator).requires_grad_()
                for heads in (4, kv_heads, kv_heads)
            ]
            compiled = torch.compile(attend_and_mix, fullgraph=True, backend="aot_eager_decomp_partition")
            try:
                results = []
                for function in (attend_and_mix, compiled):
                    out = function(*qkv, shard)
                    results.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
            finally:
                torch._dynamo.reset()
            for eager, traced in zip(*results, strict=True):
                equal(traced, eager)
        # Ring attention breaks the graph, and works.
        torch.compile(lambda x: ring_attention(x, x, x, causal=True) * 2, backend="eager")(qkv[0].detach())
        torch._dynamo.reset()


def test_compile_traces_ulysses(run_ranks: Run) -> None:
    run_ranks(check_compiled, 2, timeout=120)


# --------------------------------------------------------------------------------------------------- slicing


def check_slices(size: int) -> None:
    rank, group = start(size)
    for scheme, length in itertools.product(SCHEMES, (1, 7, 8, 30, 32)):
        tokens = torch.arange(2 * length).view(2, length) + 1 + 1000 * group
        feature = tokens.double()[..., None].expand(2, length, 3)
        fixed = torch.ones(5)
        batch = nested_batch(tokens, feature, fixed)
        shard = shard_sequence(
            batch, scheme=scheme, leave=["nest.1.meta"], pad_values={"ordered.weights": -7}
        )
        own, layout = shard.batch, shard.layout
        pieces = size * (2 if scheme == "zigzag" else 1)
        assert layout.padded_length == layout.local_length * size
        assert 0 <= layout.padded_length - length < pieces
        chunks = torch.arange(layout.padded_length).chunk(pieces)
        held = [chunks[rank]] if scheme == "contiguous" else [chunks[rank], chunks[pieces - 1 - rank]]
        positions = torch.cat(held)
        assert shard.positions.tolist() == positions.tolist()
        assert shard.positions.dtype == torch.int64
        assert shard.valid.tolist() == (positions < length).tolist()

        def expect(value: float, positions: Tensor = positions, tokens: Tensor = tokens) -> Tensor:
            return F.pad(tokens, (0, 64), value=value)[:, positions]

        assert torch.equal(own["input_ids"], expect(0))
        for labels in (own["labels"], own["nest"][0].labels, own["record"].labels):
            assert torch.equal(labels, expect(-100))
        assert torch.equal(own["ordered"]["weights"], expect(-7))
        assert torch.equal(own["mask"], F.pad(tokens > 3, (0, 64))[:, positions])
        assert own["nest"][1]["meta"] is fixed
        assert (type(own["nest"][0]), type(own["ordered"])) == (Pair, OrderedDict)
        assert own["record"].rest[1:] == (None, "text", 3)
        whole = unshard_sequence(own, shard, leave=["nest.1.meta"])
        again = (whole.pop("record"), batch.pop("record"))
        assert torch.equal(again[0].labels, again[1].labels)
        assert torch.equal(again[0].rest[0], feature)
        for ours, given in zip(tree_leaves(whole), tree_leaves(batch), strict=True):
            assert ours.dtype == given.dtype
            assert torch.equal(ours, given)
        check_adjoint(scheme, length, rank, group)


@pytest.mark.parametrize("size", [2, 4])
def test_slices_go_back_together(run_ranks: Run, size: int) -> None:
    """Law of the numbers 10: one index for all; padded, never truncated; gradients are the adjoint's."""
    run_ranks(check_slices, 4, size)


def check_documents() -> list[Any]:
    start(2)
    row = torch.arange(10)[None]
    shard = shard_sequence(row, scheme="zigzag", cu_seqlens=torch.tensor([0, 3, 3, 10], dtype=torch.int32))
    assert shard.documents is not None
    valid = shard_sequence(row, valid=(row < 4).long()).valid
    assert valid.dtype == torch.bool
    changed = replace(shard, valid=torch.ones(6, dtype=torch.bool))
    assert (shard.ragged, changed.ragged) == (False, True)
    return [shard.positions.tolist(), shard.documents.tolist(), shard.document_positions.tolist(), valid]


def test_packed_documents(run_ranks: Run) -> None:
    first, second = run_ranks(check_documents, 2)
    assert first[:3] == [[0, 1, 2, 9, 10, 11], [0, 0, 0, 2, 3, 3], [0, 1, 2, 6, 0, 1]]
    assert second[:3] == [[3, 4, 5, 6, 7, 8], [2] * 6, [0, 1, 2, 3, 4, 5]]
    assert torch.cat([first[3], second[3]], 1)[0].tolist() == [True] * 4 + [False] * 6


# ------------------------------------------------------------------------------------------------------ loss


def check_token_mean(counts: list[int]) -> None:
    start(2)
    rank = get_global_rank()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, dtype=torch.float64, generator=generator)
    tokens = [torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in counts]

    def losses(tokens: Tensor, weight: Tensor) -> Tensor:
        return (tokens @ weight).square()

    everything = weight.clone().requires_grad_()
    expected = losses(torch.cat(tokens), everything).sum() / max(1, sum(counts))
    (gradient,) = torch.autograd.grad(expected, everything)
    mine = weight.clone().requires_grad_()
    own_sum = losses(tokens[rank], mine).sum()
    for count in (counts[rank], torch.tensor(counts[rank]), torch.tensor(float(counts[rank]))):
        mean = token_mean(own_sum, count)
        (own,) = torch.autograd.grad(mean.loss, mine, retain_graph=True)
        equal(collectives.all_reduce(own, TRAIN) / get_world_size(TRAIN), gradient, 1e-12)
        equal(mean.value, expected.detach(), 1e-12)
        assert mean.token_count == sum(counts)
        assert not mean.value.requires_grad
    # Zero divided by zero on a rank without tokens spoils nothing, and low precision rounds no factor.
    nan = (losses(tokens[rank], mine).mean() * counts[rank]).float()
    assert token_mean(nan, counts[rank]).loss.isfinite()
    half = token_mean(torch.ones((), dtype=torch.bfloat16), 3)
    assert (half.loss.item(), half.value.item()) == (pytest.approx(4 / 12, rel=1e-6), pytest.approx(1 / 3))


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0]])
def test_the_token_mean_has_the_gradient_of_one_process(run_ranks: Run, counts: list[int]) -> None:
    """Law of the numbers 2, for unequal tokens, and 8, for what is logged."""
    run_ranks(check_token_mean, 4, counts)


# ------------------------------------------------------------------------------------------------- bad input


def check_bad_input() -> None:
    start(2)
    x, ids = torch.ones(1, 4, 6, 2), torch.ones(2, 7, dtype=torch.int64)
    shard = shard_sequence(torch.ones(1, 12))
    other = shard_sequence(torch.ones(1, 20))
    cut: list[tuple[str, Callable[[], Any]]] = [
        (
            "7 tokens do not divide into 2 .* multiples of 2, such as 6 and 8",
            lambda: shard_sequence(ids, pad=False),
        ),
        ("into 4 pieces .* such as 4 and 8", lambda: shard_sequence(ids, pad=False, scheme="zigzag")),
        ("'contiguous' or 'zigzag', got 'zag'", lambda: shard_sequence(ids, scheme="zag")),
        ("has no dim 2", lambda: shard_sequence(ids, dim=2)),
        ("has no dim -3", lambda: shard_sequence(ids, dim=-3)),
        (r"'b' of shape \[3\] has no dim 1; .*leave=\['b'\]",
         lambda: shard_sequence({"a": ids, "b": ids[0, :3]})),
        (r"'1' .* 7 tokens along dim 1, but the tensor '0' has 6; .*leave=\['1'\]",
         lambda: shard_sequence([ids[:, :6].double(), ids])),
        ("has no tokens", lambda: shard_sequence(ids[:, :0])),
        ("has no tensor to cut", lambda: shard_sequence({"a": 3})),
        (r"leave names \['c'\]", lambda: shard_sequence({"a": ids}, leave=["c"])),
        ("must be a list of paths", lambda: shard_sequence({"a": ids}, leave="a")),
        ("'b' is a set, .*leave=", lambda: shard_sequence({"a": ids, "b": {1}})),
        (r"'1' holds integers under an index.*pad_values=\{'1': -100\}", lambda: shard_sequence(
            (ids, ids), pad_values={"0": 0})),
        ("such as .0, 3, 7.; got .0, 3, 6.", lambda: shard_sequence(ids, cu_seqlens=[0, 3, 6])),
        *(("cu_seqlens must be", lambda bad=bad: shard_sequence(ids, cu_seqlens=bad))
          for bad in ([1, 7], [0, 5, 3, 7], *map(torch.tensor, ([[0, 7]], [0.0, 7.0], 7)))),
        (r"valid must be bool .* of shape \(7,\) or \(batch, 7\)",
         lambda: shard_sequence(ids, valid=ids[:, :6])),
        ("valid must be bool", lambda: shard_sequence(ids, valid=torch.ones(7))),
        ("has 5 tokens along dim 1, but the shard has 6", lambda: unshard_sequence(ids[:, :5], shard)),
        ("has no dim 3", lambda: unshard_sequence(ids, shard, dim=3)),
        ("'replicated' or 'partial', got 'sum'", lambda: unshard_sequence(ids, shard, grad="sum")),  # type: ignore[arg-type]
        ("the shard is of 2 ranks", lambda: unshard_sequence(ids, replace(shard, mode=TP))),
        ("must be scalars", lambda: token_mean(torch.ones(2), 2)),
        ("must be scalars", lambda: token_mean(torch.ones(()), torch.ones(2))),
        ("ulysses_size=3 does not divide the 2 ranks .* do: 1, 2", lambda: register_hybrid_groups(3)),
        ("ulysses_size=0", lambda: hybrid_attention(x, x, x, causal=True, ulysses_size=0)),
        ("1, 3 .ring_attention", lambda: ulysses_attention(*[x[:, :3]] * 3, causal=True)),
    ]  # fmt: skip
    for message, call in cut:
        with pytest.raises(ShapeError, match=message):
            call()
    valid = replace(shard, valid=torch.ones(3, 6, dtype=torch.bool))
    attention: list[tuple[str, Callable[[Any], Any]]] = [
        ("must be .batch, heads", lambda f: f(x[0], x, x)),
        ("alike in batch and local sequence", lambda f: f(x, x[:, :, :5], x)),
        ("alike in batch", lambda f: f(x, x, torch.cat([x, x]))),
        ("one number of heads", lambda f: f(x, x, x[:, :2])),
        ("one head_dim", lambda f: f(x, x[..., :1], x)),
        ("nothing to attend to", lambda f: f(x[..., :0], x[..., :0], x)),
        ("4 query heads cannot share 3 .* one of 1, 2, 4", lambda f: f(x, x[:, :3], x[:, :3])),
        ("one floating-point dtype", lambda f: f(x, x.double(), x)),
        ("one floating-point dtype", lambda f: f(x.long(), x.long(), x.long())),
        ("the shard has 10 tokens on each of 2 ranks, but q has 6", lambda f: f(x, x, x, shard=other)),
        (r"valid is of shape \[3, 6\]", lambda f: f(x, x, x, shard=valid)),
        ("but q has 6 on each of the 1 ranks", lambda f: f(x, x, x, shard=shard, mode=TP)),
    ]  # fmt: skip
    for name, call in CALLS.items():
        for message, bad in attention:
            with pytest.raises(ShapeError, match=f"{name}_attention: .*{message}"):
                bad(lambda *args, call=call, **rest: call(*args, causal=True, **rest))
        with pytest.raises(ModeError, match="'NONE' was never set up"):
            call(x, x, x, causal=True, mode="NONE")
    for call in (shard_sequence, lambda x, mode: token_mean(x.sum(), 1, mode=mode)):
        with pytest.raises(ModeError, match="'NONE' was never set up"):
            call(x, mode="NONE")
    with pytest.raises(ModeError, match=r"call register_hybrid_groups\(2\) once on every rank, after"):
        hybrid_attention(x, x, x, causal=True, ulysses_size=2)


def test_bad_input_is_told_before_anything_is_sent(run_ranks: Run) -> None:
    run_ranks(check_bad_input, 2)
