"""The two sides of the adjoint identity of a collective; for the ranks of a pool.

type   value of the ranks         gradient     pairing
R      equal                      P            <x, sum of the gradients>
I      equal                      I            <x, gradient>
V      a part each                V            sum over the ranks of <x, gradient>
P      a term of a sum each       R            <sum of the terms, gradient>
"""

from __future__ import annotations

from typing import Any

import torch

CASES = {
    "te.comm._ReduceScatter": "P",
    "te.comm._AllGather": "V",
    "te.comm._AllReduce": "P",
    "mappings._CopyToModelParallelRegion": "I",
    "mappings._ReduceFromModelParallelRegion": "P",
    "mappings._ScatterToModelParallelRegion": "I",
    "mappings._GatherFromModelParallelRegion": "V",
    "mappings._ScatterToSequenceParallelRegion": "I",
    "mappings._GatherFromSequenceParallelRegion": "V",
    "mappings._ReduceScatterToSequenceParallelRegion": "P",
    "mappings._AllGatherFromTensorParallelRegion": "V",
    "mappings._ReduceScatterToTensorParallelRegion": "P",
}
"""Function -> the type of its input."""


def pairings(case: str) -> tuple[float, float, bool]:
    """``<f(x), dy>``, ``<x, f'(dy)>``, and whether the output is of the type of the rule."""
    import importlib

    import torch.distributed as dist

    import mindspeed.megatron_adaptor  # noqa: F401  (Megatron asks for the CUDA device)
    from mindspeed.spmd import Collective, arguments_of, rule_of
    from mindspeed.type_check import megatron

    module, _, name = case.rpartition(".")
    if module == "mappings":
        function = getattr(importlib.import_module("megatron.core.tensor_parallel.mappings"), name)
        rule = megatron.rules()[function]
    else:
        function = getattr(importlib.import_module(f"mindspeed.{module}"), name)
        rule = rule_of(function)
    assert isinstance(rule, Collective)
    group = dist.group.WORLD
    source = CASES[case]
    assert rule.source.name == source
    x = _of(source, torch.arange(32.0, dtype=torch.float64).view(4, 8) / 7, dist.get_rank())
    kept = x.clone()
    x.requires_grad_()
    given = (x * 1, group)
    result = rule.result_of(arguments_of(function, given)).name
    out = function.apply(*given)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    cotangent = _of({"R": "P", "I": "I", "V": "V", "P": "R"}[result], cotangent, dist.get_rank())
    out.backward(cotangent.clone())
    left = _pair(result, out.detach(), cotangent)
    right = _pair(source, kept, x.grad)
    return left, right, _is(result, out.detach())


def _of(kind: str, x: torch.Tensor, rank: int) -> torch.Tensor:
    """A value of a type: equal on the ranks, or not."""
    return x.clone() if kind in ("R", "I") else x * (rank + 1) + rank


def _pair(kind: str, x: torch.Tensor, gradient: Any) -> float:
    import torch.distributed as dist

    if kind == "R":
        gradient = gradient.clone()
        dist.all_reduce(gradient)
    elif kind == "P":
        x = x.clone()
        dist.all_reduce(x)
    found = (x * gradient).sum()
    if kind == "V":
        dist.all_reduce(found)
    return float(found)


def _is(kind: str, out: torch.Tensor) -> bool:
    import torch.distributed as dist

    ranks = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, out.contiguous())
    equal = all(torch.equal(ranks[0], one) for one in ranks)
    return equal if kind in ("R", "I") else True
