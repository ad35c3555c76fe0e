"""Rows selected by an index map, whose gradients are selected by the inverse map.

    out[i] = sum_j x[index[i, j]]          entries below 0 are left out

Nothing is scattered, so both passes are exact to one rounding and the same in every run. A one-hot
product does the same with 2 n m h operations and the matrix ``[n, m]``.
"""

from __future__ import annotations

from typing import Any

import torch


def select_rows(x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return ``[m, h]``, sums in fp32 of selected rows.

    Args:
        x: ``[n, h]``, floating dtype.
        index: int64 ``[m, j]``, rows of ``x``; negative: none.
        inverse: int64 ``[n, i]``, the rows of the result in which each row of ``x`` is; negative:
            none.
    """
    return _SelectRows.apply(x, index, inverse)  # type: ignore[no-any-return]


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return _sum(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        index, inverse = ctx.saved_tensors
        return select_rows(grads[0], inverse, index), None, None


def _sum(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if not x.shape[0]:
        return x.new_zeros(index.shape[0], x.shape[1])
    first, *others = index.unbind(1)
    out = _one(x, first)
    if others:
        out = out.to(torch.promote_types(x.dtype, torch.float32))
        for column in others:
            out += _one(x, column)
    return out.to(x.dtype)


def _one(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, index.clamp(min=0)).masked_fill_((index < 0).unsqueeze(1), 0)
