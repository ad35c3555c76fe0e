"""Products of grouped experts and gradients added to ``main_grad``, by as few launches as may be.

One launch serves all experts of a rank whose weights are adjacent in memory: as
:class:`mindspeed.te.grouped.GroupedLinear` and Megatron's ``GroupedMLP`` allocate them, and in
reverse order in Megatron's buffers (:mod:`mindspeed.te.adjacent`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from mindspeed.ops.grouped_matmul import GROUPED_MATMUL, GROUPED_OUTER
from mindspeed.ops.npu_groupmatmul_add import GROUPMATMUL_ADD
from mindspeed.ops.npu_matmul_add import MATMUL_ADD
from mindspeed.te.adjacent import Run, runs
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
    outputs = []
    width = weights[0].shape[0 if transposed else 1]
    found = runs(weights, splits, x.shape[1] + width)
    for run, rows in zip(found, _rows(x, found, splits), strict=True):
        outputs.append(_product(rows, run, weights, splits[run.experts], transposed))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _product(
    x: torch.Tensor,
    run: Run,
    weights: Sequence[torch.Tensor],
    splits: Sequence[int],
    transposed: bool,
) -> torch.Tensor:
    if run.count == 1 and run.matrices is None:
        run = Run(run.first, 1, weights[run.first].unsqueeze(0))
    if run.matrices is None:
        return one_by_one(x, weights[run.experts], splits, transposed)
    matrices = run.matrices.transpose(1, 2) if transposed else run.matrices
    ends = _ends(run.sizes(splits), x)
    out = GROUPED_MATMUL(run.ordered(x, splits), matrices, None, ends)
    return run.restored(out, splits)


def _rows(x: torch.Tensor, found: Sequence[Run], splits: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The rows ``[t, k]`` of each run."""
    return x.split([sum(splits[run.experts]) for run in found])


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
    found = runs(main_grads, splits, left.shape[1] + right.shape[1])
    lefts, rights = _rows(left, found, splits), _rows(right, found, splits)
    for run, a, b in zip(found, lefts, rights, strict=True):
        sizes = list(splits[run.experts])
        if run.matrices is not None:
            ends = _ends(run.sizes(sizes), a)
            GROUPMATMUL_ADD(run.ordered(a, sizes), run.ordered(b, sizes), ends, run.matrices)
            continue
        parts = zip(a.split(sizes), b.split(sizes), main_grads[run.experts], strict=True)
        for one, other, main_grad in parts:
            MATMUL_ADD(other, one, main_grad)


def _ends(splits: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(accumulate(splits)), dtype=torch.int64).to(x.device, non_blocking=True)
