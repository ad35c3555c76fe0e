"""Defects of the formula of FLOPs.

Defect: FLOPs of experts with a latent size are those of experts without.

Where: ``megatron.training.training.num_floating_point_operations`` (Megatron-LM PR 2977).
Symptom: with ``--moe-latent-size`` the printed TFLOP/s are too high: experts are counted on the
hidden size, and the projections to and from the latent size are not counted.
Fix: the formula is given the width of experts on the hidden size that has as many weights. Hybrid
models, for which Megatron has another formula, are right.
Versions: 0.16.

Defect: FLOPs of attention with a sliding window are those of attention to all keys.

Where: ``megatron.training.training.num_floating_point_operations`` (Megatron-LM PR 3280).
Symptom: with ``--window-size`` the printed TFLOP/s are too high, the more the longer sequences are.
Fix: what the formula counts outside of windows is subtracted. Attention that it does not count by
pairs of queries and keys (hybrid and linear models) is left as it is, and so are packed sequences,
whose lengths the formula is given since 0.18.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mindspeed.adaptor.patch import repair
from mindspeed.flags import changed


def needed(values: Mapping[str, Any]) -> bool:
    """Whether experts have a latent size, or attention a window."""
    if not values:
        return False  # nobody told: there is no script, which prints them
    from mindspeed.profiling.model_flops import window_of

    return bool(values.get("moe_latent_size")) or window_of(values) is not None


def count_latent_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``num_floating_point_operations``."""

    def num_floating_point_operations(args: Any, *rest: Any, **kwargs: Any) -> Any:
        latent = getattr(args, "moe_latent_size", None)  # Megatron 0.15 has none
        if latent and args.num_experts and not args.is_hybrid_model:
            width = args.moe_ffn_hidden_size or args.ffn_hidden_size
            projections = 2 * latent / ((3 if args.swiglu else 2) * args.moe_router_topk)
            width = width * latent / args.hidden_size + projections
            args = changed(args, moe_ffn_hidden_size=width)
        return original(args, *rest, **kwargs)

    return num_floating_point_operations


def count_windows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``num_floating_point_operations``."""
    from mindspeed.profiling.model_flops import ModelShape, model_flops

    def num_floating_point_operations(args: Any, batch_size: int, *rest: Any, **kwargs: Any) -> Any:
        total = original(args, batch_size, *rest, **kwargs)
        shape = ModelShape.from_megatron(vars(args))
        if shape is None or kwargs.get("seqlen_squared_sum_in_batch") is not None:
            return total
        whole = replace(shape, causal_keys=None)
        return total - model_flops(whole, batch_size) + model_flops(shape, batch_size)

    return num_floating_point_operations


PATCHES = (
    repair(
        "megatron.training.training:num_floating_point_operations",
        count_latent_experts,
        "FLOPs of experts with a latent size",
        expects="(args, batch_size)",
        versions=">=0.16,<0.17",
    ),
    repair(
        "megatron.training.training:num_floating_point_operations",
        count_windows,
        "FLOPs of attention with a sliding window",
        expects="(args, batch_size, ...)",
    ),
)
