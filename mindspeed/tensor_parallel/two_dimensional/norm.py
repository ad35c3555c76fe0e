"""RMSNorm and LayerNorm of hidden states ``[s/X, b, h/Y]``, whose columns are shared over y.

    RMSNorm      one all-reduce of sum(x^2); backward one of sum(dn n)
    LayerNorm    one all-gather of (mean, sum of squared deviations) of each rank's columns, which
                 are combined without cancellation (Chan, Golub, LeVeque 1979); backward one
                 all-reduce of sum(dn) and sum(dn n)

with n the normalised row and dn = dy w. All statistics are of a row, ``[s/X, b]`` numbers, fp32 for
16-bit inputs. Saved: x, the statistics, the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed.spmd import Collective, V, typed


@typed(Collective(V, V, operands=("weight", "bias")))
class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        rms: bool,
    ) -> torch.Tensor:
        wide = x.to(_wide(x))
        mean = None
        if rms:
            variance = _sum((wide * wide).sum(-1, keepdim=True), group)
            variance = variance / (x.shape[-1] * group.size())
        else:
            mean, variance = _moments(wide, group)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.group, ctx.has_bias = group, bias is not None
        out = _normalised(wide, mean, scale) * weight.to(wide.dtype)
        return (out if bias is None else out + bias.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        wide = scale.dtype
        normed, grad = _normalised(x.to(wide), mean, scale), grads[0].to(wide)
        dx = None
        if ctx.needs_input_grad[0]:
            dn = grad * weight.to(wide)
            sums = [(dn * normed).sum(-1, keepdim=True)]
            if mean is not None:
                sums.append(dn.sum(-1, keepdim=True))
            columns = x.shape[-1] * ctx.group.size()
            projected, *shift = _sum(torch.stack(sums), ctx.group) / columns
            dx = dn - normed * projected
            dx = ((dx - shift[0] if shift else dx) * scale).to(x.dtype)
        dw = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        db = grad.flatten(0, -2).sum(0).to(weight.dtype) if ctx.has_bias else None
        return dx, dw, db, None, None, None


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float,
    group: dist.ProcessGroup,
    rms: bool,
) -> torch.Tensor:
    """RMSNorm (``rms``) or LayerNorm of rows whose columns ranks share; differentiable.

    Args:
        x: ``[..., h/Y]``, this rank's columns, any floating dtype.
        weight: ``[h/Y]``. Its gradient is that of this rank's rows.
        bias: ``[h/Y]`` or None.
        eps: Added to the variance (RMSNorm: to the mean square).
        group: The Y ranks.
        rms: RMSNorm instead of LayerNorm.

    Returns:
        ``[..., h/Y]`` in the dtype of x.
    """
    return _Norm.apply(x, weight, bias, eps, group, rms)  # type: ignore[no-any-return]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _normalised(x: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor:
    return (x if mean is None else x - mean) * scale


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(x, group=group)
    return x


def _moments(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of the rows of all ranks."""
    columns, ranks = x.shape[-1], group.size()
    own_mean = x.mean(-1, keepdim=True)
    own = torch.stack([own_mean, (x - own_mean).square().sum(-1, keepdim=True)])
    every = own.new_empty((2 * ranks, *own.shape[1:]))
    dist.all_gather_into_tensor(every, own, group=group)
    means, squares = every[::2], every[1::2]
    mean = means.mean(0)
    between = (means - mean).square().sum(0) * columns
    return mean, (squares.sum(0) + between) / (columns * ranks)
