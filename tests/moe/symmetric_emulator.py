"""``torch.ops.symm_mem.all_to_all_vdev`` on a CPU, by its documentation and its assertions.

    with emulated():                  # on every rank
        torch.ops.symm_mem.all_to_all_vdev(input, out, in_splits, out_splits_offsets, group_name)

The operator and its schema are torch's own, so a wrong list of arguments fails here, too; only the
kernel is another one. Symmetric memory is filled with ones, in bits: not-a-number in every floating
dtype, so rows that nobody has written are noticed where they are used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import _disable_current_modes

CALLS: list[tuple[int, ...]] = []
"""Where the tensors of every call lie, in order."""
ROWS: list[int] = []
"""Rows that this rank sends in every call."""


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Give the operator a kernel for CPU tensors."""
    symmetric: dict[int, Any] = {}  # by where memory begins: the group that it was put together for

    def empty(*size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = size[0] if isinstance(size[0], tuple) else size
        one = torch.empty(shape, dtype=dtype, device=device)
        one.view(torch.uint8).fill_(255)
        symmetric[one.untyped_storage().data_ptr()] = None
        return one

    def rendezvous(one: torch.Tensor, group: dist.ProcessGroup) -> None:
        shapes: list[Any] = [None] * group.size()
        with unwatched():
            dist.all_gather_object(shapes, (one.shape, one.dtype), group=group)
        assert len(set(shapes)) == 1, "symmetric memory has the same shape on all ranks"
        assert symmetric[one.untyped_storage().data_ptr()] is None
        symmetric[one.untyped_storage().data_ptr()] = group.group_name

    def kernel(*tensors: Any) -> None:
        with unwatched():  # what it reads here it has on its device
            all_to_all(*tensors)

    def all_to_all(
        source: torch.Tensor,
        out: torch.Tensor,
        splits: torch.Tensor,
        offsets: torch.Tensor,
        name: str,
    ) -> None:
        group = _resolve_process_group(name)
        ranks, given = group.size(), (source, out, splits, offsets)
        for one in given:
            assert symmetric.get(one.untyped_storage().data_ptr()) == name, "not symmetric"
            assert one.is_contiguous()
        assert (source.dtype, source.stride(0)) == (out.dtype, out.stride(0))
        assert (splits.dtype, offsets.dtype) == (torch.int64, torch.int64)
        assert (tuple(splits.shape), tuple(offsets.shape)) == ((ranks,), (2, ranks))
        CALLS.append(tuple(one.data_ptr() for one in given))
        ROWS.append(int(splits.sum()))
        received = torch.empty_like(splits)
        dist.all_to_all_single(received, splits, group=group)
        assert int(splits.sum()) <= len(source), "reads behind the buffer"
        assert int(received.sum()) <= len(out), "writes behind the buffer"
        per_rank = max(int(os.environ["TORCH_SYMMMEM_NBLOCKS"]) // ranks, 1)
        pitch = source.stride(0) * source.element_size()
        assert all(rows * pitch % per_rank == 0 for rows in received.tolist()), "a remainder"
        dist.all_to_all_single(
            out[: int(received.sum())].view(torch.uint8),
            source[: int(splits.sum())].view(torch.uint8),
            received.tolist(),
            splits.tolist(),
            group=group,
        )
        offsets[0] = received
        offsets[1] = received.cumsum(0) - received

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("all_to_all_vdev", kernel, "CPU")
    CALLS.clear()
    ROWS.clear()
    with (
        mock.patch.object(symm_mem, "empty", empty),
        mock.patch.object(symm_mem, "rendezvous", rendezvous),
        mock.patch.object(symm_mem, "set_backend", lambda name: None),
        mock.patch.dict(os.environ),
    ):
        try:
            yield
        finally:
            library._destroy()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Let a kernel read what it has on its device, where a test traps reads of the host."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
