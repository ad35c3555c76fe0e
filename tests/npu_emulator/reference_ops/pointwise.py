"""SwiGLU, rotary embedding, masked softmax, dropout, casts, gradient of gather."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from tests.npu_emulator import rng
from tests.npu_emulator.reference_ops._common import refuse, require, sum_to

MASKED_LOGIT = -10000.0


def npu_swiglu(input, dim=-1):
    gate, up = input.float().chunk(2, dim)
    return (silu(gate) * up).to(input.dtype)


def npu_swiglu_backward(grad_output, input, dim=-1):
    gate, up = input.float().chunk(2, dim)
    dy, sigmoid = grad_output.float(), torch.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((dgate, dy * gate * sigmoid), dim).to(input.dtype)


def _rotated(x, mode):
    """``[-x2, x1]`` of the halves, or of every pair of neighbours."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _check_rotary(op, x, r1, r2, mode):
    require(op, mode in ("half", "interleave"), f"rotary_mode {mode!r} is half or interleave")
    require(op, x.dim() == r1.dim() == r2.dim() == 4, "all tensors have 4 dimensions")
    require(op, r1.shape == r2.shape, "r1 and r2 have the same shape")
    require(op, x.size(-1) % 2 == 0 and x.size(-1) < 896, "D is even and less than 896")


def npu_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    """``input * r1 + rotated(input) * r2``; r1 and r2 are the cosines and sines."""
    refuse("npu_rotary_mul", {"rotate": rotate is not None})
    _check_rotary("npu_rotary_mul", input, r1, r2, rotary_mode)
    wide = input.float()
    return (wide * r1.float() + _rotated(wide, rotary_mode) * r2.float()).to(input.dtype)


def npu_rotary_mul_backward(grad, input, r1, r2, rotary_mode="half"):
    """Gradients of input, r1 and r2; rotating is orthogonal, and its transpose is its negative."""
    _check_rotary("npu_rotary_mul_backward", input, r1, r2, rotary_mode)
    dy, wide = grad.float(), input.float()
    dx = dy * r1.float() - _rotated(dy * r2.float(), rotary_mode)
    dr1, dr2 = dy * wide, dy * _rotated(wide, rotary_mode)
    return dx.to(input.dtype), sum_to(dr1, r1), sum_to(dr2, r2)


def _softmax_mask(op, x, mask, fixed_triu_mask):
    sides = x.shape[-2:]
    require(op, x.dim() == 4, "x has 4 dimensions")
    require(op, all(32 <= n <= 4096 and n % 32 == 0 for n in sides), "H and W: 32 to 4096, by 32")
    if fixed_triu_mask:
        return torch.ones(sides, dtype=torch.bool).triu(1)
    require(op, mask.dtype == torch.bool, "mask is bool")
    return mask.expand(x.shape)


def npu_scaled_masked_softmax(x, mask, scale=1, fixed_triu_mask=False):
    masked = _softmax_mask("npu_scaled_masked_softmax", x, mask, fixed_triu_mask)
    return (x.float() * scale).masked_fill(masked, MASKED_LOGIT).softmax(-1).to(x.dtype)


def npu_scaled_masked_softmax_backward(y_grad, y, mask, scale, fixed_triu_mask):
    masked = _softmax_mask("npu_scaled_masked_softmax_backward", y, mask, fixed_triu_mask)
    dy, p = y_grad.float(), y.float()
    dx = p * (dy - (dy * p).sum(-1, keepdim=True)) * scale
    return dx.masked_fill(masked, 0.0).to(y.dtype)


def _npu_dropout(input, p):
    """Returns the result and the kept positions as bits, padded to whole blocks of 128."""
    keep = torch.rand(input.shape, generator=rng.cpu_generator(*rng.reserve())) >= p
    return npu_dropout_backward(input, _packed(keep), p), _packed(keep)


def npu_dropout_backward(grad_output, mask, p):
    keep = _unpacked(mask, grad_output.numel()).view(grad_output.shape)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return (grad_output.float() * keep * scale).to(grad_output.dtype)


_BITS = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8)


def _packed(keep):
    bits = torch.zeros((keep.numel() + 127) // 128 * 128, dtype=torch.uint8)
    bits[: keep.numel()] = keep.flatten()
    return (bits.view(-1, 8) * _BITS).sum(-1).to(torch.uint8)


def _unpacked(mask, count):
    return (mask.unsqueeze(-1) & _BITS).ne(0).flatten()[:count]


def _npu_dtype_cast(input, dtype):
    return input.to(dtype, copy=True)


def _npu_dtype_cast_backward(grad, dtype):
    return grad.to(dtype, copy=True)


def npu_gather_backward(grad, self_size, dim, index, sparse_grad):
    refuse("npu_gather_backward", {"sparse_grad": sparse_grad})
    return grad.new_zeros(self_size).scatter_add(dim, index, grad)


REFERENCE = {
    "npu_swiglu": npu_swiglu,
    "npu_swiglu_backward": npu_swiglu_backward,
    "npu_rotary_mul": npu_rotary_mul,
    "npu_rotary_mul_backward": npu_rotary_mul_backward,
    "npu_scaled_masked_softmax": npu_scaled_masked_softmax,
    "npu_scaled_masked_softmax_backward": npu_scaled_masked_softmax_backward,
    "_npu_dropout": _npu_dropout,
    "npu_dropout_backward": npu_dropout_backward,
    "_npu_dtype_cast": _npu_dtype_cast,
    "_npu_dtype_cast_backward": _npu_dtype_cast_backward,
    "npu_gather_backward": npu_gather_backward,
}
