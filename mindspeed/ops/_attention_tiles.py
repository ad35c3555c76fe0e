"""Attention in tiles of query rows: one tile of the score matrix at a time.

A tile is some hundred queries of one sequence against the keys within their reach. Two ways to
compute one: a fused kernel of torch (:class:`Fused`), without dropout and without a gradient of the
position bias, and the formula in plain torch (:mod:`._attention_formula`), which supports
everything on every device. A band costs a mask of one tile; a full or causal square is one call of
the fused kernel, and a causal band that starts after the first key is two.

Forward and backward use the same tiles and the same dropout mask for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed.ops._attention_formula import ELEMENTS, Formula, Tensors, Tile
from mindspeed.ops._numerics import accumulation_dtype
from mindspeed.ops.attention_problem import (
    AttentionProblem,
    SequencePiece,
    axis,
    bnsd,
    position_bias,
)
from mindspeed.ops.visibility import tile_of

ROWS = 256
"""Queries of a tile."""

LOAD_BYTES = 16
"""What CUDA's attention kernels load at a time."""

Operands = Callable[[Tensor], torch.dtype]
Rows = tuple[Tensor, float]


@dataclass(frozen=True)
class Fused:
    """A fused attention kernel on ``[b, n, s, d]`` views with an additive bias.

    Such a kernel computes addresses itself, so it gets only tensors that ``readable`` has seen.

    Attributes:
        forward: ``(q, k, v, bias, causal, scale) -> (out, lse)``; causal is aligned at top left.
        backward: ``(dout, q, k, v, out, lse, bias, causal, scale) -> (dq, dk, dv)``.
        takes: whether it takes these queries and values.
        bias_dtype: dtype of a bias for given queries.
        readable: returns a tensor ``[..., d]`` in memory as the kernel reads it: itself, or a copy.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    takes: Callable[[Tensor, Tensor], bool]
    bias_dtype: Callable[[Tensor], torch.dtype]
    readable: Callable[[Tensor], Tensor]


def vectors(x: Tensor) -> Tensor:
    """``x [..., d]`` of any dtype, or a dense copy unless its last dimension has stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned_vectors(x: Tensor) -> Tensor:
    """``x [..., d]``, or a dense copy of it unless every ``x[...]`` starts at 16 bytes.

    The kernels load that many at a time; an address that is no multiple is an illegal access. The
    allocator's blocks are aligned, so the offset within one tells.
    """
    unit = LOAD_BYTES // x.itemsize
    steps = [step for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    aligned = not any(at % unit for at in (x.storage_offset(), *steps))
    return x if aligned and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def forward(
    problem: AttentionProblem,
    fused: Fused | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Operands = accumulation_dtype,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` without the sink; q, k, v ``[b, n, s, d]`` in the problem's layout.

    ``out`` has layout and dtype of q and the head size of v; ``lse`` is fp32 ``[b, n, s]`` (TND:
    ``[t, n]``). ``operands`` is the dtype in which the formula multiplies.
    """
    out, lse = empty_outputs(problem, q, v)
    views = [*(bnsd(x, problem.layout) for x in (q, k, v, out)), lse_view(problem, lse)]
    out.zero_()
    lse.fill_(float("-inf"))
    for piece in problem.pieces(q, k):
        forward_piece(problem, fused, piece, views, operands)
    return out, lse


def forward_piece(
    problem: AttentionProblem,
    fused: Fused | None,
    piece: SequencePiece,
    views: list[Tensor],
    operands: Operands = accumulation_dtype,
) -> None:
    """Write one sequence's rows of out and lse.

    Args:
        fused: A fused kernel for tiles without dropout.
        views: q, k, v, out as bnsd views, lse as ``[b, n, s]``, of the whole call.
        operands: In which dtype the formula's products take operands, given the queries.
    """
    q, out, lse = (views[i][:, :, piece.rows] for i in (0, 3, 4))
    k, v = (views[i][:, :, piece.columns] for i in (1, 2))
    fused = _usable(problem, fused, q, v)
    if fused is not None:
        q, k, v = (fused.readable(x) for x in (q, k, v))
    formula = Formula(problem, operands(q), q.device)
    for tile in tiles(problem, piece, q, fused):
        qt, kt, vt = q[:, :, tile.rows], k[:, :, tile.columns], v[:, :, tile.columns]
        out_t, lse_t = out[:, :, tile.rows], lse[:, :, tile.rows]
        if fused is None:
            formula.forward(tile, qt, kt, vt, out_t, lse_t)
            continue
        got = fused.forward(qt, kt, vt, tile.bias, tile.causal, problem.scale)
        if tile.merged:
            merge(out_t, lse_t, *got)
            continue
        out_t.copy_(got[0])
        lse_t.copy_(got[1])
        if tile.bias is not None:
            blind = (tile.bias == float("-inf")).all(-1)
            lse_t.masked_fill_(blind, float("-inf"))
            out_t.masked_fill_(blind.unsqueeze(-1), 0.0)


def backward(
    problem: AttentionProblem, fused: Fused | None, dout: Tensor,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    pse_grad: bool,
    operands: Operands = accumulation_dtype
) -> Tensors:  # fmt: skip
    """Return ``(dq, dk, dv, dpse)`` with shapes and dtypes of q, k, v ``[b, n, s, d]`` and pse.

    ``dout`` is like ``out``; ``out`` and ``lse [b, n, s]`` may be those of a larger softmax.
    Without ``pse_grad`` dpse is empty, ``[0]``.
    """
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dpse = empty_bias_gradient(problem, q, pse_grad)
    views = [bnsd(x, problem.layout) for x in (dout, q, k, v, out, dq, dk, dv)]
    views.append(lse_view(problem, lse))
    for piece in problem.pieces(q, k):
        backward_piece(problem, fused, piece, views, dpse if pse_grad else None, operands)
    dtype = dpse.dtype if problem.pse is None else problem.pse.dtype
    return dq, dk, dv, dpse.to(dtype)


def backward_piece(
    problem: AttentionProblem, fused: Fused | None, piece: SequencePiece, views: list[Tensor],
    dpse: Tensor | None,
    operands: Operands = accumulation_dtype
) -> None:  # fmt: skip
    """Write one sequence's rows of dq, dk, dv, and add to dpse.

    Args:
        fused: A fused kernel for tiles without dropout and bias gradient.
        views: dout, q, k, v, out, dq, dk, dv as ``[b, n, s, d]`` views of one dtype, lse as fp32
            ``[b, n, s]``.
        dpse: Gradient of the position bias in the accumulation dtype, added to, or None.
    """
    dout, q, out, dq, lse = (views[i][:, :, piece.rows] for i in (0, 1, 4, 5, 8))
    k, v, dk, dv = (views[i][:, :, piece.columns] for i in (2, 3, 6, 7))
    # A blind row's probabilities are exp(score - inf) = 0.
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    fused = _usable(problem, fused if dpse is None else None, q, v)
    if fused is not None:
        dout, q, k, v, out = (fused.readable(x) for x in (dout, q, k, v, out))
    cuts = tiles(problem, piece, q, fused)
    first = next(cuts, None)
    if first is None:
        return
    alone = first.rows == slice(0, piece.sight.queries)
    wide = q.dtype if alone else accumulation_dtype(q)
    dk_sum, dv_sum = (x if x.dtype == wide else x.to(wide) for x in (dk, dv))
    formula = Formula(problem, operands(q), q.device)
    for tile in itertools.chain([first], cuts):
        rows, columns = tile.rows, tile.columns
        dout_t, q_t, out_t, lse_t = (x[:, :, rows] for x in (dout, q, out, lse))
        given = (dout_t, q_t, k[:, :, columns], v[:, :, columns], out_t, lse_t)
        dq_t, dk_t, dv_t = dq[:, :, rows], dk_sum[:, :, columns], dv_sum[:, :, columns]
        if fused is None:
            dbias = None if dpse is None else tile_of(dpse, rows, columns)
            formula.backward(tile, *given, dq_t, dk_t, dv_t, dbias)
            continue
        grads = fused.backward(*given, tile.bias, tile.causal, problem.scale)
        dq_t.add_(grads[0])
        dk_t.add_(grads[1])
        dv_t.add_(grads[2])
    if wide != q.dtype:
        dk.copy_(dk_sum)
        dv.copy_(dv_sum)


def settle_blind_rows(pieces: Iterable[SequencePiece], *results: Rows) -> None:
    """Overwrite what a kernel returned for queries that see nothing.

    No kernel documents what that is, so nothing may depend on it: not even that it is a number.

    Args:
        pieces: The sequences that the kernel attended in.
        *results: Tensors ``[b, n, s]`` or ``[b, n, s, d]`` of all rows (views of the result),
            any dtype, each with the value to write.
    """
    for piece in pieces:
        blind = piece.sight.blind(results[0][0].device)
        if blind is None:
            continue
        for x, value in results:
            part = x[:, :, piece.rows]
            part.masked_fill_(blind if part.dim() == 3 else blind.unsqueeze(-1), value)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention of the same queries over other keys, in place; each query sees some key.

    ``out`` and ``other`` are ``[b, n, s, d_v]``, both lse ``[b, n, s]``. ``out`` and both
    lse are fp32 (fp64 for fp64 inputs), ``other`` is of any floating dtype.
    """
    both = torch.logaddexp(lse, other_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1))
    out.addcmul_(other.to(out.dtype), (other_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


def _usable(problem: AttentionProblem, fused: Fused | None, q: Tensor, v: Tensor) -> Fused | None:
    """The fused kernel, if it supports the call."""
    if fused is None or problem.dropout or not fused.takes(q, v):
        return None
    # Distances of thousands are no 16-bit numbers.
    rounds = fused.bias_dtype(q) != accumulation_dtype(q)
    return None if problem.has_slopes and rounds else fused


def tiles(
    problem: AttentionProblem, piece: SequencePiece, q: Tensor, fused: Fused | None
) -> Iterator[Tile]:
    """Divide the score matrix of a sequence; one tile where the fused kernel needs no bias.

    ``q`` is the ``[b, n, s, d]`` view of all queries, of which only dtype and device are read.
    """
    sight = piece.sight
    dtype = accumulation_dtype(q) if fused is None else fused.bias_dtype(q)
    everything = slice(0, sight.queries)
    if fused is not None and problem.pse is None:
        columns = slice(0, sight.reach(0, sight.queries)[1])
        if sight.is_full or sight.is_triangle:
            yield Tile(everything, columns, None, not sight.is_full, 0)
            return
        if sight.is_trapezoid and q.dtype == dtype:  # merging would round 16-bit outputs twice
            yield Tile(everything, slice(0, sight.high), None, False, 0)
            yield Tile(everything, slice(sight.high, columns.stop), None, True, 0, merged=True)
            return
    step = max(ROWS, ELEMENTS // sight.keys) if sight.is_full else ROWS
    for first in range(0, sight.queries, step):
        rows = slice(first, min(first + step, sight.queries))
        columns = slice(*sight.reach(rows.start, rows.stop))
        if columns.stop == columns.start:
            continue
        bias = position_bias(problem, piece, rows, columns)
        bias = None if bias is None else bias.to(dtype)
        hidden = sight.hidden(rows, columns, q.device)
        if hidden is not None:
            if bias is None:
                bias = torch.where(hidden, float("-inf"), 0.0).to(dtype)
            else:
                bias = bias.masked_fill(hidden, float("-inf"))
        yield Tile(rows, columns, bias, False, (piece.number << 32) + first)


def empty_outputs(problem: AttentionProblem, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``out`` like q with the head size of v; ``lse`` fp32 ``[b, n, s]``, or ``[t, n]`` for TND."""
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    names = "SN" if problem.layout == "TND" else "BNS"
    shape = [q.shape[axis(problem.layout, name)] for name in names]
    return out, torch.empty(shape, dtype=accumulation_dtype(q), device=q.device)


def empty_bias_gradient(problem: AttentionProblem, q: Tensor, wanted: bool) -> Tensor:
    """Zeros like the position bias in the accumulation dtype of q, or an empty tensor ``[0]``."""
    pse = problem.pse
    if pse is None or not wanted:
        return torch.empty(0, dtype=q.dtype if pse is None else pse.dtype, device=q.device)
    return torch.zeros(pse.shape, dtype=accumulation_dtype(q), device=q.device)


def lse_view(problem: AttentionProblem, lse: Tensor) -> Tensor:
    """View ``[b, n, s]`` of ``lse``, any dtype; for TND b is 1."""
    return lse.t().unsqueeze(0) if problem.layout == "TND" else lse
