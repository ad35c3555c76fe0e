"""Defect: recomputing a layer of multi-token prediction fails with packed documents.

Where: ``megatron.core.transformer.multi_token_prediction.MultiTokenPredictionLayer.
_checkpointed_forward`` hands all arguments of the layer to the checkpoint, which saves tensors only
(Megatron-LM PR 4593); the boundaries of documents are none.
Symptom: a TypeError in the first forward pass.
Fix: what is no tensor is bound to the function that runs again.
Versions: >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:mtp-recompute"


def needed(values: Mapping[str, Any]) -> bool:
    """Whether layers of multi-token prediction are recomputed."""
    return bool(values.get("mtp_num_layers")) and values.get("recompute_granularity") == "full"


def checkpoint_tensors_only(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_checkpointed_forward``."""

    def _checkpointed_forward(self: Any, forward_func: Any, **arguments: Any) -> Any:
        tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
        others = {k: v for k, v in arguments.items() if k not in tensors}

        def forward(*values: Any, **named: Any) -> Any:
            return forward_func(**dict(zip(tensors, values, strict=False)), **named, **others)

        return original(self, forward, **tensors)

    return _checkpointed_forward


PATCHES = (
    Patch(
        "megatron.core.transformer.multi_token_prediction:"
        "MultiTokenPredictionLayer._checkpointed_forward",
        checkpoint_tensors_only,
        OWNER,
        "layers of multi-token prediction are recomputed with packed documents",
        expects="(self, forward_func, *args, **kwargs)",
        versions=">=0.16,<0.17",
    ),
)
