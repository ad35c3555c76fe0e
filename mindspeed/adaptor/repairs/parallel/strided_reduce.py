"""Defect: an all-reduce over the tensor-parallel ranks drops the sum of a strided tensor.

Where: ``megatron.core.tensor_parallel.mappings._reduce``, which reduces a contiguous copy and
returns its input (Megatron-LM PR 5338). ``reduce_from_tensor_model_parallel_region`` calls it, and
the backward of ``copy_to_tensor_model_parallel_region``.
Symptom: silent; a transposed or sliced tensor comes back as it was.
Fix: what is reduced is returned.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:strided-reduce"


def reduce_contiguous(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``_reduce``, which sums ``[...]`` rightly if it is contiguous."""

    def _reduce(input_: torch.Tensor, group: Any) -> torch.Tensor:
        return original(input_.contiguous(), group)

    return _reduce


PATCHES = (
    Patch(
        "megatron.core.tensor_parallel.mappings:_reduce",
        reduce_contiguous,
        OWNER,
        "the sum of a strided tensor over the tensor-parallel ranks is not lost",
        expects="(input_, group)",
    ),
)
