"""Causal convolution of each channel with the tokens before it, within its document, and SiLU.

    pre[t] = bias + sum_i weight[taps - 1 - i] x[t - i]     while t - i is in the document
    y = silu(pre), or pre
    dpre = dy silu'(pre);   dx[t] = sum_i weight[taps - 1 - i] dpre[t + i];   dweight = sum_t dpre x

Short convolutions of gated delta nets and of Mamba. Computed in fp32 and rounded once; only the
arguments are kept for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, random
from mindspeed.ops.registry import Operator, plain_torch, triton

__all__ = ["causal_conv1d"]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Convolve each channel with the tokens before it, within its document.

    Args:
        x: ``[b, t, c]``, fp32, bf16 or fp16.
        weight: ``[c, taps]``; the last tap meets the token itself.
        bias: ``[c]``.
        silu: Apply SiLU to the result.
        cu_seqlens: Ends of documents from 0, integers ``[documents + 1]``, with b = 1. Read on the
            host.

    Returns:
        ``[b, t, c]`` in the dtype of x.

    Raises:
        OperatorError: Wrong dtypes or shapes, documents that do not end at t, or with b > 1.
    """
    check = ArgumentCheck("causal_conv1d")
    check.dtype(FLOATS, x=x, weight=weight, bias=bias)
    check.same("device", x=x, weight=weight, bias=bias)
    check.rank(3, x=x)
    check.rank(2, weight=weight)
    samples, length, channels = x.shape
    check.require(
        weight.shape[0] == channels and weight.shape[1] > 0,
        "weight",
        f"shape ({channels}, taps)",
        weight.shape,
    )
    if bias is not None:
        check.shape((channels,), bias=bias)
    if cu_seqlens is None:
        ends = [length * sample for sample in range(samples + 1)]
    else:
        ends = document_ends(check, cu_seqlens, samples, length)
    y = CAUSAL_CONV1D(x.flatten(0, 1), weight, bias, ends, silu)
    return y.view(x.shape)  # type: ignore[no-any-return]


def document_ends(
    check: ArgumentCheck, cu_seqlens: Tensor | Sequence[int], samples: int, length: int
) -> list[int]:
    """Ends of documents on the host, from 0 to the length of the only sample."""
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    check.require(
        samples == 1 and ends[0] == 0 and ends[-1] == length and ends == sorted(ends),
        "cu_seqlens",
        f"documents of one sample, ascending from 0 to {length}",
        f"{ends} with {samples} samples",
    )
    return ends


def positions(ends: Sequence[int], device: torch.device) -> Tensor:
    """Position of each token in its document: ``[t]`` int32."""
    bounds = torch.tensor(ends)
    starts = bounds[:-1].repeat_interleave(bounds.diff())
    return (torch.arange(ends[-1]) - starts).int().to(device, non_blocking=True)


def _earlier(x: Tensor, back: int, since: Tensor) -> Tensor:
    """``x[t - back]`` for each token, 0 outside of its document."""
    return functional.pad(x[:-back], (0, 0, back, 0)).masked_fill(since[:, None] < back, 0)


def _pre(x: Tensor, weight: Tensor, bias: Tensor | None, since: Tensor) -> Tensor:
    out = x * weight[:, -1]
    for back in range(1, min(weight.shape[1], len(x))):
        out.addcmul_(_earlier(x, back, since), weight[:, -1 - back])
    return out if bias is None else out + bias


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int], silu: bool
) -> Tensor:
    wide = accumulation_dtype(x)
    shift = None if bias is None else bias.to(wide)
    pre = _pre(x.to(wide), weight.to(wide), shift, positions(ends, x.device))
    return (functional.silu(pre) if silu else pre).to(x.dtype)


def _backward_formula(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int], silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias (``[0]`` without one)."""
    wide, since = accumulation_dtype(x), positions(ends, x.device)
    values, taps, dpre = x.to(wide), weight.to(wide), dy.to(wide)
    if silu:
        pre = _pre(values, taps, None if bias is None else bias.to(wide), since)
        s = pre.sigmoid()
        dpre = dpre * (s * (1 + pre * (1 - s)))
    dx, dweight = dpre * taps[:, -1], torch.zeros_like(taps)
    dweight[:, -1] = (dpre * values).sum(0)
    for back in range(1, min(weight.shape[1], len(x))):
        inside = dpre.masked_fill(since[:, None] < back, 0)
        dx[:-back].addcmul_(inside[back:], taps[:, -1 - back])
        dweight[:, -1 - back] = (inside[back:] * values[:-back]).sum(0)
    dbias = dpre.new_empty(0) if bias is None else dpre.sum(0).to(bias.dtype)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int], silu: bool
) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int], silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = x.new_empty(0, dtype=accumulation_dtype(x)) if bias is None else torch.empty_like(bias)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.ends, ctx.silu = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = CAUSAL_CONV1D_BACKWARD(dy, x, weight, bias, ctx.ends, ctx.silu)
    return dx, dweight, None if bias is None else dbias, None, None


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for ends, channels, taps, with_bias, silu in (
        ((0, 7, 14), 6, 4, False, True),
        ((0, 1, 2, 9, 16), 5, 4, True, True),
        ((0, 33), 70, 3, True, False),
        ((0, 3, 3), 4, 6, False, False),
        ((0, 0), 4, 2, True, True),
    ):
        x = random((ends[-1], channels), dtype)
        bias = random((channels,), dtype, seed=2) if with_bias else None
        yield x, random((channels, taps), dtype, seed=1), bias, ends, silu


def _samples_backward(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for x, *rest in _samples(dtype):
        yield random(x.shape, dtype, seed=3), x, *rest


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x = torch.ones(WORKLOAD_ROWS, hidden, dtype=dtype, device=device)
    weight = torch.ones(hidden, 4, dtype=dtype, device=device)
    return x, weight, None, (0, WORKLOAD_ROWS), True


def _workload_backward(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x, *rest = _workload(hidden, dtype, device)
    return x, x, *rest


CAUSAL_CONV1D = Operator(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, SymInt[] ends, bool silu) -> Tensor",
    reference=_forward,
    fake=_fake,
    cuda=[triton("causal_conv1d:forward")],
    npu=[plain_torch(_forward)],
    autograd=(_save, _backward),
    samples=_samples,
    workload=_workload,
    public="mindspeed.ops.causal_conv1d.causal_conv1d",
)

CAUSAL_CONV1D_BACKWARD = Operator(
    "causal_conv1d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, SymInt[] ends, "
    "bool silu) -> (Tensor, Tensor, Tensor)",
    reference=_backward_formula,
    fake=_fake_backward,
    cuda=[triton("causal_conv1d:backward")],
    npu=[plain_torch(_backward_formula)],
    samples=_samples_backward,
    workload=_workload_backward,
)
