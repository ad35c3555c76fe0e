"""Attention on NPU: npu_fusion_attention, or its version 2 for position biases it has alone.

Of the statistics only the log-sum-exp is kept. The gradient kernel computes ``exp(score - max) /
sum``, so it gets that as the maximum and a sum of 1. Rules go as sparse modes with the compressed
mask; what they cannot say (a top-left band over packed sequences of different lengths) runs tile by
tile in plain torch. ALiBi goes with squares only; other rectangles are cut into them. What the
kernels return for rows that see nothing is not documented, and is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops import _attention_squares as squares
from mindspeed.ops import _attention_tiles as tiles
from mindspeed.ops.attention_problem import BIAS_BEFORE_SCALE, AttentionProblem, axis, bnsd
from mindspeed.ops.philox import default_generator_at
from mindspeed.ops.registry import note_fallback
from mindspeed.ops.visibility import (
    BAND,
    CAUSAL,
    EVERYTHING,
    MASK_ONLY,
    PREFIX,
    PREFIX_FULL,
    TOP_LEFT_CAUSAL,
    UNCUT,
    causal_mask,
    prefix_mask,
)

LANES = 8
_BEYOND_ALL_SCORES = 1e30
_NO_RULE = "npu_fusion_attention has no sparse mode for this mask"
NOTE = (
    "the plain formula runs for masks without a sparse mode: top-left bands and explicit masks "
    "with a band over packed sequences of different lengths, packs with queries but no keys, and "
    f"ALiBi of rectangles that are not cut into at most {squares.MOST} squares. What the device "
    "returns for queries that see nothing is overwritten: output 0, log-sum-exp -inf, gradient 0"
)
_UNDER_ITS_OWN_NAME = {"BSND": "BSND", "BNSD": "BNSD", "TND": "TND", "SBND": "SBH"}


def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` without the sink; q, k, v ``[b, n, s, d]`` in the problem's layout.

    ``out`` has layout and dtype of q and the head size of v; ``lse`` is fp32 ``[b, n, s]`` (TND:
    ``[t, n]``). See :func:`mindspeed.ops.attention.attention`.
    """
    problem = AttentionProblem(*options)
    if not q.numel() or not k.numel():
        return tiles.forward(problem, None, q, k, v)
    if _is_alibi_of_rectangles(problem, q, k):
        cut = squares.parts(problem, q, k)
        if cut is not None:
            return squares.forward(forward, problem, cut, q, k, v)
    call = _call(problem, q, k, v)
    if call is None:
        note_fallback("attention", _NO_RULE)
        return tiles.forward(problem, None, q, k, v)
    with default_generator_at(q, problem.rng):
        out, top, total, *_ = call.run("", scale=problem.scale)
    out, lse = call.split(out, q), top[..., 0] + total[..., 0].log()
    views = bnsd(out, problem.layout), tiles.lse_view(problem, lse)
    tiles.settle_blind_rows(problem.pieces(q, k), (views[0], 0.0), (views[1], float("-inf")))
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, *options: Any
) -> tiles.Tensors:  # fmt: skip
    """Return ``(dq, dk, dv, dpse)`` with shapes and dtypes of q, k, v ``[b, n, s, d]`` and pse.

    ``dout`` is like ``out``; ``out`` and ``lse [b, n, s]`` may be those of a larger softmax.
    The last option says whether dpse is required; if not, it is empty, ``[0]``.
    """
    *fields, pse_grad = options
    problem = AttentionProblem(*fields)
    if _is_alibi_of_rectangles(problem, q, k):
        cut = squares.parts(problem, q, k)
        if cut is not None:
            grads = squares.backward(backward, problem, cut, dout, q, k, v, out, lse)
            return *grads, q.new_empty(0)
    call = _call(problem, q, k, v) if q.numel() and k.numel() else None
    if call is None:
        return tiles.backward(problem, None, dout, q, k, v, out, lse, pse_grad)
    # A row that sees nothing has probabilities exp(score - top) = 0, whatever its scores are.
    top = lse.masked_fill(lse == float("-inf"), _BEYOND_ALL_SCORES)
    tiles.settle_blind_rows(
        problem.pieces(q, k), (tiles.lse_view(problem, top), _BEYOND_ALL_SCORES)
    )
    top = top.unsqueeze(-1).repeat_interleave(LANES, -1)
    seed, offset = (0, 0) if problem.rng is None else problem.rng.tolist()
    dq, dk, dv, dpse, *_ = call.run(
        "_grad",
        call.merge(dout),
        scale_value=problem.scale,
        softmax_max=top,
        softmax_sum=torch.ones_like(top),
        attention_in=call.merge(out),
        seed=seed,
        offset=offset,
        numels=problem.probabilities(q, k) if problem.dropout else 0,
    )
    if problem.pse is None or not pse_grad:
        dpse = q.new_empty(0, dtype=q.dtype if problem.pse is None else problem.pse.dtype)
    else:
        dpse = dpse.sum_to_size(problem.pse.shape).to(problem.pse.dtype)
    dq = call.split(dq, q)
    tiles.settle_blind_rows(problem.pieces(q, k), (bnsd(dq, problem.layout), 0.0))
    return dq, call.split(dk, k), call.split(dv, v), dpse


def _is_alibi_of_rectangles(problem: AttentionProblem, q: Tensor, k: Tensor) -> bool:
    """Slopes go with as many queries as keys only."""
    if not problem.has_slopes:
        return False
    return any(p.sight.queries != p.sight.keys for p in problem.pieces(q, k))


