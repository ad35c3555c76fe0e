"""A mixture-of-experts model over expert-parallel ranks, with the choice of its features."""

from __future__ import annotations

from typing import Any

import torch

from tests.features.fused_ranks import Results, _Count
from tests.te import gpt_ranks

MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "moe_router_load_balancing_type": "none",
}


def train(
    flags: dict[str, Any], overrides: dict[str, Any], spec: str, steps: int = 1
) -> tuple[list[float], Results]:
    """Losses of a few steps of plain gradient descent; gradients and bytes of the last."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from mindspeed.adaptor import session
    from mindspeed.testing.saved import saved_for_backward

    size = dist.get_world_size()
    session.install().configure(flags)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=size)
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(123)
    config = gpt_ranks.config(
        "layernorm-gelu-bias", **{**MOE, "expert_model_parallel_size": size, **overrides}
    )
    dtype = config.params_dtype
    model = gpt_ranks.build(config, spec).to(dtype)
    losses = []
    for _ in range(steps):
        model.zero_grad()
        with _Count() as count, saved_for_backward(model) as saved:
            tensors = gpt_ranks.run(model)
        losses.append(float(tensors["loss"].float().mean()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.02 * parameter.grad
    session.current().detach_features()
    return losses, Results(tensors, saved.bytes, count.ops)


def with_and_without(
    flags: dict[str, Any],
    overrides: dict[str, Any],
    spec: str,
    unfused: dict[str, Any] | None = None,
    steps: int = 1,
) -> tuple[tuple[list[float], Results], tuple[list[float], Results]]:
    """With the feature's flags, and without them (with ``unfused`` in the model's config)."""
    fused = train(flags, overrides, spec, steps)
    return fused, train({}, overrides | (unfused or {}), spec, steps)
