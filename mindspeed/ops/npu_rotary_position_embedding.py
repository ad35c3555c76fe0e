"""Rotary position embedding: ``y = x * cos + R(x) * sin`` over the last dimension.

    mode 0, rotate half         R(x) = [-x2, x1]                   pairs (x_i, x_{i + D/2}), NeoX
    mode 1, rotate interleaved  R(x)[2i], R(x)[2i+1] = -x[2i+1], x[2i]    neighbours, GPT-J

Source: Su et al., "RoFormer" (2021). cos and sin are any numbers (the two halves of sin may
differ), so the backward is the transposed product, not a rotation by the negative angle:

    dx1 = dy1 * cos1 + dy2 * sin2        dx2 = dy2 * cos2 - dy1 * sin1

Computed in fp32 and rounded once; Megatron's unfused path rounds cos and sin to 16 bit first. Kept
for the backward are cos and sin only, which all layers share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, random, row_blocks
from mindspeed.ops.registry import Operator, torch_npu, triton

__all__ = ["npu_rotary_position_embedding", "rotate"]

_check = ArgumentCheck("npu_rotary_position_embedding")
_MODES = ("half", "interleave")
_LARGEST_HEAD = 896
_NPU_SPREAD = 1000
_NPU_NOTE = (
    f"the plain formula runs for {_LARGEST_HEAD} rotated channels or more, cos and sin that are "
    f"spread over {_NPU_SPREAD} or more, and interleaved pairs with cos and sin for each head"
)


def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Rotate the pairs of channels of ``x``.

    Args:
        x: ``[B, N, S, D]``, ``[B, S, N, D]`` or ``[S, B, N, D]``, fp32, bf16 or fp16; D is even and
            less than 896.
        cos: 4 dimensions, the last D, the others those of ``x`` or 1; dtype of ``x`` or fp32.
        mode: 0 pairs the halves, 1 pairs neighbours.

    Returns:
        Shape and dtype of ``x``. Gradients of cos and sin exist only when both require them.

    Raises:
        OperatorError: wrong dtype, rank, mode, or shapes that do not fit.
    """
    _check.choice((0, 1), mode=mode)
    _check.rank(4, x=x, cos=cos, sin=sin)
    size = x.shape[-1]
    _check.require(
        size % 2 == 0 and size < _LARGEST_HEAD, "x", "an even last dimension less than 896", size
    )
    _check.require(cos.shape[-1] == size, "cos", f"a last dimension of {size}", tuple(cos.shape))
    return rotate(x, cos, sin, mode)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Like :func:`npu_rotary_position_embedding`, for any head size and a part of the channels.

    Args:
        x: ``[..., D]`` with 4 dimensions; fp32, bf16 or fp16.
        cos: ``[..., r]``, dtype of ``x`` or fp32; r <= D is even, channels from r on are copied.
        mode: 0 pairs the halves of the first r channels, 1 pairs neighbours.
    """
    _check.dtype(FLOATS, x=x)
    _check.dtype((x.dtype, torch.float32), cos=cos, sin=sin)
    _check.rank(4, x=x, cos=cos, sin=sin)
    _check.same("shape", cos=cos, sin=sin)
    _check.same("dtype", cos=cos, sin=sin)
    _check.same("device", x=x, cos=cos, sin=sin)
    turning = cos.shape[-1]
    _check.require(
        turning % 2 == 0 and turning <= x.shape[-1],
        "cos",
        f"an even last dimension of at most {x.shape[-1]}",
        tuple(cos.shape),
    )
    fits = all(c in (1, n) for c, n in zip(cos.shape[:3], x.shape[:3], strict=True))
    _check.require(fits, "cos", f"dimensions of 1 or those of x {tuple(x.shape)}", cos.shape)
    return ROTARY(x, cos, sin, mode)


def _pairs(x: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    first, second = (x[..., ::2], x[..., 1::2]) if mode else x.chunk(2, -1)
    return first, second


def _product(x: Tensor, cos: Tensor, sin: Tensor, mode: int, transposed: bool) -> Tensor:
    """``M x``, or its transpose, where M is the 2x2 matrix of every pair."""
    wide, turning = accumulation_dtype(x), cos.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if turning < x.shape[-1]:
        y[..., turning:] = x[..., turning:]
    spread = cos.shape[0] == 1
    for block in row_blocks(x):
        here = slice(None) if spread else block
        c, (s1, s2) = cos[here].to(wide), _pairs(sin[here].to(wide), mode)
        if transposed:
            s1, s2 = -s2, -s1
        given, out = x[block, ..., :turning].to(wide), y[block, ..., :turning]
        # Whole channels first: the strided halves are touched by one step each.
        direct = out.dtype == wide and not torch.compiler.is_compiling()
        turned = torch.mul(given, c, out=out) if direct else given * c
        (x1, x2), (y1, y2) = _pairs(given, mode), _pairs(turned, mode)
        y1.addcmul_(x2, s1, value=-1)
        y2.addcmul_(x1, s2)
        if not direct:
            out.copy_(turned)
    return y


def _reference(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    return _product(x, cos, sin, mode, transposed=False)


def _reference_backward(dy: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    return _product(dy, cos, sin, mode, transposed=True)


def _npu(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    if not _npu_takes(x, cos, mode):
        return _reference(x, cos, sin, mode)
    turning, passing = _npu_parts(x, cos)
    cos, sin = cos.to(x.dtype).contiguous(), sin.to(x.dtype).contiguous()
    y = torch.ops.npu.npu_rotary_mul(turning, cos, sin, _MODES[mode])
    return torch.cat((y, passing), -1) if passing.shape[-1] else y


def _npu_backward(dy: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    if not _npu_takes(dy, cos, mode):
        return _reference_backward(dy, cos, sin, mode)
    turning, passing = _npu_parts(dy, cos)
    cos, sin = cos.to(dy.dtype).contiguous(), sin.to(dy.dtype).contiguous()
    # x only matters for the gradients of cos and sin, which are not taken from here.
    dx = torch.ops.npu.npu_rotary_mul_backward(turning, turning, cos, sin, _MODES[mode])[0]
    return torch.cat((dx, passing), -1) if passing.shape[-1] else dx


def _npu_parts(x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    turning = cos.shape[-1]
    return x[..., :turning].contiguous(), x[..., turning:]


def _npu_takes(x: Tensor, cos: Tensor, mode: int) -> bool:
    """Limits of npu_rotary_mul: head size, and over how many heads cos and sin are spread."""
    spread = [n for n, c in zip(x.shape[:3], cos.shape[:3], strict=True) if c == 1]
    if not x.numel() or cos.shape[-1] >= _LARGEST_HEAD:
        return False
    if _MODES[mode] == "interleave":
        return len(spread) >= 2 and math.prod(spread) < _NPU_SPREAD
    return all(n < _NPU_SPREAD for n in spread)


def _fake(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, ctx.mode = inputs
    ctx.with_table = ctx.needs_input_grad[1] and ctx.needs_input_grad[2]
    ctx.save_for_backward(x if ctx.with_table else None, cos, sin)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, cos, sin = ctx.saved_tensors
    dx = ROTARY_BACKWARD(dy, cos, sin, ctx.mode)
    if not ctx.with_table:
        return dx, None, None, None
    wide, turning = accumulation_dtype(x), cos.shape[-1]
    xw, dyw = x[..., :turning].to(wide), dy[..., :turning].to(wide)
    x1, x2 = _pairs(xw, ctx.mode)
    rotated = torch.stack((-x2, x1), -1).flatten(-2) if ctx.mode else torch.cat((-x2, x1), -1)
    dcos, dsin = (dyw * xw).sum_to_size(cos.shape), (dyw * rotated).sum_to_size(cos.shape)
    return dx, dcos.to(cos.dtype), dsin.to(sin.dtype), None


_SHAPES = (
    ((5, 2, 3, 8), (5, 1, 1, 8)),  # SBND
    ((2, 3, 7, 34), (1, 1, 7, 34)),  # BNSD
    ((2, 4, 3, 16), (2, 4, 1, 10)),  # BSND, 10 of 16 channels
    ((2, 2, 3, 6), (2, 2, 3, 6)),  # nothing spread
    ((1, 1, 1, 2), (1, 1, 1, 2)),
    ((0, 2, 3, 8), (1, 1, 1, 8)),
    ((37, 3, 2, 64), (37, 1, 1, 64)),  # few heads: tokens share a program
    ((67, 1, 1, 20), (67, 1, 1, 18)),
)


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    exact = dtype if dtype == torch.float64 else torch.float32
    for mode in (0, 1):
        for shape, table in _SHAPES:
            x = random(shape, dtype)
            yield x, random(table, exact, seed=1), random(table, exact, seed=2), mode
    strided, both = random((3, 4, 2, 24), dtype)[..., 8:16], random((4, 2, 1, 8), dtype, seed=1)
    yield strided.transpose(0, 1), both[:, :1], both[:, 1:], 0


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x = torch.ones(WORKLOAD_ROWS, 1, hidden // 128, 128, dtype=dtype, device=device)
    table = torch.ones(WORKLOAD_ROWS, 1, 1, 128, device=device)
    return x, table, table.clone(), 0


ROTARY_BACKWARD = Operator(
    "rotary_position_embedding_backward(Tensor dy, Tensor cos, Tensor sin, int mode) -> Tensor",
    reference=_reference_backward,
    fake=_fake,
    cuda=[triton("rotary:backward", reads_strides=True)],
    npu=[torch_npu(_npu_backward, "npu_rotary_mul_backward", note=_NPU_NOTE)],
    samples=_samples,
    workload=_workload,
    compiles=True,
)

ROTARY = Operator(
    "rotary_position_embedding(Tensor x, Tensor cos, Tensor sin, int mode) -> Tensor",
    reference=_reference,
    fake=_fake,
    cuda=[triton("rotary:forward", reads_strides=True)],
    npu=[torch_npu(_npu, "npu_rotary_mul", note=_NPU_NOTE)],
    autograd=(_save, _backward),
    samples=_samples,
    workload=_workload,
    compiles=True,
    public="mindspeed.ops.npu_rotary_position_embedding.npu_rotary_position_embedding",
)
