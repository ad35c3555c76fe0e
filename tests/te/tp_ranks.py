"""A two-layer perceptron, column- then row-parallel, run on the ranks of the world group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed.te.linear import LayerNormLinear, Linear

HIDDEN, INNER, SEQUENCE = 6, 8, 4


def mlp(sequence_parallel: bool, fused: bool, tp_size: int = 1) -> dict[str, torch.Tensor]:
    """Return output and gradients of this rank's part; fp64, seeded whole weights.

    ``tp_size`` is what the layers are told; the size of the group is what counts.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    options = {
        "tp_group": group,
        "tp_size": tp_size,
        "sequence_parallel": sequence_parallel,
        "params_dtype": torch.float64,
        "fuse_wgrad_accumulation": fused,
    }
    first = LayerNormLinear(HIDDEN, INNER, parallel_mode="column", **options)
    second = Linear(INNER, HIDDEN, parallel_mode="row", **options)
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    with torch.no_grad():
        first.weight.copy_(draw(INNER, HIDDEN).chunk(size, 0)[rank])
        first.bias.copy_(draw(INNER).chunk(size, 0)[rank])
        first.layer_norm_weight.copy_(draw(HIDDEN))
        first.layer_norm_bias.copy_(draw(HIDDEN))
        second.weight.copy_(draw(HIDDEN, INNER).chunk(size, 1)[rank])
        second.bias.copy_(draw(HIDDEN))
    x, cotangent = draw(SEQUENCE, 2, HIDDEN), draw(SEQUENCE, 2, HIDDEN)
    if sequence_parallel:
        x, cotangent = (t.chunk(size, 0)[rank] for t in (x, cotangent))
    x = x.contiguous().requires_grad_()
    for weight in (first.weight, second.weight) if fused else ():
        weight.main_grad = torch.zeros_like(weight)
    y = second(first(x).tanh())
    y.backward(cotangent)
    gradient = lambda p: p.main_grad if fused and hasattr(p, "main_grad") else p.grad  # noqa: E731
    return {
        "output": y.detach(),
        "input": x.grad,
        "first.weight": gradient(first.weight),
        "first.bias": first.bias.grad,
        "norm.weight": first.layer_norm_weight.grad,
        "norm.bias": first.layer_norm_bias.grad,
        "second.weight": gradient(second.weight),
        "second.bias": second.bias.grad,
    }


def gathered_norm(gathers: bool) -> dict[str, torch.Tensor]:
    """Output, normalised input and gradients where both are read; each rank reads other columns.

    Without ``gathers`` the only rank computes with torch's functions.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x, weight, gamma, beta = (
        draw(SEQUENCE, 2, HIDDEN),
        draw(INNER, HIDDEN),
        draw(HIDDEN),
        draw(HIDDEN),
    )
    wide, narrow = draw(SEQUENCE, 2, INNER), draw(SEQUENCE, 2, HIDDEN)
    if gathers:
        layer = LayerNormLinear(
            HIDDEN, INNER, bias=False, parallel_mode="column", sequence_parallel=True,
            tp_group=dist.group.WORLD, params_dtype=torch.float64, device="cpu",
            return_layernorm_output=True, return_layernorm_output_gathered=True,
        )  # fmt: skip
        with torch.no_grad():
            layer.weight.copy_(weight.chunk(size, 0)[rank])
            layer.layer_norm_weight.copy_(gamma)
            layer.layer_norm_bias.copy_(beta)
        x = x.chunk(size, 0)[rank].clone().requires_grad_()
        out, normed = layer(x)
        gamma, beta = layer.layer_norm_weight, layer.layer_norm_bias
    else:
        x, gamma, beta = (t.requires_grad_() for t in (x, gamma, beta))
        normed = torch.nn.functional.layer_norm(x, (HIDDEN,), gamma, beta)
        out = torch.nn.functional.linear(normed, weight)
    columns = torch.arange(HIDDEN).chunk(size)[rank]
    mine = normed[..., columns].sin() * narrow[..., columns]
    ((out * wide.chunk(size, -1)[rank]).sum() + mine.sum()).backward()
    return {
        "output": out.detach(),
        "normed": normed.detach(),
        "input": x.grad,
        "gamma": gamma.grad,
        "beta": beta.grad,
    }


def join(parts: list[dict[str, torch.Tensor]], sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """Put the parts of all ranks together: concatenate slices, sum partial gradients."""
    dims = {"first.weight": 0, "first.bias": 0, "second.weight": 1}
    if sequence_parallel:
        dims |= {"output": 0, "input": 0}
    joined = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if name in dims:
            joined[name] = torch.cat(values, dims[name])
        else:
            joined[name] = sum(values) if sequence_parallel else values[0]
    return joined
