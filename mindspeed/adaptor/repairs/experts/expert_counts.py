"""Defect: tokens per expert are counted in bf16, and a padding mask does not fit the counts.

Where: ``megatron.core.transformer.moe.router.TopKRouter``. Its buffers (counts behind the expert
bias and behind the global balancing loss) are fp32, but ``Float16Module`` converts them with the
model; only the bias is converted back (Megatron-LM PR 7081). ``_apply_expert_bias`` combines a map
``[tokens, experts]`` with a mask ``[tokens]`` (Megatron-LM PR 6114).
Symptom: silent; counts above 256 are rounded and stop at 65,536, so the bias of experts moves the
wrong way. With a padding mask: an error, or other tokens are left out where both sizes are equal.
Fix: the buffers of a router keep their dtype whatever converts the model, so nothing is rounded on
the way either; the mask gets a dimension for the experts.
Versions: 0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:expert-counts"


def keep_dtype_of_buffers(original: None) -> Callable[..., Any]:
    """Define ``_apply``, through which ``bfloat16()``, ``half()`` and ``to()`` change a router."""

    def _apply(self: Any, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        torch.nn.Module._apply(self, fn, recurse)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype != before[name].dtype:
                self._buffers[name] = before[name].to(device=buffer.device)
        return self

    return _apply


def mask_all_experts(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``_apply_expert_bias``: the mask, bool ``[tokens]``, is of every expert."""

    def _apply_expert_bias(
        self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        if padding_mask is not None and padding_mask.dim() == 1:
            padding_mask = padding_mask.unsqueeze(-1)
        original(self, routing_map, padding_mask=padding_mask)

    return _apply_expert_bias


_ROUTER = "megatron.core.transformer.moe.router:TopKRouter."
_VERSIONS = ">=0.16,<0.17"
PATCHES = (
    Patch(
        _ROUTER + "_apply",
        keep_dtype_of_buffers,
        OWNER,
        "counts of tokens per expert stay fp32 in a bf16 model",
        kind="define",
        versions=_VERSIONS,
    ),
    Patch(
        _ROUTER + "_apply_expert_bias",
        mask_all_experts,
        OWNER,
        "padding is not counted for any expert",
        expects="(self, routing_map, padding_mask)",
        versions=_VERSIONS,
    ),
)
