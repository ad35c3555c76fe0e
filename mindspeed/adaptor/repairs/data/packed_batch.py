"""Defect: packed sequences (``--sft``) break the batch broadcast under tensor parallelism.

Where: ``megatron.training.utils.get_batch_on_this_tp_rank``. Tensor-parallel rank 0 broadcasts
``max_seqlen``, which the other ranks do not receive.
Symptom: the next broadcast reads its length from uninitialised memory and allocates petabytes.
Fix: Megatron broadcasts an ordinary batch; ``cu_seqlens`` and ``max_seqlen`` are sent in a separate
broadcast of 8 + 4 * (documents + 2) bytes per micro-batch to each rank of the group.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:packed-batch"
NEEDED_WITH = ("sft",)


def broadcast_packing(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap ``get_batch_on_this_tp_rank``."""

    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> dict[str, Any]:
        from megatron.core import parallel_state
        from megatron.training import get_args

        megatron = get_args()
        group = parallel_state.get_tensor_model_parallel_group()
        if not megatron.sft or megatron.hybrid_context_parallel or group.size() == 1:
            return original(*args, **kwargs)
        given = bind(original, args, kwargs)
        data_iterator: Iterator[dict[str, Any]] | None = given.pop("data_iterator")
        packing = None
        if group.rank() == 0:
            assert data_iterator is not None
            data = dict(next(data_iterator))
            packing = torch.cat([data.pop("max_seqlen").view(1), data.pop("cu_seqlens").view(-1)])
            data_iterator = iter([data])
        batch = original(data_iterator, **given)
        packing = _broadcast_int32(packing, group, batch_device(batch))
        return batch | {"max_seqlen": packing[:1], "cu_seqlens": packing[1:].view(1, -1)}

    return get_batch_on_this_tp_rank


def batch_device(batch: dict[str, Any]) -> torch.device:
    """The device of the tensors of ``batch``."""
    return next(value.device for value in batch.values() if isinstance(value, torch.Tensor))


def _broadcast_int32(
    tensor: torch.Tensor | None, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Broadcast a vector of unknown length from group rank 0: its length, then its values."""
    length = torch.tensor([0 if tensor is None else tensor.numel()], device=device)
    dist.broadcast(length, group=group, group_src=0)
    if tensor is None:
        tensor = torch.empty(int(length), dtype=torch.int32)
    tensor = tensor.to(device, torch.int32)
    dist.broadcast(tensor, group=group, group_src=0)
    return tensor


PATCHES = (
    Patch(
        "megatron.training.utils:get_batch_on_this_tp_rank",
        broadcast_packing,
        OWNER,
        "packed sequences under tensor parallelism",
        expects="(data_iterator, ...)",
    ),
)
