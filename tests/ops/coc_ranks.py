"""Jobs for the ranks of test_lcal_functional.py and test_grouped_mat_mul_all_reduce.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed.ops import lcal_functional
from mindspeed.ops.lcal_functional import CocOps
from mindspeed.ops.npu_grouped_mat_mul_all_reduce import (
    GROUPED_MAT_MUL_ALL_REDUCE,
    npu_grouped_mat_mul_all_reduce,
)
from mindspeed.testing import CommLedger


def run_coc(method, arguments, outputs, chunks, device="cpu", group=None):
    """Call a method with this rank's arguments; returns what it wrote and what it sent."""
    given = {name: _move(x, device) for name, x in arguments[dist.get_rank()].items()}
    written = {
        name: torch.full(shape, 7.0, dtype=given["a"].dtype, device=device)
        for name, shape in outputs.items()
    }
    ops = CocOps(group or dist.group.WORLD, chunks)
    with CommLedger() as ledger:
        assert getattr(ops, method)(**given, **written) is None
    sent = [(event.op, event.payload) for event in ledger.events]
    return {name: x.cpu() for name, x in written.items()}, sent


def _move(x, device):
    """The tensor on the device, with its strides: a transposed view stays one."""
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return moved.copy_(x)


def group_of_megatron(a, b, output):
    """coc_ops without a group: refused, then Megatron's."""
    ops = lcal_functional.coc_ops
    try:
        ops.matmul_all_reduce(a, b, output)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    dist.new_group(group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    ops.matmul_all_reduce(a, b, output)
    return refusal, output


def coc_opcheck(a, b):
    name, p = dist.group.WORLD.group_name, dist.get_world_size()
    m, n = a.size(0), b.size(1)
    cases = [
        (lcal_functional.MATMUL_ALL_REDUCE, [(m, n)]),
        (lcal_functional.MATMUL_REDUCE_SCATTER, [(m // p, n)]),
        (lcal_functional.ALL_GATHER_MATMUL, [(m * p, n)]),
        (lcal_functional.ALL_GATHER_MATMUL_V2, [(m * p, n), (m * p, a.size(1))]),
    ]
    for operator, shapes in cases:
        torch.library.opcheck(operator.overload, (a, b, *map(torch.empty, shapes), 2, name))
    weights, rows = [b, b[:, :1].clone()], [a, a[:1].clone()]
    torch.library.opcheck(GROUPED_MAT_MUL_ALL_REDUCE.overload, (rows, weights, None, name))
    return True


def grouped(arguments, device="cpu"):
    """The grouped product with this rank's slices; returns its results and what it sent."""
    given = dict(arguments[dist.get_rank()])
    for name in ("x", "weight", "bias"):
        if given.get(name) is not None:
            given[name] = [x.to(device) for x in given[name]]
    with CommLedger() as ledger:
        results = npu_grouped_mat_mul_all_reduce(hcomm=dist.group.WORLD, **given)
    return [x.cpu() for x in results], [(event.op, event.payload) for event in ledger.events]
