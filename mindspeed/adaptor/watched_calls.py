"""Where Megatron decides or computes what planning watches: modules and classes by name."""

from __future__ import annotations

from typing import Any


def schedule_steps() -> Any:
    """The module whose ``forward_step`` and ``backward_step`` every schedule of Megatron calls."""
    from megatron.core.pipeline_parallel import schedules

    return schedules


def routing() -> tuple[Any, Any]:
    """The class of routers, and the module in which they collect losses and figures of layers."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    return TopKRouter, moe_utils
