"""Defect: FLOPs of experts with a latent size are those of experts without.

Where: ``megatron.training.training.num_floating_point_operations`` (Megatron-LM PR 2977).
Symptom: with ``--moe-latent-size`` the printed TFLOP/s are too high: experts are counted on the
hidden size, and the projections to and from the latent size are not counted.
Fix: the formula is given the width of experts on the hidden size that has as many weights. Hybrid
models, for which Megatron has another formula, are right.
Versions: 0.16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:latent-expert-flops"
NEEDED_WITH = ("moe_latent_size",)


def count_latent_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``num_floating_point_operations``."""

    def num_floating_point_operations(args: Any, *rest: Any, **kwargs: Any) -> Any:
        latent = args.moe_latent_size
        if latent and args.num_experts and not args.is_hybrid_model:
            args = copy.copy(args)
            width = args.moe_ffn_hidden_size or args.ffn_hidden_size
            projections = 2 * latent / ((3 if args.swiglu else 2) * args.moe_router_topk)
            args.moe_ffn_hidden_size = width * latent / args.hidden_size + projections
        return original(args, *rest, **kwargs)

    return num_floating_point_operations


PATCHES = (
    Patch(
        "megatron.training.training:num_floating_point_operations",
        count_latent_experts,
        OWNER,
        "FLOPs of experts with a latent size",
        expects="(args, batch_size)",
        versions=">=0.16,<0.17",
    ),
)
