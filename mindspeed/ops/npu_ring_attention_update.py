"""Merging the attention over two sets of keys by their softmax statistics.

    m = max(m_prev, m_cur)      w = s * exp(m_own - m)      s = w_prev + w_cur
    out = prev * w_prev / s + cur * w_cur / s

One pass, in fp32, one rounding: out is read twice and written once. A set in which a row sees
nothing (its maximum is -inf) has weight 0; where that is so of both, out and sum are 0. Ring
attention calls it once per step and does not differentiate it; its backward starts from the final
statistics. A 16-bit running result loses a bit per doubling of the steps: give ``prev_attn_out`` in
fp32 and round it after the last step.

Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023); the documentation of
``torch_npu.npu_ring_attention_update``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, random
from mindspeed.ops.registry import Operator, torch_npu, triton

__all__ = ["npu_ring_attention_update"]

LANES = 8
_WORKLOAD_HEAD = 128
_check = ArgumentCheck("npu_ring_attention_update")

Tensors = tuple[Tensor, Tensor, Tensor]


def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    actual_seq_qlen: Tensor | Sequence[int] | None = None,
    layout: str = "SBH",
) -> Tensors:
    """Return ``(attn_out, softmax_max, softmax_sum)`` over both sets of keys. No gradient.

    Args:
        prev_attn_out: ``[S, B, N*D]`` (SBH) or ``[T, N, D]`` (TND); fp32, bf16 or fp16.
        prev_softmax_max: fp32, ``[B, N, S, 8]`` or ``[T, N, 8]``: a number, eight times.
        prev_softmax_sum: Same.
        cur_attn_out: Shape of ``prev_attn_out``; its dtype, or 16 bit where that is fp32.
        cur_softmax_max: Like the previous.
        cur_softmax_sum: Like the previous.
        actual_seq_qlen: TND, and needed on NPU only: running sums of the sequences' lengths, with
            or without the leading 0.
        layout: ``"SBH"`` or ``"TND"``.

    Returns:
        Tensors like the three of the previous set.

    Raises:
        OperatorError: wrong layout, shape or dtype, or a gradient is wanted.
    """
    statistics = {
        "prev_softmax_max": prev_softmax_max,
        "prev_softmax_sum": prev_softmax_sum,
        "cur_softmax_max": cur_softmax_max,
        "cur_softmax_sum": cur_softmax_sum,
    }
    check = _check
    check.choice(("SBH", "TND"), layout=layout)
    check.tensor(prev_attn_out=prev_attn_out, cur_attn_out=cur_attn_out, **statistics)
    check.dtype(FLOATS, prev_attn_out=prev_attn_out, cur_attn_out=cur_attn_out)
    check.dtype((torch.float32,), **statistics)
    if accumulation_dtype(prev_attn_out) != prev_attn_out.dtype:
        check.same("dtype", prev_attn_out=prev_attn_out, cur_attn_out=cur_attn_out)
    check.rank(3, prev_attn_out=prev_attn_out)
    check.shape(prev_attn_out.shape, cur_attn_out=cur_attn_out)
    check.same("device", prev_attn_out=prev_attn_out, cur_attn_out=cur_attn_out, **statistics)
    check.rank(4 if layout == "SBH" else 3, prev_softmax_max=prev_softmax_max)
    heads = prev_softmax_max.shape[1]
    s, b, hidden = prev_attn_out.shape
    check.shape((b, heads, s, LANES) if layout == "SBH" else (s, b, LANES), **statistics)
    fits = layout == "TND" or (heads > 0 and hidden % heads == 0)
    check.require(fits, "prev_attn_out", f"a hidden size for {heads} heads", hidden)
    check.forward_only(prev_attn_out=prev_attn_out, cur_attn_out=cur_attn_out, **statistics)
    ends = None
    if layout == "TND" and prev_attn_out.device.type == "npu":
        given = actual_seq_qlen is not None
        check.require(given, "actual_seq_qlen", "running sums for TND on NPU", actual_seq_qlen)
        ends = torch.as_tensor(actual_seq_qlen, dtype=torch.int64)
        if check.values_known(ends) and ends[0] != 0:
            ends = torch.cat([ends.new_zeros(1), ends])
        ends = ends.to(prev_attn_out.device)
    return RING_ATTENTION_UPDATE(
        prev_attn_out, prev_softmax_max, prev_softmax_sum,
        cur_attn_out, cur_softmax_max, cur_softmax_sum, ends, layout,
    )  # fmt: skip


def _reference(
    prev: Tensor, prev_max: Tensor, prev_sum: Tensor, cur: Tensor,
    cur_max: Tensor, cur_sum: Tensor, ends: Tensor | None, layout: str
) -> Tensors:  # fmt: skip
    lane = [x[..., 0] for x in (prev_max, prev_sum, cur_max, cur_sum)]
    top = torch.maximum(lane[0], lane[2])
    base = top.masked_fill(top == float("-inf"), 0.0)  # -inf - -inf is no number
    w_prev, w_cur = (s * (m - base).exp() for m, s in (lane[:2], lane[2:]))
    total = w_prev + w_cur
    share = (total == 0).to(total.dtype).add_(total).reciprocal_()
    shares = [w.mul_(share) for w in (w_prev, w_cur)]
    heads = prev_max.shape[1]
    if layout == "SBH":
        shares = [w.permute(2, 0, 1) for w in shares]
        prev, cur = (x.unflatten(-1, (heads, -1)) for x in (prev, cur))
    wide = accumulation_dtype(prev)
    out = prev.to(wide) * shares[0].unsqueeze(-1)
    out.addcmul_(cur.to(wide), shares[1].unsqueeze(-1))
    out = out.flatten(-2) if layout == "SBH" else out
    lanes = (x.unsqueeze(-1).repeat_interleave(prev_max.shape[-1], -1) for x in (top, total))
    return out.to(prev.dtype), *lanes  # type: ignore[return-value]


def _npu(
    prev: Tensor, prev_max: Tensor, prev_sum: Tensor, cur: Tensor,
    cur_max: Tensor, cur_sum: Tensor, ends: Tensor | None, layout: str
) -> Tensors:  # fmt: skip
    if not prev.numel():
        return _reference(prev, prev_max, prev_sum, cur, cur_max, cur_sum, ends, layout)
    # Finite where nothing is seen: -inf - -inf is no number on the device either.
    lowest = torch.finfo(torch.float32).min
    tops = (x.clamp(min=lowest) for x in (prev_max, cur_max))
    pairs = (prev_max, prev_sum), (cur_max, cur_sum)
    sums = (total.masked_fill(top == float("-inf"), 0.0) for top, total in pairs)
    (prev_top, cur_top), (prev_sum, cur_sum) = tops, sums
    out, top, total = torch.ops.npu.npu_ring_attention_update(
        prev, prev_top, prev_sum, cur.to(prev.dtype), cur_top, cur_sum,
        actual_seq_qlen=ends, input_layout=layout,
        input_softmax_layout="TND" if layout == "TND" else "",
    )  # fmt: skip
    nothing = total == 0
    blind = nothing[..., :1] if layout == "TND" else nothing[..., 0].permute(2, 0, 1).unsqueeze(-1)
    size = prev.shape[-1] // (1 if layout == "TND" else prev_max.shape[1])
    out = out.unflatten(-1, (-1, size)) if layout == "SBH" else out
    out = out.masked_fill(blind, 0.0)
    out = out.flatten(-2) if layout == "SBH" else out
    return out, top.masked_fill(nothing, float("-inf")), total


def _fake(
    prev: Tensor, prev_max: Tensor, prev_sum: Tensor, cur: Tensor,
    cur_max: Tensor, cur_sum: Tensor, ends: Tensor | None, layout: str
) -> Tensors:  # fmt: skip
    like = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (prev, prev_max, prev_sum)
    )
    return tuple(like)  # type: ignore[return-value]


def _sample(
    dtype: torch.dtype, b: int, n: int, s: int, d: int, layout: str = "SBH", wide: bool = False
) -> tuple[Any, ...]:
    shape, lanes = ((s, b, n * d), (b, n, s)) if layout == "SBH" else ((s, n, d), (s, n))
    fp32 = torch.promote_types(dtype, torch.float32)
    prev = random(shape, fp32 if wide else dtype)
    tops = [random(lanes, fp32, seed=i) for i in (1, 2)]
    sums = [random(lanes, fp32, seed=i).abs() + 1 for i in (3, 4)]
    if tops[0].numel() > 2:
        tops[0].view(-1)[0] = tops[1].view(-1)[:2] = float("-inf")
    top, cur_top, total, cur_total = (
        x.unsqueeze(-1).repeat_interleave(LANES, -1) for x in (*tops, *sums)
    )
    ends = None if layout == "SBH" else torch.tensor([0, 1, s])
    return prev, top, total, random(shape, dtype, seed=5), cur_top, cur_total, ends, layout


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    yield _sample(dtype, 2, 3, 5, 8)
    yield _sample(dtype, 1, 2, 7, 96)
    yield _sample(dtype, 1, 4, 6, 16, "TND")
    yield _sample(dtype, 1, 1, 1, 1)
    yield _sample(dtype, 2, 2, 0, 8)


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    heads = hidden // _WORKLOAD_HEAD
    out = torch.ones(WORKLOAD_ROWS, 1, hidden, dtype=dtype, device=device)
    lanes = torch.ones(1, heads, WORKLOAD_ROWS, LANES, device=device)
    return out, lanes, lanes, out, lanes, lanes, None, "SBH"


RING_ATTENTION_UPDATE = Operator(
    "ring_attention_update(Tensor prev, Tensor prev_max, Tensor prev_sum, Tensor cur, "
    "Tensor cur_max, Tensor cur_sum, Tensor? ends, str layout) -> (Tensor, Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    cuda=[triton("ring_attention_update:forward")],
    npu=[torch_npu(_npu, "npu_ring_attention_update")],
    samples=_samples,
    workload=_workload,
    public="mindspeed.ops.npu_ring_attention_update.npu_ring_attention_update",
)
