"""Products of grouped experts and gradients added to ``main_grad``, by one operator each.

One launch serves all experts of a rank when their weights are adjacent in memory, as
:class:`mindspeed.te.grouped.GroupedLinear` and Megatron's ``GroupedMLP`` allocate them. Where they
were moved (Megatron's distributed optimizer stores parameters in reverse order), each expert is
launched separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from mindspeed.ops.grouped_matmul import GROUPED_MATMUL, GROUPED_OUTER
from mindspeed.ops.npu_groupmatmul_add import GROUPMATMUL_ADD
from mindspeed.ops.npu_matmul_add import MATMUL_ADD
from mindspeed.te.kernels import grouped_matmul as one_by_one


def accumulate_wgrad(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    """See :func:`mindspeed.te.kernels.accumulate_wgrad`."""
    MATMUL_ADD(x, grad, main_grad)


def grouped_matmul(
    x: torch.Tensor, weights: Sequence[torch.Tensor], splits: Sequence[int], transposed: bool
) -> torch.Tensor:
    """See :func:`mindspeed.te.kernels.grouped_matmul`."""
    stacked = as_one(weights)
    if stacked is None:
        return one_by_one(x, weights, splits, transposed)
    matrices = stacked.transpose(1, 2) if transposed else stacked
    return GROUPED_MATMUL(x, matrices, None, _ends(splits, x))  # type: ignore[no-any-return]


def grouped_wgrad(left: torch.Tensor, right: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
    """See :func:`mindspeed.te.kernels.grouped_wgrad`."""
    return GROUPED_OUTER(left, right, _ends(splits, left))  # type: ignore[no-any-return]


def accumulate_grouped_wgrad(
    left: torch.Tensor,
    right: torch.Tensor,
    splits: Sequence[int],
    main_grads: Sequence[torch.Tensor],
) -> None:
    """See :func:`mindspeed.te.kernels.accumulate_grouped_wgrad`."""
    stacked = as_one(main_grads)
    if stacked is not None:
        GROUPMATMUL_ADD(left, right, _ends(splits, left), stacked)
        return
    parts = zip(left.split(list(splits)), right.split(list(splits)), main_grads, strict=True)
    for a, b, main_grad in parts:
        MATMUL_ADD(b, a, main_grad)


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """View n tensors of one shape, adjacent in memory, as ``[n, ...]``; None if they are not."""
    first = tensors[0]
    storage, size = first.untyped_storage(), first.numel()
    for i, x in enumerate(tensors):
        if (
            x.untyped_storage()._cdata != storage._cdata
            or x.storage_offset() != first.storage_offset() + i * size
            or x.shape != first.shape
            or not x.is_contiguous()
        ):
            return None
    return first.as_strided((len(tensors), *first.shape), (size, *first.stride()))


def _ends(splits: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(accumulate(splits)), dtype=torch.int64).to(x.device, non_blocking=True)
