"""What Megatron's layers collect during a step for its log."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch


def collected_for_log() -> dict[str, torch.Tensor]:
    """Sums over the micro-batches of a step, by name: losses of routers, of tokens ahead."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    found = {f"experts {name}": values for name, values in _of_experts().items()}
    if (values := MTPLossLoggingHelper.tracker.get("values")) is not None:
        found["tokens ahead"] = values
    return found


def _of_experts() -> dict[str, Any]:
    if importlib.util.find_spec("megatron.core.transformer.moe.moe_logging"):  # since 0.18
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    name = "get_moe_layer_wise_logging_tracker"  # in parallel_state until 0.12
    tracker = getattr(moe_utils, name, None) or getattr(parallel_state, name)
    return {name: entry["values"] for name, entry in tracker().items()}
