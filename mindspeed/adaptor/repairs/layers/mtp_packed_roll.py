"""Defect: multi-token prediction rolls packed documents at the boundaries without padding.

Where: ``megatron.core.transformer.multi_token_prediction._roll_tensor_packed_seq`` takes
``cu_seqlens_q``. Where documents are padded, the tensors lie at ``cu_seqlens_q_padded``
(Megatron-LM issues 6205 and 4495).
Symptom: silent; from the second document on, tokens, labels and masks move across the borders of
documents, and the end of a document is not moved.
Fix: the boundaries of the tensors.
Versions: >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mindspeed.adaptor.patch import repair


def roll_within_padded_documents(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_roll_tensor_packed_seq``."""

    def _roll_tensor_packed_seq(
        tensor: Any,
        shifts: int,
        dims: int,
        packed_seq_params: Any,
        cp_group: Any = None,
        **named: Any,
    ) -> Any:
        padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
        if padded is not None:
            packed_seq_params = replace(packed_seq_params, cu_seqlens_q=padded)
        return original(tensor, shifts, dims, packed_seq_params, cp_group, **named)

    return _roll_tensor_packed_seq


PATCHES = (
    repair(
        "megatron.core.transformer.multi_token_prediction:_roll_tensor_packed_seq",
        roll_within_padded_documents,
        "multi-token prediction stays within padded documents",
        expects="(tensor, shifts, dims, packed_seq_params, cp_group, ...)",
        versions=">=0.16",
    ),
)
