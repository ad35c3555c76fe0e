"""Defects of packed conversations (``--sft``).

Defect: packed sequences (``--sft``) break the batch broadcast under tensor parallelism.

Where: ``megatron.training.utils.get_batch_on_this_tp_rank``. Tensor-parallel rank 0 broadcasts
``max_seqlen``, which the other ranks do not receive; in 0.17 they do, except on stages that need
no tokens.
Symptom: the next broadcast reads its length from uninitialised memory and allocates petabytes; in
0.17 conversations see each other on these stages.
Fix: Megatron broadcasts an ordinary batch; ``cu_seqlens`` and ``max_seqlen`` are sent in a separate
broadcast of 8 + 4 * (documents + 2) bytes per micro-batch to each rank of the group.
Versions: >=0.16, <0.18.

Defect: packed conversations (``--sft``) of Megatron-LM: errors, lost borders, NaN.

Where: ``megatron.training.datasets.sft_dataset.SFTDataset.__getitem__`` extends a list by a number
where a conversation fills the sequence (Megatron-LM PR 3185);
``megatron.training.utils.is_first_or_last_pipeline_stage`` lets the ends of the pipeline read data
only, ``get_thd_batch_on_this_cp_rank`` of ``megatron.core.utils`` gets borders of the shape
``[1, n]``, and ``megatron.training.training.evaluate`` divides by the targets of each micro-batch
(PR 3564).
Symptom: errors; silently, conversations see each other in the layers of inner stages; a
validation loss that is NaN because of one micro-batch without targets.
Fix: the padding can be iterated; every stage reads the borders, ``[n]``; a loss of no targets is
zero.
Versions: >=0.16; the borders are right since 0.18.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind
from mindspeed.adaptor.versions import at_least

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
            packing = torch.cat([data["max_seqlen"].view(1), data["cu_seqlens"].view(-1)])
            if not at_least("0.17"):
                del data["max_seqlen"], data["cu_seqlens"]
            data_iterator = iter([data])
        batch = original(data_iterator, **given)
        packing = _broadcast_int32(packing, group, batch_device(batch))
        return batch | {"max_seqlen": packing[:1], "cu_seqlens": packing[1:].view(1, -1)}

    return get_batch_on_this_tp_rank


def batch_device(batch: dict[str, Any]) -> torch.device:
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


class _Padding(int):
    """A token that is also the sequence of itself."""

    def __iter__(self) -> Iterator[int]:
        yield int(self)


class _Tokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.pad = tokenizer, _Padding(tokenizer.pad)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def truncate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``SFTDataset.__getitem__``."""

    def __getitem__(self: Any, idx: int) -> dict[str, Any]:
        view = copy.copy(self)
        view.config = copy.copy(self.config)
        view.config.tokenizer = _Tokenizer(self.config.tokenizer)
        return original(view, idx)  # type: ignore[no-any-return]

    return __getitem__


def read_on_every_stage(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap ``is_first_or_last_pipeline_stage``, which says who reads data."""

    def is_first_or_last_pipeline_stage(vp_stage: int | None) -> bool:
        return True

    return is_first_or_last_pipeline_stage


def flatten_borders(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_thd_batch_on_this_cp_rank``."""

    def get_thd_batch_on_this_cp_rank(
        batch: Any, cu_seqlens: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return original(batch, cu_seqlens.flatten(), *args, **kwargs)

    return get_thd_batch_on_this_cp_rank


def divide_by_one_at_least(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``evaluate``."""

    def evaluate(forward_step_func: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_with_targets(forward_step_func), *args, **kwargs)

    return evaluate


def _with_targets(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = forward_step(*args, **kwargs)

        def counted(*inputs: Any, **options: Any) -> Any:
            returned = loss_function(*inputs, **options)
            if not isinstance(returned, tuple) or not isinstance(returned[-1], dict):
                return returned
            *losses, reports = returned
            return (*losses, {name: _counted(value) for name, value in reports.items()})

        return output, counted

    return step


def _counted(report: Any) -> Any:
    """``[sum, number]`` with a number of 1 at least; anything else as it is."""
    if getattr(report, "shape", None) != (2,):
        return report
    report = report.clone()
    report[1].clamp_(min=1)
    return report


PATCHES = (
    repair(
        "megatron.training.utils:get_batch_on_this_tp_rank",
        broadcast_packing,
        "packed sequences under tensor parallelism",
        expects="(data_iterator, ...)",
        versions=">=0.16,<0.18",
    ),
    repair(
        "megatron.training.datasets.sft_dataset:SFTDataset.__getitem__",
        truncate,
        "a conversation may fill the sequence",
        expects="(self, idx)",
        versions=">=0.16",
    ),
    repair(
        "megatron.training.utils:is_first_or_last_pipeline_stage",
        read_on_every_stage,
        "inner pipeline stages know the borders of conversations",
        expects="(vp_stage)",
        versions=">=0.16,<0.18",
    ),
    repair(
        "megatron.core.utils:get_thd_batch_on_this_cp_rank",
        flatten_borders,
        "borders of conversations have one dimension",
        expects="(batch, cu_seqlens, ...)",
        versions=">=0.16,<0.18",
    ),
    repair(
        "megatron.training.training:evaluate",
        divide_by_one_at_least,
        "the loss of a micro-batch without targets is zero",
        expects="(forward_step_func, ...)",
    ),
)
