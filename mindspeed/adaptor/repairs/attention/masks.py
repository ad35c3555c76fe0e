"""Defects of masks of tokens.

Defect: the padding mask of a model is not sharded like its hidden states.

Where: ``GPTModel._preprocess``, under sequence parallelism. It shards the mask on the stage of the
embedding only (Megatron-LM PR 5563), and over the global tensor-parallel group instead of that of
the model's ``pg_collection`` (finding 5 of Megatron-LM issue 7452).
Symptom: routers of later stages mask other tokens or fail on the shape; with a group that has other
ranks they silently mask the tokens of another rank.
Fix: every stage takes the part of its rank in the model's group.
Versions: >=0.16.

Defect: image patches see earlier patches only.

Where: ``megatron.core.models.vision.vit_layer_specs.get_vit_layer_with_local_spec`` has a causal
mask; its twin for Transformer Engine has none (Megatron-LM PR 4395).
Symptom: silent, with ``--transformer-impl local``.
Fix: no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import repair

_PLACE = 5  # of the mask in what _preprocess returns


def shard_masks(original: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Wrap ``_preprocess``: its bool mask ``[b, s]`` comes back as ``[b, s / tp]``."""

    def _preprocess(
        self: Any,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *args: Any,
        padding_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        if padding_mask is None or not self.config.sequence_parallel:
            return original(
                self, input_ids, position_ids, *args, padding_mask=padding_mask, **options
            )
        results = original(self, input_ids, position_ids, *args, padding_mask=None, **options)
        part = padding_mask.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()].contiguous()
        return (*results[:_PLACE], part, *results[_PLACE + 1 :])

    return _preprocess


def remove_mask(original: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap ``get_vit_layer_with_local_spec``."""

    def get_vit_layer_with_local_spec() -> Any:
        from megatron.core.transformer.enums import AttnMaskType

        spec = original()
        spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
        return spec

    return get_vit_layer_with_local_spec


PATCHES = (
    repair(
        "megatron.core.models.gpt.gpt_model:GPTModel._preprocess",
        shard_masks,
        "padding masks are sharded like hidden states, on every pipeline stage",
        expects="(self, input_ids, position_ids, ...)",
        versions=">=0.16",
    ),
    repair(
        "megatron.core.models.vision.vit_layer_specs:get_vit_layer_with_local_spec",
        remove_mask,
        "patches of an image see each other",
        expects="()",
    ),
)
