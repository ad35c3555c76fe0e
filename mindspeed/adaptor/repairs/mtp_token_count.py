"""Defect: multi-token prediction divides its loss by the wrong number of tokens.

Where: ``megatron.core.transformer.multi_token_prediction.roll_tensor``, whose second result, the
number of tokens with a target, is that of one context-parallel rank's shard. The last tokens of a
sequence have no target, and they are all on one rank. A micro-batch without any target has none
(Megatron-LM PR 3396).
Symptom: unless losses are per token, the mean over the ranks is not the mean over the sequence:
loss and gradients differ from those of one rank. Without targets loss and gradients are NaN.
Fix: the count is all-reduced over the context-parallel group and divided by its size; zero becomes
one. Cost: one scalar all-reduce per predicted token and micro-batch.
Versions: >=0.16.
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
    """The sum of a loss mask over the sequence, divided by the ranks that share it; 1 for 0.

    Args:
        mask: ``[b, s / ranks]``, floating dtype. Integer tensors are tokens or positions, whose sum
            is not used.
        cp_group: The ranks that share the sequence; None for one rank.
    """
    total = mask.sum()
    if not mask.is_floating_point():
        return total
    if cp_group is not None and cp_group.size() > 1:
        dist.all_reduce(total, group=cp_group)
        total = total / cp_group.size()
    return torch.where(total == 0, 1, total)


PATCHES = (
    Patch(
        "megatron.core.transformer.multi_token_prediction:roll_tensor",
        count_whole_sequence,
        OWNER,
        "the MTP loss is a mean over the whole sequence, and zero without targets",
        expects="(tensor, shifts, dims, cp_group, packed_seq_params)",
        versions=">=0.16",
    ),
)
