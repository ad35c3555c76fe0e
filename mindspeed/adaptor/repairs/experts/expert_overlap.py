"""Defect: backward of overlapped expert communication is not completed.

Where: what ``--overlap-moe-expert-parallel-comm`` (and this library's ``--moe-fb-overlap``) runs.

* ``combined_1f1b.combined_1f1b_schedule_for_interleaved_pipelining`` tests the number of a model
  chunk for truth, so backwards of chunk 0 end without the reductions that are due then
  (Megatron-LM PR 4276). Symptom: gradients are reduced after the last backward, not during it.
* ``MoELayer.backward_dw`` computes the delayed weight gradients of experts, but not those of the
  projections to and from their latent size (``--moe-latent-size --delay-wgrad-compute``, PR 2977).
  Symptom: silent; the projections are not trained.
* ``TransformerConfig`` takes ``mtp_num_layers=0`` for multi-token prediction (PR 5912). Symptom: an
  assertion.
* ``fine_grained_callables.build_transformer_layer_callables`` applies the final norm in the part of
  experts that combines their rows, so a model whose last layer is dense
  (``--moe-layer-freq [0,1,1,0]``) has none (found here). Symptom: silent; a wrong loss, and a
  fiftieth of the gradient norm.

Fix: the end of the backward runs for chunk 0, too; projections compute their gradients on the
streams on which their backward ran; 0 layers are none; the last part of a dense layer applies the
final norm.
Versions: since 0.15; chunk 0 <0.18, projections 0.16, no layers <0.19, final norm since 0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind


def end_backward_of_chunk_0(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the combined forward and backward of the interleaved schedule."""

    def combined_1f1b_schedule_for_interleaved_pipelining(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = bind(original, args, kwargs)
        number = given.get("b_virtual_microbatch_id")
        if number is not None and given["get_model_chunk_id"](number, forward=False) == 0:
            given["backward_step_helper_postprocess"](number)
        return result

    return combined_1f1b_schedule_for_interleaved_pipelining


def compute_latent_projections(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MoELayer.backward_dw``.

    The projection from the latent size belongs to combine, which runs on the stream of
    communication; that to it belongs to the part with attention, router and shared experts.
    """

    def backward_dw(self: Any, routed_experts: bool = True, shared_experts: bool = False) -> None:
        from megatron.core.pipeline_parallel.utils import get_comm_stream

        original(self, routed_experts, shared_experts)
        if not self.config.moe_latent_size:
            return
        if routed_experts:
            with torch.cuda.stream(get_comm_stream()):
                self.fc2_latent_proj.backward_dw()
        if shared_experts:
            self.fc1_latent_proj.backward_dw()

    return backward_dw


def without_empty_prediction(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TransformerConfig.__post_init__``."""

    def __post_init__(self: Any) -> None:
        if self.mtp_num_layers == 0:
            self.mtp_num_layers = None
        original(self)

    return __post_init__


def norm_after_dense_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``build_transformer_layer_callables``."""

    def build_transformer_layer_callables(layer: Any) -> Any:
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.utils import make_viewless_tensor

        parts, weight_gradients = original(layer)
        if isinstance(layer.mlp, MoELayer):
            return parts, weight_gradients
        perceptron = parts[_PERCEPTRON]

        def last_part(node: Any, *args: Any, **kwargs: Any) -> Any:
            output = perceptron(node, *args, **kwargs)
            norm = node.chunk_state.model.decoder.final_layernorm
            if norm is None or not node.is_last_layer:
                return output
            return make_viewless_tensor(inp=norm(output), requires_grad=True, keep_graph=True)

        return [*parts[:_PERCEPTRON], last_part, *parts[_PERCEPTRON + 1 :]], weight_gradients

    return build_transformer_layer_callables


_PERCEPTRON = 2
"""Its place after attention and dispatch."""

PATCHES = (
    repair(
        "megatron.core.pipeline_parallel.combined_1f1b:"
        "combined_1f1b_schedule_for_interleaved_pipelining",
        end_backward_of_chunk_0,
        "gradients of model chunk 0 are reduced when they are complete",
        expects="(config, forward_step_func, data_iterator, model, num_microbatches, ...)",
        versions=">=0.15,<0.18",
    ),
    repair(
        "megatron.core.transformer.moe.moe_layer:MoELayer.backward_dw",
        compute_latent_projections,
        "delayed weight gradients of latent projections are computed",
        expects="(self, routed_experts, shared_experts)",
        versions=">=0.16,<0.17",
    ),
    repair(
        "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        without_empty_prediction,
        "0 layers of multi-token prediction are none",
        expects="(self)",
        versions=">=0.15,<0.19",
    ),
    repair(
        "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables",
        norm_after_dense_layer,
        "a last layer without experts is followed by the final norm",
        expects="(layer)",
        versions=">=0.16",
    ),
)
