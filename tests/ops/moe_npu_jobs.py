"""Jobs of test_moe_permutation.py on an emulated NPU."""

from __future__ import annotations

import torch

from mindspeed.te import fused_experts


def by_routing_map(
    device: str, tokens: int, experts: int, rows: int | None
) -> tuple[list[torch.Tensor], list[str]]:
    """Megatron's way there and back, its gradients, and the fused operators that ran."""
    generator = torch.Generator().manual_seed(0)
    routing_map = torch.rand(tokens, experts, generator=generator) < 0.3
    x = torch.randn(tokens, 8, generator=generator).to(device).requires_grad_()
    probs = torch.rand(tokens, experts, generator=generator).to(device).requires_grad_()
    seen: list[str] = []
    if device == "npu":
        from tests.npu_emulator import emulation

        emulation.calls.clear()
    permuted, _, row_map = fused_experts.permute(x, None, routing_map.to(device), rows)
    back = fused_experts.unpermute(permuted * permuted, row_map, probs, x.shape)
    weights = torch.linspace(-1, 1, back.numel()).view(back.shape).to(device)
    (back * weights).sum().backward()
    if device == "npu":
        seen = sorted(name for name in emulation.calls if "moe_token" in name)
    return [t.detach().cpu() for t in (permuted, back, x.grad, probs.grad)], seen


def npu_and_cpu(*arguments):
    """Results on both, and the fused operators that ran."""
    ours, seen = by_routing_map("npu", *arguments)
    return ours, by_routing_map("cpu", *arguments)[0], seen
