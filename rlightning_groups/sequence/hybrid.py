"""Attention by all-to-all inside small groups and around a ring of such groups.

All-to-all costs least where links are fast, but needs enough heads; a ring needs none, and hides slow links
behind its arithmetic. Together they take more ranks than there are heads.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rlightning_groups.context import (
    ParallelContext,
    get_local_rank,
    get_ranks_in_group,
    get_world_size,
    is_initialized,
)
from rlightning_groups.errors import ModeError, ShapeError
from rlightning_groups.group_initializer import RankListInitializer
from rlightning_groups.modes import ParallelMode
from rlightning_groups.sequence._heads import (
    check_heads,
    check_tensors,
    gather_heads,
    gather_valid,
    own_valid,
    scatter_heads,
)
from rlightning_groups.sequence.ring import attend_around
from rlightning_groups.sequence.shard import SequenceShard

__all__ = ["SEQUENCE_RING", "SEQUENCE_ULYSSES", "hybrid_attention", "register_hybrid_groups"]

SEQUENCE_ULYSSES = "SEQUENCE_ULYSSES"
"""Mode of neighbours in the sequence group, who swap tokens for heads."""

SEQUENCE_RING = "SEQUENCE_RING"
"""Mode of ranks in the same place of their SEQUENCE_ULYSSES group, around whom keys and values travel."""


class _Part(RankListInitializer):
    """Some ranks of the group of another mode."""

    def __init__(self, rank: int, world_size: int, mode: str, ranks: list[int]) -> None:
        super().__init__(rank, world_size)
        self.mode, self.ranks = mode, ranks

    def own_ranks(self) -> list[int]:
        """World ranks of the part."""
        return self.ranks


def register_hybrid_groups(ulysses_size: int, *, mode: str = ParallelMode.SEQUENCE_PARALLEL) -> None:
    """Make the groups that :func:`hybrid_attention` needs.

    Every rank of the world calls it, once the context runs: after ``ParallelContext().initialize`` or, under
    the strategy, in ``configure_model``. Groups that are there already are kept. A sequence group of world
    ranks [0, 1, 2, 3] and ``ulysses_size=2`` give SEQUENCE_ULYSSES groups [0, 1] and [2, 3], SEQUENCE_RING
    groups [0, 2] and [1, 3]; their name is the mode and the size, so that several sizes can be there.

    Args:
        ulysses_size: ranks that swap tokens for heads; the rest of the sequence axis is a ring.
        mode: whose group shares the sequence; every rank of the world has one.

    Raises:
        ShapeError: the size does not divide the group.
        ModeError: this rank has no group of the mode.
        ContextError: the context is not initialized.
        AgreementError: the ranks asked for different sizes.
    """
    ranks, place = get_ranks_in_group(mode), get_local_rank(mode)
    _check_size("register_hybrid_groups", ulysses_size, len(ranks), mode)
    first = place // ulysses_size * ulysses_size
    parts = {
        SEQUENCE_ULYSSES: ranks[first : first + ulysses_size],
        SEQUENCE_RING: ranks[place % ulysses_size :: ulysses_size],
    }
    name = _name(mode, ulysses_size)
    for part_mode, part in parts.items():
        if not _is_there(part_mode, name):
            ParallelContext().register(partial(_Part, mode=part_mode, ranks=part), name)


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    ulysses_size: int,
    shard: SequenceShard | None = None,
    mode: str = ParallelMode.SEQUENCE_PARALLEL,
) -> Tensor:
    """Attention over the whole sequence, by all-to-all among neighbours and around a ring of neighbourhoods.

    ``ulysses_size`` neighbours in the sequence group swap tokens for heads, as
    :func:`~rlightning_groups.sequence.ulysses_attention` does; then keys and values of those heads travel
    around the ring of the neighbourhoods, as in :func:`~rlightning_groups.sequence.ring_attention`, whose
    notes hold here too. Call :func:`register_hybrid_groups` once before.

    Args:
        q: queries, (batch, heads, local sequence, head_dim); heads divide over ``ulysses_size`` ranks.
        k: keys, the same shape, or with fewer heads that divide the queries'. Where they do not divide over
            ``ulysses_size`` ranks they are repeated, and their gradients summed.
        v: values, as the keys; their head_dim may be another.
        causal: whether a token sees only itself and what is before it.
        ulysses_size: ranks that swap tokens for heads.
        shard: how the sequence was cut: its padding, its order, its documents. ``None``: rank 0 holds the
            first tokens, and there is no padding.
        mode: whose group shares the sequence.

    Returns:
        A tensor like ``q`` with the head_dim of ``v``; zeros, with zero gradients, for padding and for tokens
        that see none.

    Raises:
        ShapeError: shapes or dtypes that do not fit together, heads that do not divide, a size that does not
            divide the group, or a shard of other tokens.
        ModeError: this rank has no group of the mode, or the groups were not registered.
    """
    layout = check_tensors("hybrid_attention", q, k, v, shard, mode)
    _check_size("hybrid_attention", ulysses_size, layout.size, mode)
    check_heads("hybrid_attention", q.shape[1], ulysses_size, f"ulysses_size={ulysses_size} ranks")
    name = _name(mode, ulysses_size)
    if not (_is_there(SEQUENCE_ULYSSES, name) and _is_there(SEQUENCE_RING, name)):
        of_mode = "" if mode == ParallelMode.SEQUENCE_PARALLEL else f", mode={mode!r}"
        raise ModeError(
            f"hybrid_attention needs the groups of ulysses_size={ulysses_size} over {mode}; call "
            f"register_hybrid_groups({ulysses_size}{of_mode}) once on every rank, after initialize"
        )
    neighbourhoods = [range(i, i + ulysses_size) for i in range(0, layout.size, ulysses_size)]
    valid = gather_valid(own_valid(shard), SEQUENCE_ULYSSES, name)
    q, k, v = scatter_heads(q, k, v, SEQUENCE_ULYSSES, name)
    out = attend_around(
        "hybrid_attention", q, k, v, valid, causal, layout, neighbourhoods, SEQUENCE_RING, name
    )
    return gather_heads(out, SEQUENCE_ULYSSES, name)


def _name(mode: str, ulysses_size: int) -> str:
    return f"{mode}/{ulysses_size}"


def _is_there(mode: str, name: str) -> bool:
    if not is_initialized(mode):
        return False
    try:
        return get_world_size(mode, name) > 0
    except ModeError:
        return False


def _check_size(call: str, ulysses_size: int, size: int, mode: str) -> None:
    if not isinstance(ulysses_size, int) or ulysses_size < 1 or size % ulysses_size:
        fit = ", ".join(str(x) for x in range(1, size + 1) if size % x == 0)
        raise ShapeError(
            f"{call}: ulysses_size={ulysses_size!r} does not divide the {size} ranks of {mode}; sizes that "
            f"do: {fit}"
        )
