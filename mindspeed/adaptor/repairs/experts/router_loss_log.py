"""Defect: the log of router losses has another size on stages without experts.

Where: ``megatron.core.transformer.moe.moe_utils.track_moe_metrics`` makes one value a transformer
layer where a stage has recorded nothing; routers record one more for each layer of multi-token
prediction (Megatron-LM PR 3401).
Symptom: with multi-token prediction and a pipeline stage without experts the ranks reduce tensors
of different sizes: they wait for ever, or the report ends in an error.
Fix: stages without experts have the values of all layers.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed import device
from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:router-loss-log"
NEEDED_WITH = ("mtp_num_layers", "num_experts")


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
    Patch(
        "megatron.core.transformer.moe.moe_utils:track_moe_metrics",
        count_predicted_layers,
        OWNER,
        "the log of router losses has one size on all pipeline stages",
        expects=(
            "(loss_scale, iteration, writer, wandb_writer, total_loss_dict, per_layer_logging, "
            "force_initialize, track_names, num_layers, moe_layer_freq, mtp_num_layers, ...)"
        ),
    ),
)
