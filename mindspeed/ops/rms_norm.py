"""RMSNorm: ``y = x / sqrt(mean(x^2) + eps) * (offset + gamma)`` over the last dimension.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Everything is computed in
fp32 and rounded once, as torch and torch_npu do (Hugging Face's Llama rounds before it multiplies
with gamma). For the backward, x and one fp32 number per row are kept: 2 bytes per element in bf16,
where the formula in eager torch keeps 6 and ``F.rms_norm`` 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, random
from mindspeed.ops.registry import Operator, torch_npu, triton

__all__ = ["rms_norm"]

_check = ArgumentCheck("rms_norm")


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, *, offset: float = 0.0) -> Tensor:
    """Normalise the last dimension of ``x`` by its root mean square.

    Args:
        x: ``[..., H]``, fp32, bf16 or fp16.
        gamma: ``[H]``, dtype of ``x`` or fp32.
        epsilon: added to the mean square, greater than 0.
        offset: added to gamma; 1.0 for a zero-centred gamma.

    Returns:
        ``[..., H]`` in the dtype of ``x``.

    Raises:
        OperatorError: wrong dtype, shape or epsilon.
    """
    _check.tensor(x=x, gamma=gamma)
    _check.number(epsilon=epsilon)
    _check.dtype(FLOATS, x=x)
    _check.dtype((x.dtype, torch.float32), gamma=gamma)
    _check.same("device", x=x, gamma=gamma)
    _check.require(x.dim() > 0, "x", "at least 1 dimension", x)
    _check.shape(x.shape[-1:], gamma=gamma)
    _check.require(epsilon > 0, "epsilon", "a number greater than 0", epsilon)
    return RMS_NORM(x, gamma, epsilon, offset)[0]


def _reference(x: Tensor, gamma: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(x)
    xw = x.to(wide)
    rstd = torch.rsqrt(xw.square().mean(-1, keepdim=True) + eps)
    weight = gamma.to(wide)
    y = (xw * rstd).mul_(weight + offset if offset else weight)
    return y.to(x.dtype), rstd


def _reference_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(x)
    normed = x.to(wide) * rstd
    dyw = dy.to(wide)
    dgamma = (dyw * normed).flatten(0, -2).sum(0) if x.dim() > 1 else dyw * normed
    t = dyw * (gamma.to(wide) + offset)
    # A copy where nothing was converted: normed is ours, t too, so both may be overwritten.
    mean = (t * normed).mean(-1, keepdim=True)
    dx = t.sub_(normed.mul_(mean)).mul_(rstd)
    return dx.to(x.dtype), dgamma.to(gamma.dtype)


def _npu(x: Tensor, gamma: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return torch.ops.npu.npu_rms_norm(x, _npu_gamma(x, gamma, offset), eps)


def _npu_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, x, _npu_gamma(x, gamma, offset), rstd)
    return dx, dgamma.to(gamma.dtype)


def _npu_gamma(x: Tensor, gamma: Tensor, offset: float) -> Tensor:
    return (gamma + offset if offset else gamma).to(x.dtype)  # the op takes one dtype only


def _fake(x: Tensor, gamma: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x))
    return torch.empty_like(x, memory_format=torch.contiguous_format), rstd


def _fake_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(gamma)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gamma, _, ctx.offset = inputs
    ctx.save_for_backward(x, gamma, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    dx, dgamma = RMS_NORM_BACKWARD(dy, *ctx.saved_tensors, ctx.offset)
    return dx, dgamma, None, None


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 8), (3, 5, 96), (7, 1000), (1, 1), (0, 16)):
        x, gamma = random(shape, dtype), random(shape[-1:], dtype, seed=1)
        yield x, gamma, 1e-6, 0.0
        yield x, gamma.float() if dtype != torch.float64 else gamma, 1e-5, 1.0
    for rows, columns in ((1, 64), (37, 64), (601, 128), (67, 192), (35, 256)):  # several a program
        yield random((rows, columns), dtype), random((columns,), dtype, seed=1), 1e-6, 0.0
    gamma = random((24,), dtype, seed=1)
    yield random((5, 3, 40), dtype)[..., 8:32], gamma, 1e-6, 0.0  # a slice of the last dimension
    yield random((24, 6), dtype).t(), gamma, 1e-6, 0.0
    yield random((4, 6, 24), dtype).transpose(0, 1)[:, 1:], gamma, 1e-6, 0.0
    yield random((1, 24), dtype).expand(7, 24), gamma, 1e-6, 0.0


def _samples_backward(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for x, gamma, eps, offset in _samples(dtype):
        _, rstd = _reference(x, gamma, eps, offset)
        dy = random((*x.shape[:-1], x.shape[-1] + 8), dtype, seed=2)
        yield dy[..., : x.shape[-1]], x, gamma, rstd, offset


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x = torch.ones(WORKLOAD_ROWS, hidden, dtype=dtype, device=device)
    return x, torch.ones(hidden, dtype=dtype, device=device), 1e-6, 0.0


def _workload_backward(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x, gamma, _, offset = _workload(hidden, dtype, device)
    rstd = torch.ones(x.shape[0], 1, dtype=accumulation_dtype(x), device=device)
    return torch.ones_like(x), x, gamma, rstd, offset


RMS_NORM_BACKWARD = Operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor gamma, Tensor rstd, float offset)"
    " -> (Tensor, Tensor)",
    reference=_reference_backward,
    fake=_fake_backward,
    cuda=[triton("rms_norm:backward")],
    npu=[torch_npu(_npu_backward, "npu_rms_norm_backward")],
    samples=_samples_backward,
    workload=_workload_backward,
    compiles=True,
)

RMS_NORM = Operator(
    "rms_norm(Tensor x, Tensor gamma, float eps, float offset) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    cuda=[triton("rms_norm:forward")],
    npu=[torch_npu(_npu, "npu_rms_norm")],
    autograd=(_save, _backward),
    samples=_samples,
    workload=_workload,
    compiles=True,
    public="mindspeed.ops.rms_norm.rms_norm",
)
