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
    """Add ``grad^T x`` to ``main_grad``; see :func:`mindspeed.te.kernels.accumulate_wgrad`.

    Args:
        x: ``[tokens, in]``.
        grad: ``[tokens, out]`` in the dtype of x.
        main_grad: ``[out, in]``, fp32 or the dtype of x.
    """
    MATMUL_ADD(x, grad, main_grad)


def grouped_matmul(
    x: torch.Tensor, weights: Sequence[torch.Tensor], splits: Sequence[int], transposed: bool
) -> torch.Tensor:
    """Multiply each group of tokens; see :func:`mindspeed.te.kernels.grouped_matmul`.

    Args:
        x: ``[tokens, k]``, tokens of a group next to each other.
        weights: One matrix per group in the dtype of x, ``[n, k]`` when ``transposed``, else
            ``[k, n]``.
        splits: Tokens of each group.
        transposed: Multiply with the transposed matrices.

    Returns:
        ``[tokens, n]`` in the dtype of x.
    """
    stacked = as_one(weights)
    if stacked is None:
        return one_by_one(x, weights, splits, transposed)
    matrices = stacked.transpose(1, 2) if transposed else stacked
    return GROUPED_MATMUL(x, matrices, None, _ends(splits, x))  # type: ignore[no-any-return]


def grouped_wgrad(left: torch.Tensor, right: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
    """Return ``left^T right`` of each group; see :func:`mindspeed.te.kernels.grouped_wgrad`.

    Args:
        left: ``[tokens, m]``.
        right: ``[tokens, n]`` in the dtype of ``left``.
        splits: Tokens of each group.

    Returns:
        ``[groups, m, n]`` in the dtype of ``left``.
    """
    return GROUPED_OUTER(left, right, _ends(splits, left))  # type: ignore[no-any-return]


def accumulate_grouped_wgrad(
    left: torch.Tensor,
    right: torch.Tensor,
    splits: Sequence[int],
    main_grads: Sequence[torch.Tensor],
) -> None:
    """Add to buffers; see :func:`mindspeed.te.kernels.accumulate_grouped_wgrad`.

    Args:
        left: ``[tokens, m]``.
        right: ``[tokens, n]`` in the dtype of ``left``.
        splits: Tokens of each group.
        main_grads: One ``[m, n]`` per group, fp32 or the dtype of ``left``.
    """
    stacked = as_one(main_grads)
    if stacked is not None:
        GROUPMATMUL_ADD(left, right, _ends(splits, left), stacked)
        return
    parts = zip(left.split(list(splits)), right.split(list(splits)), main_grads, strict=True)
    for a, b, main_grad in parts:
        MATMUL_ADD(b, a, main_grad)


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """View n tensors of one shape and dtype as ``[n, ...]``; None if not adjacent in memory."""
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