@dataclass(frozen=True)
class _Call:
    """The arguments that forward and gradient share.

    Attributes:
        version: suffix of the operator: "" or "_v2".
        tensors: q, k, v in the operator's layout.
        heads: of q.
    """

    version: str
    tensors: tuple[Tensor, ...]
    heads: int
    layout: str
    keywords: dict[str, Any]

    def run(self, kind: str, *more: Tensor, **keywords: Any) -> tuple[Any, ...]:
        """Call ``npu_fusion_attention`` or, as kind says, its gradient."""
        op = getattr(torch.ops.npu, f"npu_fusion_attention{kind}{self.version}")
        return op(*self.tensors, *more, self.heads, self.layout, **self.keywords, **keywords)

    def merge(self, x: Tensor) -> Tensor:
        """The operator has no layout of s, b, n, d, only of s, b, n * d."""
        return x.flatten(-2) if self.layout == "SBH" else x

    def split(self, x: Tensor, like: Tensor) -> Tensor:
        """The inverse."""
        return x.unflatten(-1, (like.shape[-2], -1)) if self.layout == "SBH" else x


def _call(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> _Call | None:
    rule = None if _is_alibi_of_rectangles(problem, q, k) else _rule(problem, q, k)
    if rule is None:
        return None
    layout = _UNDER_ITS_OWN_NAME[problem.layout]
    heads = q.shape[axis(problem.layout, "N")]
    first = problem.pse is None or problem.pse_type == BIAS_BEFORE_SCALE
    keywords = {"keep_prob": 1 - problem.dropout, "pse": _bias(problem, q, k), **rule}
    if first:  # the same two numbers, spelt otherwise
        for name in ("pre", "next"):
            keywords[f"{name}_tockens"] = keywords.pop(f"{name}_tokens")
    else:
        keywords["pse_type"] = problem.pse_type
        if problem.has_slopes:
            keywords |= {"q_start_idx": [problem.q_start], "kv_start_idx": [problem.k_start]}
    if problem.layout == "TND":
        assert problem.cu_q is not None and problem.cu_k is not None
        keywords["actual_seq_qlen"] = problem.cu_q[1:].tolist()
        keywords["actual_seq_kvlen"] = problem.cu_k[1:].tolist()
        keywords["softmax_layout"] = "TND"
    tensors = tuple(x.flatten(-2) if layout == "SBH" else x for x in (q, k, v))
    return _Call("" if first else "_v2", tensors, heads, layout, keywords)


def _bias(problem: AttentionProblem, q: Tensor, k: Tensor) -> Tensor | None:
    pse = problem.pse
    if pse is None:
        return None
    if problem.has_slopes:
        return pse.float()
    _, n, queries, _ = bnsd(q, problem.layout).shape
    shape = (pse.shape[0], n, queries, bnsd(k, problem.layout).shape[2])
    return pse.to(q.dtype).expand(shape).contiguous()


def _rule(problem: AttentionProblem, q: Tensor, k: Tensor) -> dict[str, Any] | None:
    """Sparse mode, band and mask, or None where there is no mode for it."""
    packed = problem.layout == "TND"
    if packed and any(a.stop > a.start and b.stop == b.start for a, b in problem.sequences()):
        return None  # queries without a key are not allowed
    if problem.mask is not None:
        return _explicit(problem, q, k)
    mode, pre, next_ = problem.mode, problem.pre, problem.next
    if mode == MASK_ONLY:
        return _mode(UNCUT, None)
    if mode in (PREFIX_FULL, PREFIX):
        return {**_mode(PREFIX, prefix_mask(q.device)), "prefix": list(problem.prefix or ())}
    if mode == UNCUT:
        if packed:
            assert problem.cu_q is not None and problem.cu_k is not None
            if not torch.equal(problem.cu_q, problem.cu_k):
                return None
        d = 0 if packed else bnsd(k, problem.layout).shape[2] - bnsd(q, problem.layout).shape[2]
        mode, pre, next_ = _as_bottom_right(d, pre, next_)
    return _mode(mode, causal_mask(q.device), pre, next_)


def _as_bottom_right(d: int, pre: int, next_: int) -> tuple[int, int, int]:
    """Sparse mode, pre and next of a band that is aligned at the top left."""
    if pre >= EVERYTHING and next_ in (0, d):
        return (TOP_LEFT_CAUSAL if next_ == 0 else CAUSAL), EVERYTHING, EVERYTHING
    return BAND, min(pre + d, EVERYTHING), min(next_ - d, EVERYTHING)


def _explicit(problem: AttentionProblem, q: Tensor, k: Tensor) -> dict[str, Any] | None:
    """A mask of all pairs, the band in it: mode 1 reads nothing else."""
    assert problem.mask is not None
    if problem.layout == "TND":
        unbounded = min(problem.pre, problem.next) >= EVERYTHING
        return _mode(MASK_ONLY, problem.mask) if problem.mode == MASK_ONLY or unbounded else None
    queries, keys = bnsd(q, problem.layout).shape[2], bnsd(k, problem.layout).shape[2]
    sight = problem.sight(queries, keys)
    hidden = sight.hidden(slice(0, queries), slice(0, keys), q.device)
    assert hidden is not None
    if hidden.dim() == 3:
        hidden = hidden.unsqueeze(0)
    return _mode(MASK_ONLY, hidden.expand(*hidden.shape[:-2], queries, keys).contiguous())


def _mode(
    mode: int, mask: Tensor | None, pre: int = EVERYTHING, next_: int = EVERYTHING
) -> dict[str, Any]:
    return {"sparse_mode": mode, "atten_mask": mask, "pre_tokens": pre, "next_tokens": next_}
