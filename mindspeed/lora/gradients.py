"""The one sum per step that adapters need over tensor-parallel ranks.

In a column layer each rank has the part of A's gradient that comes through its rows of B; in a row
layer, the part of B's gradient that comes through its columns of A. Sums commute, so it is enough
to add them up when all micro-batches and data-parallel ranks are done: one all-reduce of a few
megabytes per step instead of one of activations per layer and micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def summed_over_tp(finalize: Callable[..., None]) -> Callable[..., None]:
    """Megatron's ``finalize_model_grads`` followed by the adapters' sum."""

    def finalize_model_grads(model: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        sum_partial_gradients(model)

    return finalize_model_grads


@torch.no_grad()
def sum_partial_gradients(model: Sequence[torch.nn.Module]) -> None:
    """Add up the partial gradients of all adapters of a model over tensor-parallel ranks."""
    together = defaultdict[Any, list[torch.Tensor]](list)
    for chunk in model:
        for parameter in chunk.parameters():
            # Under ZeRO 2 and 3 this is a shard, the same elements on all ranks of the group.
            whole_parameter = getattr(parameter, "orig_param", parameter)
            group = getattr(whole_parameter, "partial_over_tp", None)
            grad = getattr(parameter, "main_grad", parameter.grad)
            grad = getattr(grad, "_local_tensor", grad)
            if group is not None and grad is not None:
                together[group, grad.dtype].append(grad)
    for (group, _), grads in together.items():
        whole = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(whole, group=group)
        for grad, total in zip(grads, whole.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view_as(grad))
