"""Defect: multi-token prediction divides its loss by the wrong number of tokens.

Where: ``megatron.core.transformer.multi_token_prediction.roll_tensor``, whose second result, the
number of tokens with a target, is that of one context-parallel rank's shard (Megatron-LM PR 7498).
The last tokens of a sequence have no target, and they are all on one rank. A micro-batch without
any target has none (PR 3396). ``GPTModel._postprocess`` divides by no number if losses are per
token: gradients are divided by the tokens of the main loss, which are more (PR 3159); without a
loss mask it predicts tokens whose label is negative (Megatron-Bridge issue 6103).
Symptom: unless losses are per token, the mean over the ranks is not the mean over the sequence:
loss and gradients differ from those of one rank. Per token, a document of ten tokens that count
from the first on has nine tenths of its weight. Without targets loss and gradients are NaN. A
framework that passes no mask trains the prediction of prompts and padding.
Fix: the count is all-reduced over the context-parallel group and divided by its size; zero becomes
one. If losses are per token, a rolled mask keeps the sum that it had. A mask that is not given is
made from the labels. Cost: one scalar all-reduce per predicted token and micro-batch, two if
losses are per token.
Versions: >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:mtp-token-count"
NEEDED_WITH = ("mtp_num_layers",)
_per_token = ContextVar("_per_token", default=False)  # while a model computes such losses


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
        return weighed(rolled, tensor, cp_group)

    return roll_tensor


def mask_by_labels(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GPTModel._postprocess``, which computes the losses."""

    def _postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bind(original, (self, *args), kwargs)
        if given["loss_mask"] is None and given["labels"] is not None:
            given["loss_mask"] = (given["labels"] >= 0).float()
        token = _per_token.set(self.config.calculate_per_token_loss)
        try:
            return original(**given)
        finally:
            _per_token.reset(token)

    return _postprocess


def weighed(
    rolled: torch.Tensor, before: torch.Tensor, cp_group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rolled loss mask and the number of tokens by which its loss is a mean.

    Args:
        rolled: ``[b, s / ranks]``, see :func:`mean_count`.
        before: The same before it was rolled.
        cp_group: The ranks that share the sequence; None for one rank.
    """
    count = mean_count(rolled, cp_group)
    if not (_per_token.get() and rolled.is_floating_point()):
        return rolled, count
    whole = mean_count(before, cp_group)
    return rolled * (whole / count), whole


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
    Patch(
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
        mask_by_labels,
        OWNER,
        "a token weighs in the MTP loss what it weighs in the loss",
        expects=(
            "(self, hidden_states, input_ids, position_ids, labels, rotary_pos_emb, "
            "rotary_pos_cos, rotary_pos_sin, mtp_in_postprocess, loss_mask, ...)"
        ),
        versions=">=0.16,<0.17",
    ),
)
