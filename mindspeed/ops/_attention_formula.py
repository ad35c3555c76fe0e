"""Attention of a tile of queries in plain torch: the formula, with everything in it.

It takes some heads at a time, so that their scores and what becomes of them stay in a CPU's cache,
and uses the memory for those again: on the CPU, fresh memory costs more than the arithmetic in it.
Exponentials have base 2 because torch's ``exp2`` takes a quarter of the time of its ``exp`` there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed.ops._numerics import accumulation_dtype
from mindspeed.ops.attention_problem import BIAS_BEFORE_SCALE, AttentionProblem
from mindspeed.ops.philox import draws, kept

ELEMENTS = 1 << 19
"""Scores to compute at a time on the CPU."""

_LOG2_E = math.log2(math.e)
_BETWEEN_PARTS = 1 << 48  # of the seeds; tiles have the numbers below

Tensors = tuple[Tensor, ...]
Heads = tuple[slice, slice]  # of batch and heads


@dataclass(frozen=True)
class Tile:
    """Some queries of a sequence and the keys within their reach.

    Attributes:
        bias: added to the scaled scores, -inf where masked, or None.
        causal: the fused kernel masks above the diagonal.
        number: distinguishes the tile from all others of the call.
        merged: the queries are those of the previous tile, with other keys; outputs are merged.
    """

    rows: slice
    columns: slice
    bias: Tensor | None
    causal: bool
    number: int
    merged: bool = False


class Formula:
    """The formula for the tiles of one call.

    Args:
        operands: dtype in which products take their operands; everything else is computed in fp32,
            or float64.
    """

    def __init__(
        self, problem: AttentionProblem, operands: torch.dtype, device: torch.device
    ) -> None:
        self.problem, self.operands = problem, operands
        self._memory = _Memory(device)

    def forward(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor,
        out: Tensor, lse: Tensor
    ) -> None:  # fmt: skip
        """Write out and lse of a tile.

        Args:
            tile: which part of the scores this is.
            q: ``[b, n, r, d]``, floating dtype.
            k: ``[b, n_k, c, d]``, dtype of q.
            v: ``[b, n_k, c, d_v]``, dtype of q.
            out: ``[b, n, r, d_v]``, dtype of q; overwritten.
            lse: ``[b, n, r]``, fp32 (fp64 for fp64 inputs); overwritten.
        """
        keep = 1 - self.problem.dropout
        for part, (heads, groups, count) in enumerate(_parts(q, k)):
            p = self._scores(tile, heads, q[heads], k[groups], count)
            top = p.amax(-1, keepdim=True)
            if tile.bias is not None:  # where nothing is seen the exponents are -inf - 0
                top.masked_fill_(top == float("-inf"), 0.0)
            total = p.sub_(top).exp2_().sum(-1, keepdim=True)
            torch.mul(top.add_(total.log2()).squeeze(-1), 1 / _LOG2_E, out=lse[heads])
            if self.problem.dropout:
                p.mul_(self._kept(tile, part, p))
                total.mul_(keep)
            if tile.bias is not None:
                total.masked_fill_(total == 0, 1.0)
            weighed = torch.bmm(self._rounded(p, count), self._operand(v[groups], count))
            out[heads] = weighed.view(*p.shape[:-1], -1).mul_(total.reciprocal_())

    def backward(
        self, tile: Tile, dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
        out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        dbias: Tensor | None
    ) -> None:  # fmt: skip
        """Write the gradient of a tile's queries and add up those of its keys.

        Args:
            dout: gradient of out, ``[b, n, r, d_v]``, dtype of q.
            out: ``[b, n, r, d_v]``, maybe of a larger softmax.
            lse: ``[b, n, r]`` likewise; +inf where a row sees nothing.
            dq: gradient of q, overwritten; shape of q.
            dk: gradient of k, added to; shape of k.
            dv: gradient of v, added to; shape of v.
            dbias: gradient of the position bias within the tile, added to, or None.
        """
        scale, keep = self.problem.scale, 1 - self.problem.dropout
        for part, (heads, groups, count) in enumerate(_parts(q, k)):
            p = self._scores(tile, heads, q[heads], k[groups], count)
            p.sub_(lse[heads].unsqueeze(-1) * _LOG2_E).exp2_()
            q_part, dout_part, k_part, v_part = (
                self._operand(x, count) for x in (q[heads], dout[heads], k[groups], v[groups])
            )
            ds = self._product("ds", dout_part, v_part.mT, p.dtype).view(p.shape)
            weights = self._rounded(p, count)
            if self.problem.dropout:
                factor = self._kept(tile, part, p)
                ds.mul_(factor).mul_(1 / keep)
                weights = self._memory("weights", weights.shape, weights.dtype).copy_(weights)
                weights.mul_(factor.view(weights.shape))
            dv_part, dk_part = dv[groups], dk[groups]
            dv_part.add_(torch.bmm(weights.mT, dout_part).view(dv_part.shape), alpha=1 / keep)
            ds.sub_((dout[heads] * out[heads].to(p.dtype)).sum(-1, keepdim=True)).mul_(p)
            if dbias is not None:
                into, before = _of(dbias, heads), self.problem.pse_type == BIAS_BEFORE_SCALE
                into.add_(ds.sum_to_size(into.shape), alpha=scale if before else 1.0)
            slopes = self._rounded(ds, count)
            dk_part.add_(torch.bmm(slopes.mT, q_part).view(dk_part.shape), alpha=scale)
            dq_part = dq[heads]
            torch.mul(torch.bmm(slopes, k_part).view(dq_part.shape), scale, out=dq_part)

    def _scores(self, tile: Tile, heads: Heads, q: Tensor, k: Tensor, count: int) -> Tensor:
        """``[b, n, r, c]``, in base 2."""
        q_part, k_part = self._operand(q, count), self._operand(k, count)
        scores = self._product("scores", q_part, k_part.mT, accumulation_dtype(q))
        scores = scores.view(*q.shape[:-1], k.shape[2]).mul_(self.problem.scale * _LOG2_E)
        if tile.bias is not None:
            scores.add_(_of(tile.bias, heads), alpha=_LOG2_E)
        return scores

    def _operand(self, x: Tensor, count: int) -> Tensor:
        """``[b, n, s, d]`` as the operand of ``count`` products, one for every key head."""
        return x.to(self.operands).reshape(count, -1, x.shape[-1])

    def _rounded(self, x: Tensor, count: int) -> Tensor:
        """Do the same for intermediate results."""
        x = x.view(count, -1, x.shape[-1])
        same = x.dtype == self.operands
        return x if same else self._memory("rounded", x.shape, self.operands).copy_(x)

    def _product(self, name: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """``a @ b``, to compute on in ``dtype``."""
        shape = torch.Size((*a.shape[:-1], b.shape[-1]))
        if dtype == self.operands:
            return torch.bmm(a, b, out=self._memory(name, shape, dtype))
        product = torch.bmm(a, b, out=self._memory("rounded", shape, self.operands))
        return self._memory(name, shape, dtype).copy_(product)

    def _kept(self, tile: Tile, part: int, p: Tensor) -> Tensor:
        """1 where a probability of a part of a tile is kept, 0 where it is dropped."""
        assert self.problem.rng is not None
        seed, dropout = self.problem.rng.clone(), self.problem.dropout
        seed[0] += tile.number + part * _BETWEEN_PARTS
        if p.is_cpu:
            return kept(draws(seed, p.shape), dropout, p.dtype)
        generator = torch.Generator(p.device).manual_seed(int(seed.sum()) % 2**63)
        return torch.empty_like(p).bernoulli_(1 - dropout, generator=generator)


class _Memory:
    """Uninitialised tensors by name; the next one of a name takes the place of the last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        count, held = shape.numel(), self.held.get(name)
        if held is None or held.numel() < count:
            held = self.held[name] = torch.empty(count, dtype=dtype, device=self.device)
        return held[:count].view(shape)


def _parts(q: Tensor, k: Tensor) -> Iterator[tuple[Heads, Heads, int]]:
    """Slices of the queries' and of the keys' heads that belong together; how many key heads."""
    batch, groups, keys = k.shape[:3]
    shared = q.shape[1] // groups  # query heads of a key head
    most = max(1, ELEMENTS // (shared * q.shape[2] * keys)) if q.is_cpu else batch * groups
    entries = max(1, most // groups)
    for b in range(0, batch, entries):
        rows = slice(b, min(b + entries, batch))
        for g in range(0, groups, most):
            some = slice(g, min(g + most, groups))
            count = (rows.stop - rows.start) * (some.stop - some.start)
            yield (rows, slice(some.start * shared, some.stop * shared)), (rows, some), count


def _of(x: Tensor, heads: Heads) -> Tensor:
    """The part of some heads of a tensor that broadcasts to ``[b, n, r, c]``, any dtype."""
    if x.dim() < 4:
        return x
    rows, some = (p if n > 1 else slice(None) for p, n in zip(heads, x.shape, strict=False))
    return x[rows, some]
