"""Defects of reductions over the tensor-parallel ranks.

Defect: single experts with biases cannot be trained with the local layer spec.

Where: ``reduce_from_tensor_model_parallel_region`` and
``reduce_scatter_to_sequence_parallel_region`` of ``megatron.core.tensor_parallel.mappings``, which
with one rank return their input out of an autograd function, and
``megatron.core.transformer.mlp.MLP``, which adds the bias of an expert to that in place.
Symptom: ``RuntimeError: Output 0 of _ReduceFromModelParallelRegion is a view and is being modified
inplace`` in the first step, on one rank and with ``--expert-tensor-parallel-size 1``.
Fix: with one rank a view that autograd knows is returned, whose gradient is the same. It is a node
of its own in the graph, as before: ``SharedExpertMLP`` sets when that node runs in backward.

Defect: an all-reduce over the tensor-parallel ranks drops the sum of a strided tensor.

Where: ``megatron.core.tensor_parallel.mappings._reduce``, which reduces a contiguous copy and
returns its input (Megatron-LM PR 5338). ``reduce_from_tensor_model_parallel_region`` calls it, and
the backward of ``copy_to_tensor_model_parallel_region``.
Symptom: silent; a transposed or sliced tensor comes back as it was.
Fix: what is reduced is returned.
Versions: <0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind

_MAPPINGS = "megatron.core.tensor_parallel.mappings:"
_WHY = "what one rank reduces can be changed in place"


def nothing_to_reduce(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a reduction of ``[...]`` over tensor-parallel ranks."""

    def reduced(input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from megatron.core.utils import get_tensor_model_parallel_group_if_none

        given = bind(original, (input_, *args), kwargs).get("group")  # none before 0.15
        group = get_tensor_model_parallel_group_if_none(given)
        if group is not None and group.size() == 1:
            return input_.view_as(input_)
        return original(input_, *args, **kwargs)

    return reduced


def reduce_contiguous(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``_reduce``, which sums ``[...]`` rightly if it is contiguous."""

    def _reduce(input_: torch.Tensor, *group: Any) -> torch.Tensor:
        return original(input_.contiguous(), *group)

    return _reduce


PATCHES = (
    repair(
        _MAPPINGS + "reduce_from_tensor_model_parallel_region",
        nothing_to_reduce,
        _WHY,
        expects="(input_, ...)",
    ),
    repair(
        _MAPPINGS + "reduce_scatter_to_sequence_parallel_region",
        nothing_to_reduce,
        _WHY,
        expects="(input_, group, input_split_sizes, use_global_buffer)",
    ),
    repair(
        "megatron.core.tensor_parallel.mappings:_reduce",
        reduce_contiguous,
        "the sum of a strided tensor over the tensor-parallel ranks is not lost",
        expects={">=0.15": "(input_, group)", "<0.15": "(input_)"},
        versions="<0.19",
    ),
)
