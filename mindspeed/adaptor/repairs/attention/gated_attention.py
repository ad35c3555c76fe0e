"""Defect: the gate of attention outputs has heads of other ranks.

Where: ``megatron.core.transformer.attention.SelfAttention.get_query_key_value_tensors``. With fewer
key/value groups than tensor-parallel ranks a rank assembles the queries and gates of a group and
takes its own heads of the queries only (Megatron-LM PR 3575).
Symptom: an error in ``view`` in the first forward pass.
Fix: the same heads of the gate.
Versions: >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:gated-attention"
NEEDED_WITH = ("attention_output_gate",)


def take_heads_of_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``SelfAttention.get_query_key_value_tensors``."""

    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if len(found) != 4:
            return found
        query, key, value, gate = found  # query and gate: [s, b, heads, n]
        heads, sharing = query.shape[2], gate.shape[2] // query.shape[2]
        first = self.pg_collection.tp.rank() % sharing * heads
        return query, key, value, gate[:, :, first : first + heads]

    return get_query_key_value_tensors


PATCHES = (
    Patch(
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
        take_heads_of_gate,
        OWNER,
        "a rank gates the heads that it has",
        expects="(self, hidden_states, key_value_states, output_gate, ...)",
        versions=">=0.16",
    ),
)
