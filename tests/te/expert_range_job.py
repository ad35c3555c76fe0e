"""Ranges of experts against the whole, on one rank."""

from __future__ import annotations

from typing import Any

import torch

from tests.moe import layer_ranks


def whole_and_ranges(spec: str, overrides: dict[str, Any], replaced: bool = False) -> list[Any]:
    """Output and gradients of all experts at once, and range by range."""
    from mindspeed.te.expert_range import expert_range

    layer_ranks.start()
    experts = layer_ranks.layer_of(spec, **overrides).experts
    if replaced:
        whole = experts.forward
        experts.forward = lambda *args: whole(*args)
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([3, 0, 2, 1, 4, 0, 1, 2])
    x = torch.randn(int(sizes.sum()), layer_ranks.HIDDEN, generator=generator)
    probs = torch.rand(len(x), generator=generator)
    weight = torch.randn(x.shape, generator=generator)
    calls: list[str] = []
    for name, parameter in experts.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))

    results = []
    for ranges in [[(0, 8)], [(0, 1), (1, 1), (2, 2), (4, 4)]]:
        for parameter in experts.parameters():
            parameter.grad = None
        calls.clear()
        inputs = x.clone().requires_grad_(), probs.clone().requires_grad_()
        outs = []
        for first, count in ranges:
            begin, end = int(sizes[:first].sum()), int(sizes[: first + count].sum())
            part = expert_range(experts, first, count)
            out, _ = part(inputs[0][begin:end], sizes[first : first + count], inputs[1][begin:end])
            outs.append(out)
        output = torch.cat(outs)
        (output * weight).sum().backward()
        gradients = {n: p.grad for n, p in experts.named_parameters()}
        gradients |= {"x": inputs[0].grad, "probs": inputs[1].grad}
        results.append((output.detach(), gradients, sorted(calls)))
    return results
