"""What test_strided.py runs in other processes: with Triton, on an emulated NPU, on two ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import Mask, context_parallel_attention, plan
from mindspeed.ops.catalog import operators
from mindspeed.ops.process_groups import comm_name
from tests.ops import strided, triton_jobs


def find(name: str) -> Any:
    """The operator of this name."""
    return next(one for one in operators() if one.name == name)


def interpreted(name: str, first: int) -> list[str]:
    """The Triton implementation, under the interpreter."""
    (operator, kernel), found = triton_jobs.launcher(name), []
    for number, sample in enumerate(itertools.islice(operator.samples(torch.float32), first)):
        found += strided.forward_problems(operator, kernel, sample, each=number < 2)
    return found


def emulated(name: str, first: int) -> list[str]:
    """The operator on device npu, its gradients too."""
    operator, found = find(name), []
    move = strided.to_device("npu", operator.on_host)
    for number, sample in enumerate(itertools.islice(operator.samples(operator.dtypes[0]), first)):
        each = number == 0
        found += strided.forward_problems(operator, operator, sample, each=each, move=move)
        if operator.differentiable:
            found += strided.gradient_problems(operator, sample, each=each, move=move)
    return found


def _tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 10 * dist.get_rank())
    return torch.randn(shape, generator=generator)


def _of_two_ranks() -> dict[str, tuple[Any, ...]]:
    """Arguments of the operators that communicate."""
    world = comm_name(dist.group.WORLD)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()].group_name
    a, b, bias = _tensor(4, 3), _tensor(3, 6, seed=1), _tensor(6, seed=2)
    out, tall = _tensor(4, 6, seed=3), _tensor(8, 6, seed=4)
    rows, weights = [a, a[:2].clone()], [b, _tensor(3, 5, seed=5)]
    exchanged = (_tensor(4, 6, 3), _tensor(2, 3, 5, seed=6), None, world, alone, 0)
    back = (_tensor(2, 8, 3), _tensor(2, 3, 5, seed=6), None, world, alone, 0)
    return {
        "coc_matmul_all_reduce": (a, b, out, 2, world),
        "coc_matmul_reduce_scatter": (a, b, out[:2].clone(), 2, world),
        "coc_all_gather_matmul": (a, b, tall, 2, world),
        "coc_all_gather_matmul_v2": (a, b, tall, _tensor(8, 3, seed=7), 2, world),
        "mm_all_reduce": (a, b, bias, None, None, None, 0, world),
        "grouped_mat_mul_all_reduce": (rows, weights, [bias, bias[:5].clone()], world),
        "all_to_all_all_gather_bmm": exchanged,
        "bmm_reduce_scatter_all_to_all": back,
    }


def on_two_ranks(device: str = "cpu") -> dict[str, list[str]]:
    """Every operator that communicates."""
    found = {}
    for name, arguments in _of_two_ranks().items():
        operator = find(name)
        move = strided._stays if device == "cpu" else strided.to_device(device)
        found[name] = strided.forward_problems(operator, operator, arguments, move=move)
        if operator.differentiable:
            found[name] += strided.gradient_problems(operator, arguments, move=move)
    return found


def context_parallel(algorithm: str) -> list[str]:
    """Attention over a sequence on two ranks."""
    causal = plan(Mask.causal(24), ranks=2, algorithm=algorithm)
    q, k, v = _tensor(12, 4, 8), _tensor(12, 2, 8, seed=1), _tensor(12, 2, 8, seed=2)
    return strided.gradient_problems(
        lambda *qkv: context_parallel_attention(*qkv, causal), (q, k, v)
    )
