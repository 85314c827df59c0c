"""What all the attention calls check, and the way from tokens to heads and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlightning_groups.collectives import all_gather, all_to_all
from rlightning_groups.context import get_world_size
from rlightning_groups.errors import ShapeError
from rlightning_groups.sequence.layout import SequenceLayout
from rlightning_groups.sequence.shard import SequenceShard


def check_tensors(
    call: str, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard | None, mode: str
) -> SequenceLayout:
    """Check what can be checked without the other ranks, and say how the sequence lies over them.

    Args:
        call: who asks, for messages.
        q: queries, (batch, heads, local sequence, head_dim).
        k: keys, the same with as many heads or fewer.
        v: values; another head_dim is allowed.
        shard: how the sequence was cut; ``None`` is contiguously, without padding.
        mode: whose group shares it.

    Raises:
        ShapeError: shapes or dtypes that do not fit together or to the shard.
        ModeError: this rank has no group of the mode.
    """
    size = get_world_size(mode)
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if any(x.dim() != 4 for x in (q, k, v)) or any(
        (x.shape[0], x.shape[2]) != (q.shape[0], q.shape[2]) for x in (k, v)
    ):
        raise ShapeError(
            f"{call}: q, k and v must be (batch, heads, local sequence, head_dim), alike in batch and local "
            f"sequence; got {shapes}"
        )
    if q.shape[3] != k.shape[3] or k.shape[1] != v.shape[1]:
        raise ShapeError(f"{call}: q and k must have one head_dim, k and v one number of heads; got {shapes}")
    if 0 in q.shape or 0 in v.shape:
        raise ShapeError(f"{call}: there is nothing to attend to in {shapes}")
    heads, groups = q.shape[1], k.shape[1]
    if heads % groups:
        raise ShapeError(
            f"{call}: {heads} query heads cannot share {groups} key and value heads; key and value heads "
            f"must be one of {_divisors(heads)}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ShapeError(
            f"{call}: q, k and v must be of one floating-point dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if shard is None:
        return SequenceLayout("contiguous", size, q.shape[2], size * q.shape[2])
    layout = shard.layout
    if (layout.size, layout.local_length) != (size, q.shape[2]):
        raise ShapeError(
            f"{call}: the shard has {layout.local_length} tokens on each of {layout.size} ranks, but q has "
            f"{q.shape[2]} on each of the {size} ranks of {mode}; pass the shard these tokens were cut with"
        )
    rows = (1, q.shape[0])
    if shard.valid.shape[-1] != q.shape[2] or (shard.valid.dim() == 2 and shard.valid.shape[0] not in rows):
        raise ShapeError(
            f"{call}: the shard's valid is of shape {list(shard.valid.shape)}, but q of {list(q.shape)} "
            f"needs ({q.shape[2]},) or ({q.shape[0]}, {q.shape[2]})"
        )
    return layout


def check_heads(call: str, heads: int, size: int, what: str) -> None:
    """Check that query heads divide over the ranks.

    Args:
        call: who asks, for messages.
        heads: number of query heads.
        size: number of ranks.
        what: the ranks in words.

    Raises:
        ShapeError: they do not.
    """
    if heads % size:
        raise ShapeError(
            f"{call}: {heads} heads do not divide over {what}; use a multiple of {size} heads, or over "
            f"{heads} heads a size out of {_divisors(heads)} (ring_attention takes any number of heads)"
        )


def own_valid(shard: SequenceShard | None) -> Tensor | None:
    """Which local tokens are real, (1 or batch, local length), where the layout does not say it all."""
    if shard is None or not shard.ragged:
        return None
    return shard.valid if shard.valid.dim() == 2 else shard.valid.unsqueeze(0)


def scatter_heads(
    q: Tensor, k: Tensor, v: Tensor, mode: str, name: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """From some tokens and all heads to all tokens and some heads.

    Key and value heads that do not divide over the ranks are repeated until they do; a rank gets those that
    its query heads need.

    Args:
        q: queries, (batch, heads, local sequence, head_dim).
        k: keys.
        v: values.
        mode: whose group shares the tokens.
        name: which one.

    Returns:
        The three, (batch, own heads, sequence, head_dim), tokens by rank.
    """
    size, groups = get_world_size(mode, name), k.shape[1]
    if size == 1:
        return q, k, v
    repeats = math.lcm(groups, size) // groups
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    if k.shape[3] != v.shape[3]:
        q, k = _scatter_together([q, k], size, mode, name)
        return q, k, all_to_all(v, 1, 2, mode, name=name)
    q, k, v = _scatter_together([q, k, v], size, mode, name)
    return q, k, v


def gather_heads(out: Tensor, mode: str, name: str | None = None) -> Tensor:
    """From all tokens and some heads back to some tokens and all heads.

    Args:
        out: (batch, own heads, sequence, head_dim), tokens by rank.
        mode: whose group shares the tokens.
        name: which one.
    """
    return all_to_all(out, 2, 1, mode, name=name)


def gather_valid(valid: Tensor | None, mode: str, name: str | None = None) -> Tensor | None:
    """Which tokens are real, of all ranks, (1 or batch, sequence), tokens by rank.

    Args:
        valid: which local tokens are real.
        mode: whose group shares the tokens.
        name: which one.
    """
    if valid is None:
        return None
    # Not every backend can send bools.
    return all_gather(valid.to(torch.uint8), 1, mode, name=name).bool()


def _scatter_together(xs: list[Tensor], size: int, mode: str, name: str | None) -> list[Tensor]:
    """One all-to-all for all: fewer, larger messages. Heads are put in an order by receiving rank."""
    parts = [x.unflatten(1, (size, -1)) for x in xs]
    packed = all_to_all(torch.cat(parts, 2).flatten(1, 2), 1, 2, mode, name=name)
    return list(packed.split([part.shape[2] for part in parts], 1))


def _divisors(number: int) -> str:
    return ", ".join(str(x) for x in range(1, number + 1) if number % x == 0)
