"""ALiBi with different numbers of queries and keys, for a kernel that requires equal numbers.

    whole:   4 x 10 = 4 x 4 + 4 x 4 + 2 x 2 + 2 x 2        causal: a triangle and the rest

The position of a square in the sequence gives its biases. The forward pass merges squares by their
log-sum-exp; the gradients of squares add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed.ops._attention_tiles import Tensors, empty_outputs, lse_view, merge
from mindspeed.ops._numerics import accumulation_dtype
from mindspeed.ops.attention_problem import AttentionProblem, SequencePiece, bnsd
from mindspeed.ops.visibility import EVERYTHING, MASK_ONLY, TOP_LEFT_CAUSAL, Sight

MOST = 32
"""Most squares of a sequence that are computed by separate calls."""


class Square(NamedTuple):
    """``size`` queries from ``row`` and as many keys from ``column``."""

    row: int
    column: int
    size: int
    causal: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.size)

    @property
    def columns(self) -> slice:
        return slice(self.column, self.column + self.size)


Part = tuple[AttentionProblem, Square]


def squares(sight: Sight) -> Iterator[Square]:
    """Yield the squares that cover what a sequence's queries see: all keys, or up to a diagonal."""
    if sight.is_full:
        yield from _whole(0, 0, sight.queries, sight.keys)
        return
    first, before = max(-sight.high, 0), max(sight.high, 0)
    rows, columns = sight.queries - first, sight.keys - before
    triangle = min(rows, columns)
    yield from _whole(first, 0, rows, before)
    yield Square(first, before, triangle, True)
    yield from _whole(first + triangle, before, rows - triangle, columns)


def _whole(row: int, column: int, rows: int, columns: int) -> Iterator[Square]:
    while rows and columns:
        size = min(rows, columns)
        yield Square(row, column, size)
        if rows > columns:
            row, rows = row + size, rows - size
        else:
            column, columns = column + size, columns - size


def parts(problem: AttentionProblem, q: Tensor, k: Tensor) -> list[Part] | None:
    """Divide a problem into squares in rows of the whole tensors; None where they do not help.

    Args:
        problem: with ALiBi slopes.
        q: ``[b, n, s_q, d]`` in the problem's layout (TND: ``[t, n, d]``), any dtype.
        k: ``[b, g, s_k, d]``, likewise.

    Returns:
        Each square with its own problem.
    """
    found: list[Part] = []
    for piece in problem.pieces(q, k):
        sight = piece.sight
        causal = sight.low <= -(sight.queries - 1) and -sight.queries < sight.high < sight.keys
        if problem.dropout or sight.mask is not None or sight.prefix is not None:
            return None
        if not (sight.is_full or causal):
            return None
        own = list(squares(sight))
        if len(own) > MOST:
            return None
        found += [_placed(problem, piece, square) for square in own]
    return found


def _placed(problem: AttentionProblem, piece: SequencePiece, square: Square) -> Part:
    slopes = problem.pse
    assert slopes is not None
    if slopes.dim() == 2 and problem.layout == "TND":
        slopes = slopes[piece.number]
    alone = replace(
        problem,
        pse=slopes, sink=None, rng=None, cu_q=None, cu_k=None, prefix=None, layout="BNSD",
        mode=TOP_LEFT_CAUSAL if square.causal else MASK_ONLY, pre=EVERYTHING, next=EVERYTHING,
        q_start=problem.q_start + square.row, k_start=problem.k_start + square.column,
    )  # fmt: skip
    row, column = piece.rows.start or 0, piece.columns.start or 0
    return alone, square._replace(row=row + square.row, column=column + square.column)


def forward(
    kernel: Callable[..., Tensors],
    problem: AttentionProblem,
    cut: list[Part],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` without the sink; q, k, v ``[b, n, s, d]`` in the problem's layout.

    Args:
        kernel: attends in a square: ``kernel(q, k, v, *options) -> (out, lse)``.
        cut: its squares, of :func:`parts`.
        v: values, dtype of q.

    Returns:
        ``out`` in layout and dtype of q with the head size of v; ``lse`` fp32 ``[b, n, s]`` (TND:
        ``[t, n]``).
    """
    out, lse = empty_outputs(problem, q, v)
    lse.fill_(float("-inf"))
    views = [bnsd(x, problem.layout) for x in (q, k, v)]
    total = torch.zeros_like(bnsd(out, problem.layout), dtype=lse.dtype)
    statistics = lse_view(problem, lse)
    for alone, square in cut:
        qkv = _cut(views, (square.rows, square.columns, square.columns))
        part, part_lse = kernel(*qkv, *alone.options())
        merge(total[:, :, square.rows], statistics[:, :, square.rows], part, part_lse)
    bnsd(out, problem.layout).copy_(total)
    return out, lse


def backward(
    kernel: Callable[..., Tensors], problem: AttentionProblem, cut: list[Part], dout: Tensor,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Tensors:  # fmt: skip
    """Return ``(dq, dk, dv)``, each with the shape of its tensor and the dtype of q.

    Args:
        kernel: gradients in a square: ``kernel(dout, q, k, v, out, lse, *options, False)``.
        cut: its squares, of :func:`parts`.
        dout: ``[b, n, s_q, d_v]`` in the layout of q.
        out: result of :func:`forward`, or of a longer softmax.
        lse: fp32 ``[b, n, s_q]`` (TND: ``[t, n]``), that of ``out``.
    """
    wide = accumulation_dtype(q)
    grads = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]
    sums = [bnsd(x, problem.layout) for x in grads]
    views = [bnsd(x, problem.layout) for x in (dout, q, k, v, out)]
    statistics = lse_view(problem, lse)
    for alone, square in cut:
        rows, columns = square.rows, square.columns
        tensors = _cut(views, (rows, rows, columns, columns, rows))
        log_sum = statistics[:, :, rows].contiguous()
        found = kernel(*tensors, log_sum, *alone.options(), False)
        for total, where, part in zip(sums, (rows, columns, columns), found, strict=False):
            total[:, :, where] += part
    return tuple(x.to(q.dtype) for x in grads)


def _cut(views: list[Tensor], where: tuple[slice, ...]) -> list[Tensor]:
    return [x[:, :, part].contiguous() for x, part in zip(views, where, strict=True)]
