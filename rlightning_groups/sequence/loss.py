"""The loss of unequally many tokens per rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlightning_groups.collectives import all_reduce
from rlightning_groups.context import get_world_size
from rlightning_groups.errors import ShapeError
from rlightning_groups.modes import ParallelMode

__all__ = ["TokenMean", "token_mean"]


class TokenMean(NamedTuple):
    """A token mean over ranks.

    Attributes:
        loss: to backpropagate; differs from rank to rank.
        value: the mean over all ranks' tokens, to log; equal on every rank, without a gradient, float64.
        token_count: all ranks' tokens; equal on every rank, float64.
    """

    loss: Tensor
    value: Tensor
    token_count: Tensor


def token_mean(
    loss_sum: Tensor,
    token_count: Tensor | int,
    *,
    mode: str = ParallelMode.TRAIN_DATA_PARALLEL,
) -> TokenMean:
    """The mean over the tokens of all ranks, for gradients that are then averaged over the ranks.

    Each rank's ``loss`` is its sum * number of ranks / number of all tokens: the mean of its gradients over
    the group, which the strategy takes, is the gradient of the global token mean. A plain mean per rank
    would weigh the tokens of a rank that has few of them more. One all-reduce of two numbers.

    Args:
        loss_sum: the sum of this rank's token losses, a scalar, such as ``cross_entropy(...,
            reduction="sum")``. It depends on the model on every rank, with no tokens too (the sum is then 0):
            the backward of sequence-parallel attention is a collective.
        token_count: how many tokens were summed; a scalar.
        mode: over whose ranks gradients are averaged.

    Returns:
        The loss to backpropagate and the value to log. Without a token anywhere both are 0, and so are the
        gradients.

    Raises:
        ShapeError: one of the two is no scalar.
        ModeError: this rank has no group of the mode.
    """
    size = get_world_size(mode)
    count = torch.as_tensor(token_count, device=loss_sum.device)
    if loss_sum.dim() or count.dim():
        raise ShapeError(
            f"token_mean: loss_sum and token_count must be scalars, got shapes {list(loss_sum.shape)} and "
            f"{list(count.shape)}; sum them first"
        )
    # A sum over no tokens may have come out as 0 / 0.
    own = torch.where(count > 0, loss_sum, torch.zeros_like(loss_sum))
    # float64 counts tokens exactly, whatever precision the model runs in.
    totals = all_reduce(torch.stack([own.detach().double(), count.detach().double()]), mode)
    total_loss, total = totals.unbind()
    share = torch.where(total > 0, 1 / total.masked_fill(total == 0, 1), torch.zeros_like(total))
    precise = torch.promote_types(own.dtype, torch.float32)
    return TokenMean(own * (size * share).to(precise), total_loss * share, total)
