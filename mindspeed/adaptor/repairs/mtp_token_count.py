"""Multi-token prediction with context parallelism divides by each rank's own number of tokens.

The last tokens of a sequence have nothing to predict, and they all lie on one rank. Unless losses
are per token, Megatron divides each rank's loss of an additional token by the tokens that count on
that rank, so the mean over the ranks is not the mean over the sequence: loss and gradients differ
from those of one rank. The repair counts the tokens of the whole sequence, as a mean per rank. It
sends one number to each rank of the group per additional token and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.patch import Patch

OWNER = "repair:mtp-token-count"


def count_whole_sequence(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``roll_tensor``, which returns the rolled tensor and its sum."""

    def roll_tensor(
        tensor: torch.Tensor,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rolled, _ = original(
            tensor, shifts, dims, cp_group=cp_group, packed_seq_params=packed_seq_params
        )
        return rolled, mean_count(rolled, cp_group)

    return roll_tensor


def mean_count(mask: torch.Tensor, cp_group: Any) -> torch.Tensor:
    """The sum of a loss mask over the sequence, divided by the ranks that share it.

    Args:
        mask: ``[b, s / ranks]``. Whole numbers are tokens or positions, whose sum nobody reads.
        cp_group: The ranks that share the sequence; None for one rank.
    """
    total = mask.sum()
    if cp_group is None or cp_group.size() == 1 or not mask.is_floating_point():
        return total
    dist.all_reduce(total, group=cp_group)
    return total / cp_group.size()


PATCHES = (
    Patch(
        "megatron.core.transformer.multi_token_prediction:roll_tensor",
        count_whole_sequence,
        OWNER,
        "the loss of additional tokens is a mean over the sequence, not over means of its parts",
        expects="(tensor, shifts, dims, cp_group, packed_seq_params)",
        versions=">=0.16",
    ),
)
