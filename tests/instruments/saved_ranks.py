"""PyTorch's and Megatron's own ways to save activation memory, counted on one rank."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.instruments import saved_for_backward
from tests.support import gpt_ranks

B, H = 8, 16
X = 4 * B * H  # bytes of one fp32 activation [B, H]


def save_on_cpu(device: str, pinned: bool) -> dict[str, Any]:
    """Two tensors saved on the host and one on the device."""
    x = torch.randn(B, H, device=device, requires_grad=True)
    with saved_for_backward() as saved:
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned, device_type=device):
            y = x.sin().cos()
        z = y.exp()  # saves its result
        z.sum().backward()
        left = saved.live_bytes, saved.live_host_bytes
    return {"peak": (saved.bytes, saved.host_bytes, saved.dropped_bytes), "left": left}


def without_output() -> dict[str, Any]:
    """A norm whose output two linears save, plain and freed until the backward."""
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    gpt_ranks.start(1)
    torch.manual_seed(0)
    norm, linears = torch.nn.LayerNorm(H), [torch.nn.Linear(H, H) for _ in range(2)]
    data = torch.randn(B, H)
    results: dict[str, Any] = {}
    grads = {}
    for kind in ("plain", "checkpointed"):
        x = data.clone().requires_grad_()
        with saved_for_backward(norm, *linears) as saved:
            hidden = x.sin()
            if kind == "plain":
                y = norm(hidden)
            else:
                discard = CheckpointWithoutOutput()
                y = discard.checkpoint(norm, hidden)
            loss = linears[0](y).cos().sum() + linears[1](y).cos().sum()
            if kind == "checkpointed":
                discard.discard_output_and_register_recompute(loss)
            results[kind] = (saved.live_bytes, saved.dropped_bytes)
        loss.backward()
        grads[kind] = x.grad
    results["equal"] = torch.equal(grads["plain"], grads["checkpointed"])
    return results


def fine_grained_offload() -> dict[str, Any]:
    """A small model with the inputs of the core attention offloaded, and without."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    gpt_ranks.start(1)
    results: dict[str, Any] = {}
    grads = {}
    options = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn"],
        "min_offloaded_tensor_size": 0,
    }
    for kind in ("plain", "offloaded"):
        given = options if kind == "offloaded" else {}
        model = gpt_ranks.build(gpt_ranks.config("rmsnorm-swiglu-gqa", **given), "te")
        tokens, positions, labels = gpt_ranks.batch()
        with saved_for_backward(model) as saved:
            loss = model(tokens, positions, None, labels=labels)
            if kind == "offloaded":
                chunk = offload.PipelineOffloadManager.get_instance().cur_forward_chunk()
                results["megatron"] = sum(g.total_offload_bytes for g in chunk.offload_groups)
            loss.sum().backward()
            results["left"] = saved.live_bytes, saved.live_host_bytes
        if kind == "plain":
            results["plain"] = saved.bytes
        results |= {"host": saved.host_bytes, "dropped": saved.dropped_bytes}
        results["device"] = saved.bytes
        grads[kind] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    results["equal"] = all(torch.equal(g, grads["plain"][n]) for n, g in grads["offloaded"].items())
    return results
