"""Defects of the gate of attention outputs.

Defect: the gate of attention outputs has heads of other ranks.

Where: ``megatron.core.transformer.attention.SelfAttention.get_query_key_value_tensors``. With fewer
key/value groups than tensor-parallel ranks a rank assembles the queries and gates of a group and
takes its own heads of the queries only (Megatron-LM PR 3575).
Symptom: an error in ``view`` in the first forward pass.
Fix: the same heads of the gate.
Versions: 0.16.

Defect: Muon splits the weight of queries, keys and values as if attention had no output gate.

Where: ``megatron.core.optimizer.muon.get_megatron_muon_optimizer`` takes three parts a group;
``--attention-output-gate`` adds a fourth between queries and keys (Megatron-LM PR 4728).
Symptom: the wrong rows are made orthogonal together, silently where the number of rows can be
divided by three parts, else an error in ``view``.
Fix: four parts.
Versions: 0.16 (Muon of newer releases is refused).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind

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


def split_off_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_megatron_muon_optimizer``."""

    def get_megatron_muon_optimizer(*args: Any, **kwargs: Any) -> Any:
        chained = original(*args, **kwargs)
        (*_, chunk) = bind(original, args, kwargs)["model_chunks"]
        if chunk.config.attention_output_gate:
            for wrapper in chained.chained_optimizers:
                optimizer = wrapper.optimizer
                if shapes := getattr(optimizer, "qkv_split_shapes", None):
                    optimizer.qkv_split_shapes = [shapes[0], *shapes]
        return chained

    return get_megatron_muon_optimizer


PATCHES = (
    repair(
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
        take_heads_of_gate,
        "a rank gates the heads that it has",
        expects="(self, hidden_states, key_value_states, output_gate, ...)",
        versions=">=0.16,<0.17",
    ),
    repair(
        "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
        split_off_gate,
        "Muon knows the gate of attention outputs as a matrix of its own",
        expects="(config, model_chunks, ...)",
        versions=">=0.16,<0.17",
    ),
)
