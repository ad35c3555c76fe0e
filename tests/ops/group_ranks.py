"""Jobs for the ranks of test_group.py and test_mm_all_reduce_add_rms_norm.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed.instruments import CommLedger
from mindspeed.ops import process_groups
from mindspeed.ops._check import ArgumentCheck
from mindspeed.ops.compat.mm_all_reduce import MM_ALL_REDUCE
from mindspeed.ops.npu_mm_all_reduce_add_rms_norm import npu_mm_all_reduce_add_rms_norm
from mindspeed.ops.npu_mm_all_reduce_add_rms_norm_ import npu_mm_all_reduce_add_rms_norm_
from mindspeed.ops.process_groups import comm_name, group_name, resolve, tensor_parallel


def names_of_groups():
    """What resolves to what on a rank that is in the world's group and one of its own."""
    halves = [dist.new_group([r], group_desc=f"half {r}") for r in range(dist.get_world_size())]
    own = halves[dist.get_rank()]
    world = dist.group.WORLD
    try:
        group_name(ArgumentCheck("an_op"), hcom="no such group")
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    return {
        "the group itself": resolve(own) is own,
        "its name": resolve(own.group_name) is own,
        "the name of the world": resolve(world.group_name) is world,
        "without HCCL the communicator has the torch name": comm_name(own) == own.group_name,
        "no tensor-parallel group": tensor_parallel() is None,
    }, refusal


def tensor_parallel_group():
    """Megatron's group is found by its description, the newest first."""
    old, new = (dist.new_group(group_desc="TENSOR_MODEL_PARALLEL_GROUP") for _ in range(2))
    return tensor_parallel() is new, tensor_parallel() is old


class HcclBackend:
    """Stands in for ProcessGroupHCCL: a communicator gets its name when it is first used."""

    def __init__(self, name):
        self._name, self._used = name, False

    def get_hccl_comm_name(self, rank, init_comm=True):
        assert rank == dist.get_rank()
        self._used = self._used or init_comm
        return self._name if self._used else ""


def names_of_communicators():
    """Groups with an HCCL backend go by its name, which does not exist before it is used."""
    first, second = dist.new_group(), dist.new_group()
    backends = {first: HcclBackend("hccl_1"), second: HcclBackend("hccl_2")}
    process_groups._hccl = backends.get
    try:
        resolve("hccl_2")
        early = "found"
    except LookupError:
        early = "unknown"
    name = comm_name(second)
    return early, name, resolve(name) is second, comm_name(dist.group.WORLD)


def mm_all_reduce_add_rms_norm(in_place, arguments, by_name=False, device="cpu"):
    """Run the public function on this rank's slices; returns outputs, identity and the ledger."""
    given = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x
        for name, x in arguments[dist.get_rank()].items()
    }
    group = dist.group.WORLD
    function = npu_mm_all_reduce_add_rms_norm_ if in_place else npu_mm_all_reduce_add_rms_norm
    before = given["residual"].clone()
    with CommLedger() as ledger:
        y, norm = function(hcom=group.group_name if by_name else group, **given)
    kept = torch.equal(given["residual"], before)
    same = y.data_ptr() == given["residual"].data_ptr()
    calls = [(e.op, e.payload) for e in ledger.events]
    return y.cpu(), norm.cpu(), same, kept, calls


def opcheck_and_compile(x1, x2, residual, gamma):
    """torch's own checks of the op, and the public function as one graph."""
    name = dist.group.WORLD.group_name
    torch.library.opcheck(MM_ALL_REDUCE.overload, (x1, x2, None, None, None, None, 0, name))
    function = npu_mm_all_reduce_add_rms_norm
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = function(x1, x2, residual, gamma, name)
    return expected, compiled(x1, x2, residual, gamma, name)
