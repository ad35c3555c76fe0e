"""The computations that features may replace, each under its name with the plain torch formula.

    kernels.normalize(x, weight, bias, eps=1e-5, rms=True)

Modules of this package call them through the module, at run time. A feature puts a fused operator
in the place of a formula with ``seams.use_kernels(owner=..., normalize=...)``, which is taken back
when the feature is detached. Megatron's wrappers build these modules without saying what is
switched on, so the choice holds for the process.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float,
    rms: bool,
    zero_centered_gamma: bool = False,
) -> torch.Tensor:
    """Apply LayerNorm, or RMSNorm with ``rms``, over the last dimension."""
    dtype = x.dtype
    if zero_centered_gamma:
        weight = weight.float() + 1 if weight.dtype.itemsize < 4 else weight + 1
    if weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        wide = torch.promote_types(dtype, weight.dtype)
        x, weight = x.to(wide), weight.to(wide)
        bias = None if bias is None else bias.to(wide)
    size = (x.shape[-1],)
    y = F.rms_norm(x, size, weight, eps) if rms else F.layer_norm(x, size, weight, bias, eps)
    return y.to(dtype)


def swiglu(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``silu(first half) * second half`` of ``x + bias``."""
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def weighted_swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SwiGLU of every row times ``weight [..., 1]``, in the dtype of ``x``."""
    return (swiglu(x) * weight).to(x.dtype)


def rotate(
    t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate the pairs of the first channels of ``t``; cos and sin broadcast to ``t[..., :d]``."""
    size = cos.shape[-1]
    turning, passing = t[..., :size], t[..., size:]
    x = turning.to(torch.promote_types(t.dtype, cos.dtype))
    if interleaved:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        other = torch.cat([-second, first], dim=-1)
    out = (x * cos + other * sin).to(t.dtype)
    return torch.cat([out, passing], dim=-1) if passing.shape[-1] else out
