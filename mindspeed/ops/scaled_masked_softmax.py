"""Softmax of scaled and masked scores: ``y = softmax(where(masked, -10000, scale * x))``.

A masked score becomes -10000, as in Megatron, so a row in which everything is masked gives equal
probabilities. Computed in fp32 and rounded once; the backward needs the probabilities only:

    dx = scale * y * (dy - sum_columns(dy * y)),  0 where masked

With flash attention this path is cold, so it is plain torch on CPU and CUDA, and one operator on
NPU where the sides of the score matrix are multiples of 32 from 32 to 4096.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops._numerics import accumulation_dtype, random, row_blocks
from mindspeed.ops.registry import Operator, torch_npu

__all__ = ["scaled_masked_softmax"]

_check = ArgumentCheck("scaled_masked_softmax")
_MASKED = -10000.0


def scaled_masked_softmax(
    x: Tensor, mask: Tensor | None, scale: float = 1.0, *, causal: bool = False
) -> Tensor:
    """Turn attention scores into probabilities.

    Args:
        x: ``[b, n, sq, sk]``, fp32, bf16 or fp16.
        mask: bool, True is masked, its dimensions those of ``x`` or 1; or None.
        causal: mask ``j > i`` instead; ``sq == sk`` and no ``mask``.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        OperatorError: wrong dtype or shape, a mask together with ``causal``.
    """
    _check.number(scale=scale)
    _check.dtype(FLOATS, x=x)
    _check.rank(4, x=x)
    if causal:
        _check.require(mask is None, "mask", "None with causal", mask)
        _check.require(x.shape[2] == x.shape[3], "x", "sq == sk with causal", tuple(x.shape))
    if mask is not None:
        _check.dtype((torch.bool,), mask=mask)
        _check.rank(4, mask=mask)
        _check.same("device", x=x, mask=mask)
        fits = all(m in (1, n) for m, n in zip(mask.shape, x.shape, strict=True))
        _check.require(fits, "mask", f"dimensions of 1 or those of x {tuple(x.shape)}", mask.shape)
    return SOFTMAX(x, mask, scale, causal)


def _masked(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    if not causal:
        return mask
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)[None, None]


def _reference(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    masked = _masked(x, mask, causal)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for block in row_blocks(x):
        scores = x[block].to(accumulation_dtype(x)) * scale
        if masked is not None:
            scores.masked_fill_(masked if masked.shape[0] == 1 else masked[block], _MASKED)
        y[block] = torch.softmax(scores, -1)
    return y


def _reference_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    masked, wide = _masked(y, mask, causal), accumulation_dtype(y)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    for block in row_blocks(y):
        probs = y[block].to(wide)
        g = torch._softmax_backward_data(dy[block].to(wide), probs, -1, wide).mul_(scale)
        if masked is not None:
            g.masked_fill_(masked if masked.shape[0] == 1 else masked[block], 0.0)
        dx[block] = g
    return dx


def _npu(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    if not _npu_takes(x):
        return _reference(x, mask, scale, causal)
    return torch.ops.npu.npu_scaled_masked_softmax(
        x.contiguous(), _npu_mask(x, mask), scale, causal
    )


def _npu_backward(dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    if not _npu_takes(y):
        return _reference_backward(dy, y, mask, scale, causal)
    return torch.ops.npu.npu_scaled_masked_softmax_backward(
        dy.contiguous(), y, _npu_mask(y, mask), scale, causal
    )


def _npu_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:  # not read with the fixed triangle
        return torch.zeros((1, 1, *x.shape[2:]), dtype=torch.bool, device=x.device)
    # The op takes [b or 1, n or 1, sq, sk].
    return mask.expand(mask.shape[0], mask.shape[1], *x.shape[2:]).contiguous()


_NPU_NOTE = (
    "the plain formula runs for numbers of queries or keys that are not multiples of 32 up to 4096"
)


def _npu_takes(x: Tensor) -> bool:
    sides = all(32 <= size <= 4096 and size % 32 == 0 for size in x.shape[2:])
    return sides and x.numel() > 0


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(dy: Tensor, y: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(output, mask)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    y, mask = ctx.saved_tensors
    return SOFTMAX_BACKWARD(dy, y, mask, ctx.scale, ctx.causal), None, None, None


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((2, 3, 5, 7), (1, 2, 32, 64), (2, 1, 1, 3), (0, 1, 4, 4)):
        x = random(shape, dtype)
        yield x, None, 0.5, False
        yield x, random((shape[0], 1, *shape[2:]), torch.float32, seed=1) > 0, 2.0, False
        yield x, random((1, 1, 1, shape[3]), torch.float32, seed=2) > -1, 1.0, False
    yield random((2, 2, 6, 6), dtype), None, 0.7, True
    yield random((1, 2, 32, 32), dtype), None, 0.7, True


def _samples_backward(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for x, mask, scale, causal in _samples(dtype):
        yield (
            random(x.shape, dtype, seed=3),
            _reference(x, mask, scale, causal),
            mask,
            scale,
            causal,
        )


_WORKLOAD_HEAD, _WORKLOAD_SEQUENCE = 128, 1024


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    sides = (_WORKLOAD_SEQUENCE, _WORKLOAD_SEQUENCE)
    x = torch.ones(1, max(hidden // _WORKLOAD_HEAD, 1), *sides, dtype=dtype, device=device)
    mask = torch.ones(1, 1, *sides, dtype=torch.bool, device=device).triu(1)
    return x, mask, _WORKLOAD_HEAD**-0.5, False


def _workload_backward(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x, *rest = _workload(hidden, dtype, device)
    return x, x / _WORKLOAD_SEQUENCE, *rest


SOFTMAX_BACKWARD = Operator(
    "scaled_masked_softmax_backward(Tensor dy, Tensor y, Tensor? mask, float scale, bool causal)"
    " -> Tensor",
    reference=_reference_backward,
    fake=_fake_backward,
    npu=[torch_npu(_npu_backward, "npu_scaled_masked_softmax_backward", note=_NPU_NOTE)],
    samples=_samples_backward,
    workload=_workload_backward,
)

SOFTMAX = Operator(
    "scaled_masked_softmax(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
    reference=_reference,
    fake=_fake,
    npu=[torch_npu(_npu, "npu_scaled_masked_softmax", note=_NPU_NOTE)],
    autograd=(_save, _backward),
    samples=_samples,
    workload=_workload,
    public="mindspeed.ops.scaled_masked_softmax.scaled_masked_softmax",
)
