"""Attention in tiles of query rows: never more of the score matrix than a tile at a time.

A tile is some hundred queries of one sequence against the keys within their reach. Two ways to
compute one: a fused kernel of torch (:class:`Fused`), where nothing is dropped and the position
bias needs no gradient, and the formula in plain torch, which does everything on every device. A
band costs a mask of one tile; a full or causal square is one call of the fused kernel.

Forward and backward cut the same tiles and draw the same dropout mask for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mindspeed.ops._attention_problem import Piece, Problem, position_bias
from mindspeed.ops._layout import axis, bnsd
from mindspeed.ops._numerics import accumulation_dtype
from mindspeed.ops._visibility import cut

ROWS = 256
"""Queries of a tile."""

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Fused:
    """A fused attention kernel on ``[b, n, s, d]`` views with an additive bias.

    Attributes:
        forward: ``(q, k, v, bias, causal, scale) -> (out, lse)``; causal is aligned at top left.
        backward: ``(dout, q, k, v, out, lse, bias, causal, scale) -> (dq, dk, dv)``.
        takes: whether it takes these queries and values.
        bias_dtype: dtype of a bias for given queries.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    takes: Callable[[torch.Tensor, torch.Tensor], bool]
    bias_dtype: Callable[[torch.Tensor], torch.dtype]


