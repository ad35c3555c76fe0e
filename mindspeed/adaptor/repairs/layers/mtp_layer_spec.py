"""Defect: a layer of multi-token prediction has another attention than the last decoder layer.

Where: ``gpt_builders.py`` of Megatron-LM asks ``get_gpt_decoder_layer_specs`` of
``megatron.core.models.gpt.gpt_layer_specs`` for it, which knows ordinary attention only
(Megatron-LM PR 3026).
Symptom: silent; with ``--experimental-attention-variant`` and ``--mtp-num-layers`` the model is
another one than newer releases build, whose checkpoints do not fit.
Fix: the function returns the layers of the decoder.
Versions: >=0.16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:mtp-layer-spec"
NEEDED_WITH = ("mtp_num_layers", "experimental_attention_variant")


def return_layers_of_decoder(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_gpt_decoder_layer_specs``."""

    def get_gpt_decoder_layer_specs(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.experimental_attention_variant is None:
            return original(config, *args, **kwargs)
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

        whole = copy.copy(config)
        whole.pipeline_model_parallel_layout = SimpleNamespace(
            get_layer_id_list=lambda **options: range(config.num_layers)
        )
        block = specs.get_transformer_block_with_experimental_attention_variant_spec(whole)
        return block.layer_specs

    return get_gpt_decoder_layer_specs


PATCHES = (
    Patch(
        "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_layer_specs",
        return_layers_of_decoder,
        OWNER,
        "multi-token prediction has the attention of the last decoder layer",
        expects="(config, ...)",
        versions=">=0.16",
    ),
)
