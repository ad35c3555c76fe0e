"""Collectives of npu tensors, by gloo on the memory of the tensors.

The kernels that torch_npu has registered for the operators of c10d are replaced by ones that hand
CPU views of the tensors to the CPU's kernels, which ask the process group for its CPU backend: a
group of the backend "hccl" gets a gloo backend for device npu only, and lends it for the call.
So ``init_process_group("hccl")`` and "gloo" both work, CPU tensors are refused by the former as
HCCL refuses them, and an operation that was started stays asynchronous until ``wait``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from mindspeed.device.torch_cuda_shim import collectives as completed
from mindspeed.device.torch_versions import gloo_exchanges_lists, gloo_reduces_all
from mindspeed.journal import Journal
from tests.npu_emulator import emulation


def install() -> None:
    """Replaces the c10d kernels of npu tensors and the creator of HCCL groups."""
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, name = full_name.partition("::")
        if namespace == "c10d":
            op = getattr(torch.ops.c10d, name).default
            emulation.replace("c10d", name, emulation.OnHost(op, _lending(op)))
    dist.Backend.backend_capability["gloo"].append("npu")
    dist.Backend._plugins["HCCL"] = dist.Backend._BackendPlugin(_create, extended_api=True)
    for name, method in _METHODS.items():
        setattr(dist.ProcessGroupGloo, name, method)
    if not (gloo_exchanges_lists() and gloo_reduces_all()):  # as HCCL does
        completed.install(Journal())


def _create(common: Any, options: Any) -> dist.ProcessGroupGloo:
    size, rank = common.group_size, common.group_rank
    return dist.ProcessGroupGloo(common.store, rank, size, timeout=common.timeout)


def lent(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks whose CPU backend is `group`'s for device npu."""
    other = dist.ProcessGroup(group.rank(), group.size())
    gloo = dist.ProcessGroup.BackendType.GLOO
    other._register_backend(torch.device("cpu"), gloo, group._get_backend(torch.device("npu")))
    return other


def _lending(op: Any) -> Any:
    def lend(value: Any) -> Any:
        if not isinstance(value, torch.ScriptObject) or "ProcessGroup" not in str(value._type()):
            return value
        return lent(dist.ProcessGroup.unbox(value)).boxed()

    def compute(*args: Any, **kwargs: Any) -> Any:
        return op(*map(lend, args), **{name: lend(value) for name, value in kwargs.items()})

    return compute


# Methods of HCCL's backend that torch_npu and our library call on the backend itself.


def _comm_name(backend: dist.ProcessGroupGloo, rank: int, init_comm: bool = True) -> str:
    """The name under which fused operators know the group: not the one torch gave it."""
    npu = torch.device("npu")
    for group in dist.distributed_c10d._world.pg_map:
        if npu in group._device_types and group._get_backend(npu) is backend:
            return f"hccl%{group.group_name}"
    raise ValueError("this backend belongs to no process group")


def of_comm(name: str) -> dist.ProcessGroup:
    """The group that fused operators know by `name`."""
    prefix, _, group_name = name.partition("%")
    if prefix != "hccl":
        raise ValueError(f"{name!r} is not what get_hccl_comm_name returned")
    return dist.distributed_c10d._resolve_process_group(group_name)


def _allgather(backend: dist.ProcessGroupGloo, *tensors: Any) -> Any:
    return _gloo_allgather(backend, *tree_map(_to_host, tensors))


def _batch_isend_irecv(
    backend: dist.ProcessGroupGloo, kinds: list[str], tensors: list[torch.Tensor], peers: list[int]
) -> _Works:
    started = []
    for kind, tensor, peer in zip(kinds, tensors, peers, strict=True):
        start = backend.send if kind == "isend" else backend.recv
        started.append(start([_to_host(tensor)], peer, 0))
    return _Works(started)


def _all_gather_uneven(
    backend: dist.ProcessGroupGloo, output: torch.Tensor, own: torch.Tensor, sizes: list[int]
) -> _Works:
    assert len(sizes) == backend.size() and sum(sizes) == output.shape[0]
    parts = _to_host(output).split(sizes)
    parts[backend.rank()].copy_(_to_host(own))
    for root, part in enumerate(parts):
        options = dist.BroadcastOptions()
        options.rootRank = root
        backend.broadcast([part], options).wait()
    return _Works([])


def _reduce_scatter_uneven(
    backend: dist.ProcessGroupGloo,
    output: torch.Tensor,
    whole: torch.Tensor,
    sizes: list[int],
    scatter_options: Any,
) -> _Works:
    assert len(sizes) == backend.size() and sum(sizes) == whole.shape[0]
    for root, part in enumerate(_to_host(whole).split(sizes)):
        total, options = part.clone(), dist.ReduceOptions()
        options.rootRank, options.reduceOp = root, scatter_options.reduceOp
        backend.reduce([total], options).wait()
        if root == backend.rank():
            _to_host(output).copy_(total)
    return _Works([])


def _to_host(value: Any) -> Any:
    on_device = isinstance(value, torch.Tensor) and value.device.type == "npu"
    return emulation.host(value) if on_device else value


class _Works:
    """Several operations under one handle."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *args: Any) -> bool:
        return all([work.wait(*args) for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


_gloo_allgather = dist.ProcessGroupGloo.allgather
_METHODS = {
    "get_hccl_comm_name": _comm_name,
    "allgather": _allgather,
    "batch_isend_irecv": _batch_isend_irecv,
    "all_gather_into_tensor_uneven": _all_gather_uneven,
    "reduce_scatter_tensor_uneven": _reduce_scatter_uneven,
}
