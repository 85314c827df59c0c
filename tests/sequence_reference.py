"""Attention of a single process, written for reading, the cases it is compared in, and how."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlightning_groups import ParallelContext, ParallelMode, collectives
from rlightning_groups.context import get_global_rank, get_local_rank
from rlightning_groups.sequence import (
    hybrid_attention,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)

SP = ParallelMode.SEQUENCE_PARALLEL
LENGTHS = (30, 31, 32, 64)
HEADS = ((4, 4), (4, 2), (6, 1), (8, 8))
BATCH, HEAD_DIM = 2, 3


@dataclass(frozen=True)
class Case:
    """One attention problem; tensors are drawn from ``seed``."""

    length: int
    heads: tuple[int, int]
    causal: bool
    scheme: str
    packed: bool
    ragged: bool
    seed: int = 0

    @property
    def cu_seqlens(self) -> list[int] | None:
        return [0, 5, 5, self.length // 2 + 2, self.length] if self.packed else None

    @property
    def valid(self) -> Tensor | None:
        """Rows of different lengths, one padded in front, and a hole: unlike on any two ranks."""
        if not self.ragged:
            return None
        valid = torch.ones(BATCH, self.length, dtype=torch.bool)
        valid[0, : self.length // 3] = False
        valid[1, 7], valid[1, self.length - 6 :] = False, False
        return valid

    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """Queries, keys and values, and the gradient of the result."""
        generator = torch.Generator().manual_seed(self.seed)
        counts = (self.heads[0], self.heads[1], self.heads[1], self.heads[0])
        shapes = [(BATCH, count, self.length, HEAD_DIM) for count in counts]
        *qkv, grad = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
        return qkv, grad


def cases(seed: int) -> Iterator[Case]:
    """Every length, heads, causal or not and scheme; packed or ragged each with every length and heads."""
    masks = ((False, False), (True, False), (True, True), (False, True))
    schemes = ("contiguous", "zigzag")
    for indices in itertools.product(range(4), range(4), range(2), range(2)):
        length, heads, causal, scheme = indices
        packed, ragged = masks[sum(indices) % 4]
        yield Case(LENGTHS[length], HEADS[heads], bool(causal), schemes[scheme], packed, ragged, seed)


def visible(length: int, causal: bool, cu_seqlens: list[int] | None, valid: Tensor | None) -> Tensor:
    """Which keys each query sees, (batch or 1, 1, queries, keys)."""
    index = torch.arange(length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool)
    if causal:
        mask = mask & (index[None, :] <= index[:, None])
    if cu_seqlens is not None:
        document = sum((index >= start).long() for start in cu_seqlens[1:-1])
        mask = mask & (document[None, :] == document[:, None])
    if valid is not None:
        mask = mask & valid[:, None, None, :] & valid[:, None, :, None]
    return mask


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -1e30)
    weights = scores.softmax(-1) * mask
    return weights @ v


def dense_results(case: Case) -> list[Tensor]:
    """The result and the gradients of queries, keys and values."""
    qkv, grad = case.tensors()
    qkv = [x.requires_grad_() for x in qkv]
    out = dense_attention(*qkv, visible(case.length, case.causal, case.cu_seqlens, case.valid))
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def start(size: int) -> tuple[int, int]:
    """Of four ranks: two sequence groups, one without rank 0, or one. Returns rank and a seed by group."""
    ParallelContext().initialize(sequence_parallel_size=size)
    return get_local_rank(SP), get_global_rank() // size


def equal(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


CALLS = {
    "ulysses": ulysses_attention,
    "ring": ring_attention,
    "hybrid": lambda *qkv, **rest: hybrid_attention(*qkv, ulysses_size=2, **rest),
}


def compare(call: Callable[..., Tensor], case: Case, expected: list[Tensor]) -> None:
    """Give each rank its slices, and compare result and gradients with the same slices of the dense ones."""
    qkv, grad = case.tensors()
    names = ("q", "k", "v", "grad", "out", "dq", "dk", "dv")
    batch = dict(zip(names, [*qkv, grad, *expected], strict=True))
    shard = shard_sequence(
        batch, dim=2, scheme=case.scheme, cu_seqlens=case.cu_seqlens, valid=case.valid, leave=()
    )
    own = shard.batch
    # As a projection leaves them: heads and tokens swapped in memory.
    q, k, v = (own[x].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in "qkv")
    out = call(q, k, v, causal=case.causal, shard=shard)
    results = [out, *torch.autograd.grad(out, (q, k, v), own["grad"])]
    for name, result in zip(("out", "dq", "dk", "dv"), results, strict=True):
        assert result.isfinite().all(), (name, case)
        equal(result, own[name])
    hidden = ~shard.valid.expand(2, -1)[:, None, :, None].expand_as(out)
    assert not out[hidden].any()
    assert not results[1][hidden].any()


def check_adjoint(scheme: str, length: int, rank: int, group: int) -> None:
    """<Sx, y> == <x, S'y> for slicing, and the same for putting together; padding counts nowhere."""
    generator = torch.Generator().manual_seed(group)
    x = torch.randn(2, length, dtype=torch.float64, generator=generator).requires_grad_()
    shard = shard_sequence(x, scheme=scheme)
    generator = torch.Generator().manual_seed(100 + rank)
    y = torch.randn(shard.batch.shape, dtype=torch.float64, generator=generator).requires_grad_()
    (gradient,) = torch.autograd.grad(shard.batch, x, y)
    left = collectives.all_reduce((shard.batch * y).sum(), SP)
    equal(left, (x * gradient).sum().detach())
    for grad in ("replicated", "partial"):
        whole = unshard_sequence(y, shard, grad=grad)  # type: ignore[arg-type]
        z = x.detach() * (1 if grad == "replicated" else rank + 1)
        (gradient,) = torch.autograd.grad(whole, y, z)
        total = collectives.all_reduce((y * gradient).sum(), SP)
        right = (whole * z).sum().detach()
        equal(total, right if grad == "replicated" else collectives.all_reduce(right, SP))
        assert not gradient[:, ~shard.valid].any()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return result


Pair = namedtuple("Pair", ["tokens", "labels"])


@dataclass(frozen=True)
class Record:
    labels: Tensor
    rest: Any = None


def nested_batch(tokens: Tensor, feature: Tensor, fixed: Tensor) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "labels": tokens,
        "mask": tokens > 3,
        "nest": [Pair(tokens, tokens), {"target": feature, "meta": fixed}],
        "record": Record(tokens, (feature, None, "text", 3)),
        "ordered": OrderedDict(weights=tokens),
    }


def gathering(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, shard: Any) -> Tensor:
    """All keys at once, to see that the measure would tell."""
    k, v = (collectives.gather_from(x, 2, SP, grad="partial") for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def spy(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    assert query.shape == key.shape == (1, 2, query.shape[2], 4)
    return value * query.shape[2]


def attend_and_mix(q: Tensor, k: Tensor, v: Tensor, shard: Any) -> Tensor:
    return ulysses_attention(q.sin(), k, v, causal=True, shard=shard).cos()
