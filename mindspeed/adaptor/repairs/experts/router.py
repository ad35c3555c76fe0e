"""Defects of what routers count and log.

Defect: tokens per expert are counted in bf16, and a padding mask does not fit the counts.

Where: ``megatron.core.transformer.moe.router.TopKRouter``. Its buffers (counts behind the expert
bias and behind the global balancing loss) are fp32, but ``Float16Module`` converts them with the
model; only the bias is converted back (Megatron-LM PR 7081). ``_apply_expert_bias`` combines a map
``[tokens, experts]`` with a mask ``[tokens]`` (Megatron-LM PR 6114).
Symptom: silent; counts above 256 are rounded and stop at 65,536, so the bias of experts moves the
wrong way. With a padding mask: an error, or other tokens are left out where both sizes are equal.
Fix: the buffers of a router keep their dtype whatever converts the model, so nothing is rounded on
the way either; the mask gets a dimension for the experts.
Versions: masks came with 0.16, and are right since 0.20.

Defect: the log of router losses has another size on stages without experts.

Where: ``megatron.core.transformer.moe.moe_utils.track_moe_metrics`` makes one value a transformer
layer where a stage has recorded nothing; routers record one more for each layer of multi-token
prediction (Megatron-LM PR 3401).
Symptom: with multi-token prediction and a pipeline stage without experts the ranks reduce tensors
of different sizes: they wait for ever, or the report ends in an error.
Fix: stages without experts have the values of all layers.
Versions: <0.17.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed import device
from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter."


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


def count_predicted_layers(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``track_moe_metrics``."""

    def track_moe_metrics(*args: Any, **kwargs: Any) -> None:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        given = bind(original, args, kwargs)
        if given["force_initialize"] and given["mtp_num_layers"]:
            layers = given["num_layers"] + given["mtp_num_layers"]
            tracker = get_moe_layer_wise_logging_tracker()
            for name in set(given["track_names"] or ()) - tracker.keys():
                tracker[name] = {
                    "values": torch.zeros(layers, device=device.current().torch_device()),
                    "reduce_group": None,
                    "avg_group": None,
                    "reduce_group_has_dp": False,
                }
        original(*args, **kwargs)

    return track_moe_metrics


PATCHES = (
    repair(
        _ROUTER + "_apply",
        keep_dtype_of_buffers,
        "counts of tokens per expert stay fp32 in a bf16 model",
        kind="define",
    ),
    repair(
        _ROUTER + "_apply_expert_bias",
        mask_all_experts,
        "padding is not counted for any expert",
        expects="(self, routing_map, padding_mask)",
        versions=">=0.16,<0.20",
    ),
    repair(
        "megatron.core.transformer.moe.moe_utils:track_moe_metrics",
        count_predicted_layers,
        "the log of router losses has one size on all pipeline stages",
        expects=(
            "(loss_scale, iteration, writer, wandb_writer, total_loss_dict, per_layer_logging, "
            "force_initialize, track_names, num_layers, moe_layer_freq, mtp_num_layers, ...)"
        ),
        versions=">=0.15,<0.17",
    ),
)
