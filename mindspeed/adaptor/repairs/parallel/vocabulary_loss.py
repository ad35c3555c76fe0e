"""Defect: the vocabulary-parallel loss takes one rank's part of the vocabulary for the whole.

Where: ``megatron.core.tensor_parallel.cross_entropy``: label smoothing spreads over the size, and
with the mean, of one rank's part (Megatron-LM PR 7466). ``LanguageModule`` passes logits that are
gathered (``parallel_output=False``) to it as if they were a part (Megatron-LM issue 7452).
Symptom: silent; with smoothing the ranks have different losses, none of them right; with gathered
logits the loss is too large by the logarithm of the tensor-parallel size.
Fix: smoothing is added to the plain loss, with one all-reduce over the whole vocabulary; gathered
logits are split again.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:vocabulary-loss"


def smooth_over_all_labels(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``vocab_parallel_cross_entropy`` of logits ``[s, b, v / ranks]``."""

    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
    ) -> torch.Tensor:
        from megatron.core import parallel_state

        ranks = parallel_state.get_tensor_model_parallel_world_size()
        if not label_smoothing or ranks == 1:
            return original(vocab_parallel_logits, target, label_smoothing)
        # Before the loss, which works in place on its logits.
        rank = parallel_state.get_tensor_model_parallel_rank()
        excess = _excess(vocab_parallel_logits, target, rank, ranks)
        labels = vocab_parallel_logits.size(-1) * ranks
        share = label_smoothing * labels / (labels - 1)
        return original(vocab_parallel_logits, target) + share * excess

    return vocab_parallel_cross_entropy


def _excess(logits: torch.Tensor, target: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The target's logit less the mean of all: what the mean loss of all labels has in addition.

    Args:
        logits: ``[s, b, v / ranks]``, any floating dtype.
        target: ``[s, b]``, int64.
        rank: This rank's part of the vocabulary.
        ranks: Number of parts.

    Returns:
        ``[s, b]``, fp32, equal on all ranks.
    """
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    logits = logits.float()
    labels = logits.size(-1)
    local = target - rank * labels
    inside = (local >= 0) & (local < labels)
    # Indexing keeps no logits for the backward, which the loss overwrites.
    token = torch.arange(target.numel(), device=target.device).view_as(target)
    own = logits.flatten(0, -2)[token, local.clamp(0, labels - 1)]
    part = own * inside - logits.sum(-1) / (labels * ranks)
    whole: torch.Tensor = reduce_from_tensor_model_parallel_region(part)
    return whole


def split_gathered(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``LanguageModule.compute_language_model_loss`` of logits ``[s, b, v]`` or a part."""

    def compute_language_model_loss(
        self: Any, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        from megatron.core import tensor_parallel

        ranks = self.config.tensor_model_parallel_size
        if ranks > 1 and logits.size(-1) == getattr(self, "vocab_size", None):
            logits = tensor_parallel.scatter_to_tensor_model_parallel_region(logits)
        return original(self, labels, logits)

    return compute_language_model_loss


PATCHES = (
    Patch(
        "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
        smooth_over_all_labels,
        OWNER,
        "label smoothing spreads over the whole vocabulary",
        expects="(vocab_parallel_logits, target, label_smoothing)",
    ),
    Patch(
        "megatron.core.models.common.language_module.language_module:"
        "LanguageModule.compute_language_model_loss",
        split_gathered,
        OWNER,
        "gathered logits are a part again before the vocabulary-parallel loss",
        expects="(self, labels, logits)",
    ),
)
