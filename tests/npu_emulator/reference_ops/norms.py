"""Normalisations. Everything is computed in fp32; statistics are fp32 with one number a row."""

from __future__ import annotations

import torch


def npu_rms_norm(input, gamma, epsilon=1e-6):
    """Returns y and the reciprocal of the root mean square."""
    rows = tuple(range(-gamma.dim(), 0))
    wide = input.float()
    rstd = torch.rsqrt(wide.pow(2).mean(rows, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


def npu_rms_norm_backward(dy, input, gamma, rstd):
    """Gradients of input and gamma (always fp32) from the rstd that the forward returned."""
    rows = tuple(range(-gamma.dim(), 0))
    normed, dy = input.float() * rstd, dy.float()
    scaled = dy * gamma.float()
    dx = rstd * (scaled - normed * (scaled * normed).mean(rows, keepdim=True))
    return dx.to(input.dtype), (dy * normed).sum_to_size(gamma.shape)


def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    """Returns y, rstd and the sum; the sum that is normalised is not rounded."""
    total = x1.float() + x2.float()
    y, rstd = npu_rms_norm(total, gamma, epsilon)
    return y.to(x1.dtype), rstd, total.to(x1.dtype)


def npu_add_layer_norm(x1, x2, gamma, beta, epsilon=1e-5, additional_output=False):
    """Returns y, mean, rstd and, if requested, the sum."""
    total = x1.float() + x2.float()
    mean = total.mean(-1, keepdim=True)
    rstd = torch.rsqrt(total.var(-1, unbiased=False, keepdim=True) + epsilon)
    y = (total - mean) * rstd * gamma.float() + beta.float()
    unwritten = torch.full_like(x1, torch.nan)
    return y.to(x1.dtype), mean, rstd, total.to(x1.dtype) if additional_output else unwritten


REFERENCE = {
    "npu_rms_norm": npu_rms_norm,
    "npu_rms_norm_backward": npu_rms_norm_backward,
    "npu_add_rms_norm": npu_add_rms_norm,
    "npu_add_layer_norm": npu_add_layer_norm,
}
