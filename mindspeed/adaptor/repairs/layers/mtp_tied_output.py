"""Defect: tied embeddings with multi-token prediction (MTP) and pipeline parallelism.

Where: ``megatron.core.models.gpt.gpt_model.GPTModel.__init__``. The last stage holds a copy of the
embedding for MTP, which is also its output weight.
Symptom and fix:

* Megatron still allocates an unused weight for the output layer, and ``sharded_state_dict`` then
  raises because there should be none: no checkpoint can be saved. The weight is removed after
  construction, before gradient buffers and the optimizer are built.
* With gradient accumulation fusion, the output layer marks the weight's gradient as already added
  to ``main_grad``, and DDP drops the gradient of the embedding. Megatron sets ``zero_out_wgrad`` on
  a weight that is both with one pipeline stage only; it is set here, too.

Versions: >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:mtp-tied-output"


def needed(values: Mapping[str, Any]) -> bool:
    """Whether some stage has multi-token prediction and a copy of the embedding."""
    stages = values.get("pipeline_model_parallel_size") or 1
    tied = not values.get("untie_embeddings_and_output_weights")
    return bool(values.get("mtp_num_layers")) and stages > 1 and tied


def share_last_stage_weight(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GPTModel.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        copies = self.mtp_process and self.post_process and not self.pre_process
        if copies and self.share_embeddings_and_output_weights:
            self.output_layer.register_parameter("weight", None)
            self.embedding.word_embeddings.weight.zero_out_wgrad = True

    return __init__


PATCHES = (
    Patch(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        share_last_stage_weight,
        OWNER,
        "a last stage with MTP has one weight for embedding and output",
        expects="(self, config, transformer_layer_spec, vocab_size, max_sequence_length, ...)",
        versions=">=0.16",
    ),
)
