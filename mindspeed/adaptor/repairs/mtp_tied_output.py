"""Tied embeddings, multi-token prediction and pipeline stages: no checkpoints, lost gradients.

The last stage has a copy of the embedding for multi-token prediction, and that copy is its output
weight, too. Two things go wrong there:

* Megatron still allocates a weight for the output layer, which nothing computes with, and then
  stops in ``sharded_state_dict`` because there should be none. The repair removes it when the model
  is built, before gradient buffers and optimizer count it.
* With fused gradient accumulation, the product of the output layer says that the weight's gradient
  is in ``main_grad``, and DDP drops what the embedding adds. Megatron marks a weight that is both
  (``zero_out_wgrad``) where there is one stage only; the repair marks this one.
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


def one_weight_of_the_last_stage(original: Callable[..., None]) -> Callable[..., None]:
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
        one_weight_of_the_last_stage,
        OWNER,
        "a last stage with multi-token prediction has one weight for embedding and output",
        expects="(self, config, transformer_layer_spec, vocab_size, max_sequence_length, ...)",
        versions=">=0.16",
    ),
)
