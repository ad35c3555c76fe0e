"""Defect: FLOPs of attention with a sliding window are those of attention to all keys.

Where: ``megatron.training.training.num_floating_point_operations`` (Megatron-LM PR 3280).
Symptom: with ``--window-size`` the printed TFLOP/s are too high, the more the longer sequences are.
Fix: what the formula counts outside of windows is subtracted. Attention that it does not count by
pairs of queries and keys (hybrid and linear models) is left as it is.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:window-flops"


def count_windows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``num_floating_point_operations``."""
    from mindspeed.profiling.model_flops import ModelShape, model_flops

    def num_floating_point_operations(args: Any, batch_size: int, *rest: Any) -> Any:
        total = original(args, batch_size, *rest)
        shape = ModelShape.from_megatron(vars(args))
        if shape is None:
            return total
        whole = replace(shape, causal_keys=None)
        return total - model_flops(whole, batch_size) + model_flops(shape, batch_size)

    return num_floating_point_operations


def needed(values: Mapping[str, Any]) -> bool:
    """Whether attention has a window."""
    from mindspeed.profiling.model_flops import window_of

    return window_of(values) is not None


PATCHES = (
    Patch(
        "megatron.training.training:num_floating_point_operations",
        count_windows,
        OWNER,
        "FLOPs of attention with a sliding window",
        expects="(args, batch_size)",
    ),
)