def forward(
    problem: Problem, fused: Fused | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(out, lse)`` in the problem's layout, without the sink."""
    out, lse = empty_outputs(problem, q, v)
    views = [*(bnsd(x, problem.layout) for x in (q, k, v, out)), lse_view(problem, lse)]
    out.zero_()
    lse.fill_(float("-inf"))
    for piece in problem.pieces(q, k):
        forward_piece(problem, fused, piece, views)
    return out, lse


def forward_piece(
    problem: Problem, fused: Fused | None, piece: Piece, views: list[torch.Tensor]
) -> None:
    """Write one sequence's rows of out and lse.

    Args:
        problem: The options.
        fused: A fused kernel for tiles without dropout.
        piece: The sequence.
        views: q, k, v, out as bnsd views, lse as ``[b, n, s]``, of the whole call.
    """
    q, out, lse = (views[i][:, :, piece.rows] for i in (0, 3, 4))
    k, v = (views[i][:, :, piece.columns] for i in (1, 2))
    fused = _usable(problem, fused, q, v)
    for tile in tiles(problem, piece, q, fused):
        qt, kt, vt = q[:, :, tile.rows], k[:, :, tile.columns], v[:, :, tile.columns]
        got = (
            _formula(problem, tile, qt, kt, vt)
            if fused is None
            else fused.forward(qt, kt, vt, tile.bias, tile.causal, problem.scale)
        )
        out[:, :, tile.rows], lse[:, :, tile.rows] = got[0], got[1]
        if tile.bias is not None and fused is not None:
            blind = (tile.bias == float("-inf")).all(-1)
            lse[:, :, tile.rows].masked_fill_(blind, float("-inf"))
            out[:, :, tile.rows].masked_fill_(blind.unsqueeze(-1), 0.0)


def backward(
    problem: Problem, fused: Fused | None, dout: torch.Tensor,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    pse_grad: bool,
) -> Tensors:  # fmt: skip
    """Return ``(dq, dk, dv, dpse)``; out and lse may be those of a larger softmax."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dpse = empty_bias_gradient(problem, q, pse_grad)
    views = [bnsd(x, problem.layout) for x in (dout, q, k, v, out, dq, dk, dv)]
    views.append(lse_view(problem, lse))
    for piece in problem.pieces(q, k):
        backward_piece(problem, fused, piece, views, dpse if pse_grad else None)
    dtype = dpse.dtype if problem.pse is None else problem.pse.dtype
    return dq, dk, dv, dpse.to(dtype)


def backward_piece(
    problem: Problem, fused: Fused | None, piece: Piece, views: list[torch.Tensor],
    dpse: torch.Tensor | None,
) -> None:  # fmt: skip
    """Write one sequence's rows of dq, dk, dv, and add to dpse.

    Args:
        problem: The options.
        fused: A fused kernel for tiles without dropout and bias gradient.
        piece: The sequence.
        views: dout, q, k, v, out, dq, dk, dv as bnsd views, lse as ``[b, n, s]``.
        dpse: Gradient of the position bias, or None.
    """
    dout, q, out, dq, lse = (views[i][:, :, piece.rows] for i in (0, 1, 4, 5, 8))
    k, v, dk, dv = (views[i][:, :, piece.columns] for i in (2, 3, 6, 7))
    # A blind row's probabilities are exp(score - inf) = 0.
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    fused = _usable(problem, fused if dpse is None else None, q, v)
    cuts = list(tiles(problem, piece, q, fused))
    wide = accumulation_dtype(q) if len(cuts) > 1 else q.dtype
    dk_sum, dv_sum = (x if x.dtype == wide else x.to(wide) for x in (dk, dv))
    for tile in cuts:
        rows, columns = tile.rows, tile.columns
        dout_t, q_t, out_t, lse_t = (x[:, :, rows] for x in (dout, q, out, lse))
        given = (dout_t, q_t, k[:, :, columns], v[:, :, columns], out_t, lse_t)
        if fused is None:
            *grads, dbias = _formula_backward(problem, tile, *given)
            if dpse is not None:
                cut(dpse, rows, columns).add_(dbias.sum_to_size(cut(dpse, rows, columns).shape))
        else:
            grads = list(fused.backward(*given, tile.bias, tile.causal, problem.scale))
        dq[:, :, rows] = grads[0]
        dk_sum[:, :, columns] += grads[1]
        dv_sum[:, :, columns] += grads[2]
    if wide != q.dtype:
        dk.copy_(dk_sum)
        dv.copy_(dv_sum)


def _usable(
    problem: Problem, fused: Fused | None, q: torch.Tensor, v: torch.Tensor
) -> Fused | None:
    """The fused kernel, unless it cannot do what is asked for."""
    if fused is None or problem.dropout or not fused.takes(q, v):
        return None
    # Distances of thousands are no 16-bit numbers.
    rounds = fused.bias_dtype(q) != accumulation_dtype(q)
    return None if problem.has_slopes and rounds else fused


@dataclass(frozen=True)
class Tile:
    """Some queries of a sequence and the keys within their reach.

    Attributes:
        rows: the queries.
        columns: the keys.
        bias: what is added to the scaled scores, -inf where hidden, or None.
        causal: the fused kernel hides what is above the diagonal.
        number: distinguishes the tile from all others of the call.
    """

    rows: slice
    columns: slice
    bias: torch.Tensor | None
    causal: bool
    number: int


def tiles(problem: Problem, piece: Piece, q: torch.Tensor, fused: Fused | None) -> Iterator[Tile]:
    """Cut the score matrix of a sequence; one tile where the fused kernel needs no bias."""
    sight = piece.sight
    dtype = accumulation_dtype(q) if fused is None else fused.bias_dtype(q)
    everything = slice(0, sight.queries)
    if fused is not None and problem.pse is None and (sight.is_full or sight.is_triangle):
        columns = slice(0, sight.reach(0, sight.queries)[1])
        yield Tile(everything, columns, None, not sight.is_full, 0)
        return
    for first in range(0, sight.queries, ROWS):
        rows = slice(first, min(first + ROWS, sight.queries))
        columns = slice(*sight.reach(rows.start, rows.stop))
        if columns.stop == columns.start:
            continue
        bias = position_bias(problem, piece, rows, columns)
        bias = None if bias is None else bias.to(dtype)
        hidden = sight.hidden(rows, columns, q.device)
        if hidden is not None:
            if bias is None:
                bias = torch.zeros(hidden.shape, dtype=dtype, device=q.device)
            bias = bias.masked_fill(hidden, float("-inf"))
        yield Tile(rows, columns, bias, False, (piece.number << 32) + first)


def _scores(tile: Tile, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """``[b, n, r, c]``; the query heads that share a key head are rows of one product."""
    scores = _merge_heads(q * scale, k) @ k.transpose(-1, -2)
    scores = scores.view(*q.shape[:-1], k.shape[2])
    return scores if tile.bias is None else scores.add_(tile.bias)


def _formula(
    problem: Problem, tile: Tile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (x.to(accumulation_dtype(x)) for x in (q, k, v))
    scores = _scores(tile, q, k, problem.scale)
    lse = scores.logsumexp(-1)
    top = lse.masked_fill(lse == float("-inf"), float("inf"))
    p = scores.sub_(top[..., None]).exp_()
    if problem.dropout:
        p.mul_(_kept(problem, tile, p))
    out = (_merge_heads(p, v) @ v).view(*q.shape[:-1], v.shape[-1])
    return out, lse


def _formula_backward(
    problem: Problem, tile: Tile, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
) -> Tensors:  # fmt: skip
    dout, q, k, v, out = (x.to(accumulation_dtype(x)) for x in (dout, q, k, v, out))
    p = _scores(tile, q, k, problem.scale).sub_(lse[..., None]).exp_()
    dp = (_merge_heads(dout, v) @ v.transpose(-1, -2)).view(p.shape)
    kept = p
    if problem.dropout:
        factor = _kept(problem, tile, p)
        kept = p * factor
        dp.mul_(factor)
    delta = (dout * out).sum(-1, keepdim=True)
    ds = dp.sub_(delta).mul_(p)
    dv = _merge_heads(kept, v).transpose(-1, -2) @ _merge_heads(dout, v)
    dk = _merge_heads(ds, k).transpose(-1, -2) @ _merge_heads(q, k) * problem.scale
    dq = (_merge_heads(ds, k) @ k).view(q.shape) * problem.scale
    before = problem.pse is not None and problem.pse_type == 1
    return dq, dk, dv, ds * problem.scale if before else ds


def _merge_heads(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``[b, n, r, c]`` to ``[b, n_k, n / n_k * r, c]``."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _kept(problem: Problem, tile: Tile, p: torch.Tensor) -> torch.Tensor:
    """0 where a probability is dropped, else ``1 / (1 - dropout)``."""
    assert problem.rng is not None
    seed = (int(problem.rng[0]) + int(problem.rng[1]) + tile.number) % 2**63
    generator = torch.Generator(p.device).manual_seed(seed)
    keep = 1 - problem.dropout
    return torch.empty_like(p).bernoulli_(keep, generator=generator).div_(keep)


def empty_outputs(
    problem: Problem, q: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` like q with the head size of v; ``lse`` ``[b, n, s]``, or ``[t, n]`` for TND."""
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    names = "SN" if problem.layout == "TND" else "BNS"
    shape = [q.shape[axis(problem.layout, name)] for name in names]
    return out, torch.empty(shape, dtype=accumulation_dtype(q), device=q.device)


def empty_bias_gradient(problem: Problem, q: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Zeros like the position bias, in the dtype to add up in, or nothing."""
    pse = problem.pse
    if pse is None or not wanted:
        return torch.empty(0, dtype=q.dtype if pse is None else pse.dtype, device=q.device)
    return torch.zeros(pse.shape, dtype=accumulation_dtype(q), device=q.device)


def lse_view(problem: Problem, lse: torch.Tensor) -> torch.Tensor:
    """``[b, n, s]`` view; for TND b is 1."""
    return lse.t().unsqueeze(0) if problem.layout == "TND" else lse
