"""Hidden states of sequence parallelism to those of the grid, and back: all-to-all over y.

    [s/p, b, h]  <->  [s/X, b, h/Y]

At the first layer (after the embedding) and after the last one (before the final norm and the
output layer, which are Megatron's own). A rank sends (Y - 1)/Y of its s b h / p elements. Row i of
tensor-parallel rank (x, y) is row (y, i) of the grid (:func:`~.grid.token_order`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _ToGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _rows_for_columns(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _columns_for_rows(grads[0], ctx.group), None


class _FromGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _columns_for_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _rows_for_columns(grads[0], ctx.group), None


def to_grid(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[s/p, b, h]``, any dtype, to ``[s/X, b, h/Y]``; differentiable, collective over y."""
    return _ToGrid.apply(x, group)  # type: ignore[no-any-return]


def from_grid(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[s/X, b, h/Y]``, any dtype, to ``[s/p, b, h]``; differentiable, collective over y."""
    return _FromGrid.apply(x, group)  # type: ignore[no-any-return]


def _rows_for_columns(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = x.unflatten(-1, (group.size(), -1)).movedim(-2, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.flatten(0, 1)


def _columns_for_rows(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = x.contiguous().unflatten(0, (group.size(), -1))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.movedim(0, -2).flatten(-2)
