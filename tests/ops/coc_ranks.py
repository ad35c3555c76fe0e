"""Jobs for the ranks of test_lcal_functional.py and test_grouped_mat_mul_all_reduce.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory
from torch.utils.flop_counter import FlopCounterMode

from mindspeed.instruments import CommLedger
from mindspeed.ops import fused_collectives, lcal_functional
from mindspeed.ops.catalog import operators
from mindspeed.ops.lcal_functional import CocOps
from mindspeed.ops.npu_grouped_mat_mul_all_reduce import (
    GROUPED_MAT_MUL_ALL_REDUCE,
    npu_grouped_mat_mul_all_reduce,
)
from mindspeed.ops.process_groups import comm_name, resolve


def run_coc(method, arguments, outputs, chunks, device="cpu", group=None):
    """Call a method with this rank's arguments; returns what it wrote and what it sent."""
    given = {name: _move(x, device) for name, x in arguments[dist.get_rank()].items()}
    written = {
        name: torch.full(shape, 7.0, dtype=given["input1"].dtype, device=device)
        for name, shape in outputs.items()
    }
    ops = CocOps(group or dist.group.WORLD, chunks)
    with CommLedger() as ledger:
        assert getattr(ops, method)(**given, **written) is None
    sent = [(event.op, event.payload) for event in ledger.events]
    return {name: x.cpu() for name, x in written.items()}, sent


def run_coc_w8a16(arguments, shape, options):
    """matmul_all_reduce_w8a16 with this rank's arguments: what it wrote, and sent."""
    output = torch.full(shape, 7.0)
    given = arguments[dist.get_rank()] | options
    with CommLedger() as ledger:
        CocOps(dist.group.WORLD).matmul_all_reduce_w8a16(output=output, **given)
    return output, [(event.op, event.payload) for event in ledger.events]


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


def symmetric_memory(arguments, shapes, machines):
    """The kernels over symmetric memory, with torch's own fallbacks in the place of CUDA's.

    Returns for each operator what it wrote and what it sent, and the reason of a refusal.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size() // machines)
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(_symmetric_memory, f"_{name}_fallback"), "CPU")
    results = {}
    for name, implementation in fused_collectives.SYMMETRIC_MEMORY.items():
        tensors = arguments[name][dist.get_rank()]
        outputs = [torch.full(shape, 7.0).to(tensors[0].dtype) for shape in shapes[name]]
        with CommLedger() as ledger:
            implementation.load()(*tensors, *outputs, 2, dist.group.WORLD.group_name)
        results[name] = outputs, [(event.op, event.payload) for event in ledger.events]
    reasons = {one.refused() for one in fused_collectives.SYMMETRIC_MEMORY.values()}
    return results, reasons


def kinds_on_npu():
    """What the operators with a group run there, and whether an HCCL name finds its group."""
    world = dist.group.WORLD
    kinds = {one.name: one.chosen("npu").kind for one in operators() if one.communicates}
    return kinds, resolve(comm_name(world)) is world


def count_flops():
    """What torch's counter says of one call of each operator with a group, on two ranks."""
    name = dist.group.WORLD.group_name
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()].group_name
    a, b, out, tall = torch.ones(4, 3), torch.ones(3, 5), torch.empty(4, 5), torch.empty(8, 5)
    tokens, weight = torch.ones(4, 6, 3), torch.ones(2, 3, 5)
    calls = {
        "coc_matmul_all_reduce": (a, b, out, 1, name),
        "coc_matmul_reduce_scatter": (a, b, out[:2], 1, name),
        "coc_all_gather_matmul": (a, b, tall, 1, name),
        "coc_all_gather_matmul_v2": (a, b, tall, torch.empty(8, 3), 1, name),
        "mm_all_reduce": (a, b, None, None, None, None, 0, name),
        "grouped_mat_mul_all_reduce": ([a, a[:2]], [b, b[:, :1]], None, name),
        "all_to_all_all_gather_bmm": (tokens, weight, None, name, own, 0),
        "bmm_reduce_scatter_all_to_all": (torch.ones(2, 12, 3), weight, None, name, own, 0),
    }
    counts = {}
    for one in operators():
        if one.communicates:
            with FlopCounterMode(display=False) as counter:
                one(*calls[one.name])
            counts[one.name] = counter.get_total_flops()
    return counts


def grouped(arguments, device="cpu"):
    """The grouped product with this rank's slices; returns its results and what it sent."""
    given = dict(arguments[dist.get_rank()])
    for name in ("x", "weight", "bias"):
        if given.get(name) is not None:
            given[name] = [x.to(device) for x in given[name]]
    with CommLedger() as ledger:
        results = npu_grouped_mat_mul_all_reduce(hcomm=dist.group.WORLD, **given)
    return [x.cpu() for x in results], [(event.op, event.payload) for event in ledger.events]
