"""The grid of ranks, and the order of the tokens on it.

    p = 8, X = 4, Y = 2       x 0 1 2 3
                        y 0     0 1 2 3      x-groups (0 1 2 3) (4 5 6 7)
                        y 1     4 5 6 7      y-groups (0 4) (1 5) (2 6) (3 7)

Neighbours form an x-group, which is best placed inside a node. Attention needs each token on one
rank of a y-group: it is context-parallel over y, and over context-parallel ranks as well.

Hidden states change between sequence parallelism and the grid by an all-to-all over y:

    [s/p, b, h]  <->  [s/X, b, h/Y]

At the first layer (after the embedding) and after the last one (before the final norm and the
output layer, which are Megatron's own). A rank sends (Y - 1)/Y of its s b h / p elements. Row i of
tensor-parallel rank (x, y) is row (y, i) of the grid (:func:`token_order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.spmd import Collective, V, typed


@dataclass(frozen=True)
class Grid:
    """The process groups of one rank.

    Attributes:
        tp: All p tensor-parallel ranks.
        x: X ranks that share the rows of hidden states.
        y: Y ranks that share the columns of hidden states.
        sequence: Ranks that share the tokens in attention: y and context-parallel, y fastest.
    """

    tp: dist.ProcessGroup
    x: dist.ProcessGroup
    y: dist.ProcessGroup
    sequence: dist.ProcessGroup


_CURRENT: list[Grid] = []


def current_grid() -> Grid:
    """The grid of this process.

    Raises:
        ConfigError: There is none.
    """
    if not _CURRENT:
        raise ConfigError(
            "there is no grid of tensor-parallel ranks: add --tp-2d --tp-x X --tp-y Y, and "
            "initialize model parallelism first"
        )
    return _CURRENT[-1]


def set_current_grid(grid: Grid | None) -> Grid | None:
    """Make it the grid of this process, None for no grid, and return the one before it."""
    before = _CURRENT.pop() if _CURRENT else None
    if grid is not None:
        _CURRENT.append(grid)
    return before


def x_groups(tp_ranks: Sequence[int], x: int) -> list[list[int]]:
    """The x-groups of a tensor-parallel group: X neighbours each."""
    return [list(tp_ranks[first : first + x]) for first in range(0, len(tp_ranks), x)]


def y_groups(tp_ranks: Sequence[int], x: int) -> list[list[int]]:
    """The y-groups of a tensor-parallel group: every X-th rank."""
    return [list(tp_ranks[first::x]) for first in range(x)]


def sequence_groups(tp_groups: Sequence[Sequence[int]], x: int) -> list[list[int]]:
    """The ranks that share tokens in attention, one list for each x."""
    return [[rank for ranks in tp_groups for rank in ranks[first::x]] for first in range(x)]


def token_order(tokens: int, x: int, y: int) -> torch.Tensor:
    """The order of a context-parallel rank's tokens in which nothing has to be moved in layers.

    A causal mask gives ranks of attention equal work if, of 2 Y chunks of equal size, rank y owns
    chunks y and 2 Y - 1 - y. (With context parallelism these are the chunks that Megatron's
    batches would give to a rank of the union.) Gathering over x and reduce-scattering over y
    concatenates and splits rows in rank order, and Megatron's embedding gives chunk r of p to
    tensor-parallel rank r = y X + x; so ids and labels are put in the order

        for y: for x: part (x, y) of [tokens of attention rank 0, of rank 1, ...]

    Returns:
        int64 ``[tokens]``: position of each token in the batch.

    Raises:
        ConfigError: The tokens cannot be shared evenly.
    """
    if tokens % (2 * y) or tokens % (x * y):
        raise ConfigError(
            f"--tp-2d: {tokens} tokens on each context-parallel rank must be divisible by "
            f"tp_x * tp_y = {x * y} and by 2 * tp_y = {2 * y}: change --seq-length or pad samples"
        )
    chunks = torch.arange(tokens).view(2 * y, -1)
    by_attention_rank = torch.stack([chunks[:y], chunks[y:].flip(0)], dim=1)
    return by_attention_rank.reshape(x, y, -1).transpose(0, 1).flatten()


@typed(Collective(V, V))
class _ToGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _rows_for_columns(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _columns_for_rows(grads[0], ctx.group), None


@typed(Collective(V, V))
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
