"""Jobs of test_expert_layout: bytes of layouts, and shared experts against single ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.moe.layer_ranks import FFN, HIDDEN, layer_of, start

EXPERTS, TOKENS = 8, 16


def bytes_of_layouts() -> list[dict[str, int]]:
    """Calls and bytes of Megatron's layer: sliced experts (2 x 2), then whole ones (4).

    The exchange of counts is left out: it is as large in both.
    """
    from mindspeed.instruments import CommLedger

    found = []
    for expert, expert_tensor in ((2, 2), (4, 1)):
        start(expert, 2, expert_tensor)
        layer = layer_of(
            "te",
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
        )
        layer.route = lambda *args: _uniform()  # an attribute of the instance
        x = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
        with CommLedger() as ledger:
            output, _ = layer(x)
            output.sum().backward()
        sent = [one.wire for one in ledger.events if (one.op, len(one.ranks)) != ("all_gather", 4)]
        found.append({"calls": len(sent), "bytes": sum(sent)})
    return found


def _uniform() -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and map ``[TOKENS, EXPERTS]``: two experts a token, all equally often."""
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    tokens = torch.arange(TOKENS)
    for offset in (0, 1):
        routing_map[tokens, (tokens + offset) % EXPERTS] = True
    return (routing_map * 0.5).requires_grad_(), routing_map


def shared_against_single_experts(tensor: int, count: int) -> list[float]:
    """Largest differences between Megatron's shared experts and single MLPs added: output, input.

    Args:
        tensor: Tensor-parallel size.
        count: Experts that every token visits.
    """
    start(1, tensor, 1)
    layer: Any = layer_of(
        "te",
        params_dtype=torch.float64,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        moe_shared_expert_intermediate_size=count * FFN,
    )
    shared = layer.shared_experts
    part = count * FFN // tensor
    x = torch.randn(TOKENS, 1, HIDDEN, dtype=torch.float64, requires_grad=True)
    output = shared(x)
    weights = torch.randn(output.shape, dtype=torch.float64)
    (grad,) = torch.autograd.grad((output * weights).sum(), x)
    gate_up = _gathered(shared.linear_fc1.weight).view(tensor, 2, part, HIDDEN)
    gate, up = gate_up.transpose(0, 1).reshape(2, count, FFN, HIDDEN)
    down = _gathered(shared.linear_fc2.weight.t()).view(count, FFN, HIDDEN)
    y = x.detach().requires_grad_()
    total = sum((F.silu(y @ gate[i].t()) * (y @ up[i].t())) @ down[i] for i in range(count))
    (expected,) = torch.autograd.grad((total * weights).sum(), y)
    return [(output - total).abs().max().item(), (grad - expected).abs().max().item()]


def _gathered(x: torch.Tensor) -> torch.Tensor:
    """The parts ``[n, h]`` of all ranks, one after the other."""
    import torch.distributed as dist

    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size())
    ]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)
