"""Dropout, residual and normalisation as one operator: shared by LayerNorm and RMSNorm.

    h   = dropout(x0 * rowscale * layerscale) + residual      kept values are divided by 1 - p
    pre = h, rounded to the dtype of the residual stream
    out = LayerNorm(pre) or RMSNorm(pre)

Backward, with ``g`` = the norm's gradient + the gradient that arrives at ``pre``:

    d residual = g                       u = g * mask / (1 - p)
    d x0 = u * rowscale * layerscale
    d rowscale = sum_columns(u * x0 * layerscale)     d layerscale = sum_rows(u * x0 * rowscale)

Everything is computed in fp32. Kept for the backward: pre, 4 or 8 bytes per row and the seed of the
mask, and x0 only when a scale wants its gradient. 8 bytes per element are moved forward and
backward in bf16, where eager torch moves 24 and 22. On an NPU, whose generator cannot return a
mask again, dropout is torch_npu's own operator in front of this one, with its mask of 1/8 byte per
element.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops import philox
from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, random, row_blocks, store
from mindspeed.ops.registry import Operator, torch_npu, triton
from mindspeed.ops.rms_norm import _reference as rms_norm_reference
from mindspeed.ops.rms_norm import _reference_backward as rms_norm_reference_backward

Scales = tuple[Tensor | None, Tensor | None]


class Operands(NamedTuple):
    """Arguments of the forward operator.

    Attributes:
        x0: ``[..., H]``, fp32, bf16 or fp16.
        residual: ``[..., H]``, dtype of x0 or fp32, or None.
        weight: ``[H]``, dtype of x0.
        bias: ``[H]`` or None.
        rowscale: ``[...]`` or None.
        layerscale: ``[H]`` or None.
        rng: int64 ``[2]`` on the CPU, or None for no dropout.
        p: probability of dropping.
        eps: added to the variance or the mean square.
        rms: RMSNorm instead of LayerNorm.
        residual_in_fp32: ``pre`` in fp32.
        want_mask: return the mask, bool ``[..., H]``.
    """

    x0: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    rowscale: Tensor | None
    layerscale: Tensor | None
    rng: Tensor | None
    p: float
    eps: float
    rms: bool
    residual_in_fp32: bool
    want_mask: bool


class Saved(NamedTuple):
    """Arguments of the backward operator.

    Attributes:
        dout: ``[..., H]``, dtype of x0.
        dpre: ``[..., H]``, dtype of pre, or None.
        pre: ``[..., H]``, saved by forward.
        mean: fp32 ``[..., 1]``; not read with ``rms``.
        rstd: fp32 ``[..., 1]``.
        weight: ``[H]``.
        rng: int64 ``[2]`` on the CPU, or None for no dropout.
        x0: ``[..., H]``, given only if a scale requires a gradient.
        rowscale: ``[...]`` or None.
        layerscale: ``[H]`` or None.
        p: probability of dropping.
        rms: RMSNorm instead of LayerNorm.
        separate: compute dresidual, with shape and dtype of pre; else it is ``[0]``.
    """

    dout: Tensor
    dpre: Tensor | None
    pre: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor
    rng: Tensor | None
    x0: Tensor | None
    rowscale: Tensor | None
    layerscale: Tensor | None
    p: float
    rms: bool
    separate: bool


def scaled(x: Tensor, scales: Scales) -> Tensor:
    """``x * rowscale * layerscale`` in the dtype of x ``[..., H]``."""
    rowscale, layerscale = scales
    if rowscale is not None:
        x = x * rowscale.to(x.dtype).unsqueeze(-1)
    return x if layerscale is None else x * layerscale.to(x.dtype)


def _pre_dtype(x0: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> torch.dtype:
    if residual_in_fp32:
        return accumulation_dtype(x0)
    return (x0 if residual is None else residual).dtype


def _sum(
    h: Tensor, x0: Tensor, residual: Tensor | None, scales: Scales, keep: Tensor | None, p: float
) -> None:
    """``h = residual + dropout(scaled x0)``, computed in fp32; ``keep`` is of that dtype."""
    wide, scale = accumulation_dtype(x0), 1 / (1 - p)
    x = scaled(x0.to(wide), scales)
    if residual is None:
        store(h, torch.mul, x if keep is None else x * keep, scale)
    elif keep is None:
        store(h, torch.add, residual.to(wide), x, alpha=scale)
    else:
        store(h, torch.addcmul, residual.to(wide), x, keep, value=scale)


def _reference(*operands: Any) -> tuple[Tensor, ...]:
    given = Operands(*operands)
    x0, residual, weight, bias, rowscale, layerscale, rng, p, eps, rms, in_fp32, want_mask = given
    exact, size = accumulation_dtype(x0), x0.shape[-1:]
    draws = None if rng is None else philox.draws(rng, x0.shape)
    out = x0.new_empty(x0.shape)
    pre = x0.new_empty(x0.shape, dtype=_pre_dtype(x0, residual, in_fp32))
    rstd = x0.new_empty((*x0.shape[:-1], 1), dtype=exact)
    mean = rstd.new_empty(0 if rms else rstd.shape)
    gamma, beta = weight.to(exact), None if bias is None else bias.to(exact)
    matrices = [_rows(x, size) for x in (x0, residual, draws, out, pre)]
    for block in row_blocks(matrices[0]):
        parts: list[Any] = [None if m is None else m[block] for m in matrices]
        x, stream, drawn, y, h = parts
        keep = None if drawn is None else philox.kept(drawn, p, exact)
        scales = (None if rowscale is None else rowscale.reshape(-1)[block], layerscale)
        _sum(h, x, stream, scales, keep, p)
        rounded = h.to(exact)
        if rms:
            normed, rstd.view(-1, 1)[block] = rms_norm_reference(rounded, gamma, eps, 0.0)
            y.copy_(normed if beta is None else normed.add_(beta))
        else:
            normed, mean.view(-1, 1)[block], rstd.view(-1, 1)[block] = torch.native_layer_norm(
                rounded, size, gamma, beta, eps
            )
            y.copy_(normed)
    mask = x0.new_empty(0, dtype=torch.bool)
    if want_mask:
        mask = torch.ones_like(x0, dtype=torch.bool)
        if draws is not None:
            mask = philox.kept(draws, p, torch.bool)
    return out, pre, mean, rstd, mask


def _rows(x: Tensor | None, size: torch.Size) -> Any:
    return None if x is None else x.reshape(-1, size[0])


def _reference_backward(*operands: Any) -> tuple[Tensor, ...]:
    given = Saved(*operands)
    dout, dpre, pre, mean, rstd, weight, rng, x0, rowscale, layerscale, p, rms, separate = given
    exact, size = accumulation_dtype(pre), pre.shape[-1:]
    gamma, zero = weight.to(exact), pre.new_zeros((), dtype=exact)
    draws = None if rng is None else philox.draws(rng, pre.shape)
    dx0 = dout.new_empty(pre.shape)
    dresidual = pre.new_empty(pre.shape if separate else 0)
    sums = [pre.new_zeros(size, dtype=exact) for _ in range(3)]  # dweight, dbias, dlayerscale
    mean, rstd = mean.contiguous(), rstd.contiguous()
    drowscale = None if x0 is None or rowscale is None else rowscale.new_empty(rowscale.shape)
    matrices = [_rows(x, size) for x in (dout, dpre, pre, x0, draws, dx0)]
    for block in row_blocks(matrices[0]):
        parts: list[Any] = [None if m is None else m[block] for m in matrices]
        dy, dstream, h, x, drawn, dx = parts
        dy, h, inverse = dy.to(exact), h.to(exact), rstd.view(-1, 1)[block]
        if rms:
            g, dweight = rms_norm_reference_backward(dy, h, gamma, inverse, 0.0)
            dbias = dy.sum(0)
        else:
            g, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
                dy, h, size, mean.view(-1, 1)[block], inverse, gamma, gamma, [True, True, True]
            )
        sums[0] += dweight
        sums[1] += dbias
        if dstream is not None:
            g = g.add_(dstream)
        if separate:
            _rows(dresidual, size)[block] = g
        if drawn is not None:
            g = torch.addcmul(zero, g, philox.kept(drawn, p, exact), value=1 / (1 - p))
        row = None if rowscale is None else rowscale.reshape(-1)[block]
        dx.copy_(scaled(g, (row, layerscale)))
        if x is not None:
            products = g * x
            if drowscale is not None:
                drowscale.view(-1)[block] = scaled(products, (None, layerscale)).sum(-1)
            sums[2] += scaled(products, (row, None)).sum(0)
    empty = pre.new_empty(0)
    return (
        dx0,
        dresidual,
        sums[0].to(weight.dtype),
        sums[1].to(weight.dtype),
        empty if drowscale is None else drowscale,
        pre.new_empty(0) if x0 is None or layerscale is None else sums[2].to(layerscale.dtype),
    )


def _npu(*operands: Any) -> tuple[Tensor, ...]:
    given = Operands(*operands)
    x0, residual, weight, bias, rowscale, layerscale, _, _, eps, rms, in_fp32, want_mask = given
    mask = x0.new_ones(x0.shape if want_mask else 0, dtype=torch.bool)
    x = scaled(x0, (rowscale, layerscale))
    dtype = _pre_dtype(x0, residual, in_fp32)
    gamma = weight.to(dtype)
    beta = torch.zeros_like(gamma) if bias is None else bias.to(dtype)
    if residual is not None and not rms:
        out, mean, rstd, pre = torch.ops.npu.npu_add_layer_norm(
            x.to(dtype), residual.to(dtype), gamma, beta, eps, True
        )
    elif residual is not None:
        out, rstd, pre = torch.ops.npu.npu_add_rms_norm(x.to(dtype), residual.to(dtype), gamma, eps)
    else:
        pre = x.to(dtype, copy=True)
        if rms:
            out, rstd = torch.ops.npu.npu_rms_norm(pre, gamma, eps)
        else:
            out, mean, rstd = torch.native_layer_norm(
                pre.float(), pre.shape[-1:], gamma.float(), beta.float(), eps
            )
    if rms:
        mean = rstd.new_empty(0)
        out = out if bias is None else out + bias
    return out.to(x0.dtype), pre, mean, rstd, mask


def _npu_backward(*operands: Any) -> tuple[Tensor, ...]:
    given = Saved(*operands)
    dout, dpre, pre, mean, rstd, weight, _, x0, rowscale, layerscale, _, rms, separate = given
    size = pre.shape[-1:]
    if rms:
        g, dweight = torch.ops.npu.npu_rms_norm_backward(
            dout.to(pre.dtype), pre, weight.to(pre.dtype), rstd
        )
        dbias = dout.reshape(-1, size[0]).sum(0, dtype=torch.float32)
    else:
        gamma, mean, rstd = weight.float(), mean.contiguous(), rstd.contiguous()
        g, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dout.float(), pre.float(), size, mean, rstd, gamma, gamma, [True, True, True]
        )
    g = g if dpre is None else g + dpre
    dresidual = g.to(pre.dtype, copy=True) if separate else pre.new_empty(0)
    dscales = [pre.new_empty(0), pre.new_empty(0)]
    if x0 is not None:
        products = (g * x0).float()
        if rowscale is not None:
            dscales[0] = scaled(products, (None, layerscale)).sum(-1).to(rowscale.dtype)
        if layerscale is not None:
            by_row = scaled(products, (rowscale, None)).reshape(-1, size[0])
            dscales[1] = by_row.sum(0).to(layerscale.dtype)
    dx0 = scaled(g, (rowscale, layerscale)).to(dout.dtype)
    return dx0, dresidual, dweight.to(weight.dtype), dbias.to(weight.dtype), *dscales


def _fake(x0: Tensor, residual: Tensor | None, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rms, residual_in_fp32, want_mask = rest[-3:]
    rows = (*x0.shape[:-1], 1)
    exact = accumulation_dtype(x0)
    dense = torch.contiguous_format
    return (
        torch.empty_like(x0, memory_format=dense),
        x0.new_empty(x0.shape, dtype=_pre_dtype(x0, residual, residual_in_fp32)),
        x0.new_empty(0 if rms else rows, dtype=exact),
        x0.new_empty(rows, dtype=exact),
        x0.new_empty(x0.shape if want_mask else 0, dtype=torch.bool),
    )


def _fake_backward(
    dout: Tensor, dpre: Tensor | None, pre: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    _, _, weight, _, x0, rowscale, layerscale, _, _, separate = rest
    dscales = [
        pre.new_empty(0) if x0 is None or scale is None else torch.empty_like(scale)
        for scale in (rowscale, layerscale)
    ]
    dense = torch.contiguous_format
    return (
        torch.empty_like(dout, memory_format=dense),
        torch.empty_like(pre, memory_format=dense) if separate else pre.new_empty(0),
        torch.empty_like(weight),
        torch.empty_like(weight),
        *dscales,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x0, residual, weight, _, rowscale, layerscale, rng, ctx.p, _, ctx.rms, _, _ = inputs
    wanted = ctx.needs_input_grad
    with_scale = wanted[4] or wanted[5]
    _, pre, mean, rstd, mask = output
    ctx.save_for_backward(
        pre, mean, rstd, weight, rng, x0 if with_scale else None, rowscale, layerscale
    )
    ctx.residual_dtype = None if residual is None else residual.dtype
    # Without dropout, scales and another dtype both gradients are the same tensor.
    plain = rng is None and rowscale is None and layerscale is None and x0.dtype == pre.dtype
    ctx.separate = residual is not None and not plain
    ctx.mark_non_differentiable(mean, rstd, mask)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dout: Tensor | None, dpre: Tensor | None, *unused: None
) -> tuple[Tensor | None, ...]:
    if dout is None and dpre is None:
        return (None,) * 12
    pre, mean, rstd, weight, rng, x0, rowscale, layerscale = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(pre, dtype=weight.dtype)
    dx0, dresidual, dweight, dbias, drowscale, dlayerscale = DROPOUT_ADD_NORM_BACKWARD(
        dout, dpre, pre, mean, rstd, weight, rng, x0, rowscale, layerscale, ctx.p, ctx.rms,
        ctx.separate,
    )  # fmt: skip
    wanted = ctx.needs_input_grad
    if ctx.residual_dtype is not None:
        dresidual = (dresidual if ctx.separate else dx0).to(ctx.residual_dtype)
    return (
        dx0,
        dresidual if wanted[1] else None,
        dweight,
        dbias if wanted[3] else None,
        drowscale if wanted[4] else None,
        dlayerscale if wanted[5] else None,
        *(None,) * 6,
    )


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Samples without dropout, whose random numbers differ between devices."""
    # 1100 narrow rows: more than one tile for each program of the Triton kernel.
    for shape in ((4, 16), (3, 5, 96), (7, 1000), (1, 2), (0, 16), (1100, 24)):
        x0, residual = random((*shape[:-1], shape[-1] + 4), dtype), random(shape, dtype, seed=1)
        x0 = x0[..., : shape[-1]]  # a slice
        weight, bias = (random(shape[-1:], dtype, seed=seed) for seed in (2, 3))
        rowscale = random(shape[:-1], dtype, seed=4)
        layerscale = random(shape[-1:], dtype, seed=5)
        for rms in (False, True):
            yield x0, residual, weight, bias, None, None, None, 0.0, 1e-5, rms, False, False
            yield (
                x0, None, weight, None, rowscale, layerscale, None, 0.0, 1e-5, rms, True, True
            )  # fmt: skip


def _samples_backward(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for sample in _samples(dtype):
        x0, _, weight, _, rowscale, layerscale, *_, rms, _, _ = sample
        _, pre, mean, rstd, _ = _reference(*sample)
        dout, dpre = random(x0.shape, dtype, seed=6), random(x0.shape, dtype, seed=7)
        rest = (pre, mean, rstd, weight, None)
        if rowscale is None:
            yield dout, None, *rest, None, None, None, 0.0, rms, False
        else:
            yield dout, dpre.to(pre.dtype), *rest, x0, rowscale, layerscale, 0.0, rms, True


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x0 = torch.ones(WORKLOAD_ROWS, hidden, dtype=dtype, device=device)
    weight = torch.ones(hidden, dtype=dtype, device=device)
    rng = torch.tensor([1, 0])
    return (
        x0, torch.ones_like(x0), weight, torch.ones_like(weight), None, None, rng, 0.1, 1e-5,
        False, False, False,
    )  # fmt: skip


def _workload_backward(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x0, pre, weight, _, _, _, rng, p, *_ = _workload(hidden, dtype, device)
    rstd = torch.ones(x0.shape[0], 1, device=device)
    return x0, None, pre, rstd, rstd.clone(), weight, rng, None, None, None, p, False, True


DROPOUT_ADD_NORM_BACKWARD = Operator(
    "dropout_add_norm_backward(Tensor dout, Tensor? dpre, Tensor pre, Tensor mean, Tensor rstd, "
    "Tensor weight, Tensor? rng, Tensor? x0, Tensor? rowscale, Tensor? layerscale, float p, "
    "bool rms, bool separate) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_reference_backward,
    fake=_fake_backward,
    cuda=[triton("dropout_add_norm:backward")],
    npu=[torch_npu(_npu_backward, "npu_rms_norm_backward")],
    samples=_samples_backward,
    workload=_workload_backward,
    on_host=(6,),
)

DROPOUT_ADD_NORM = Operator(
    "dropout_add_norm(Tensor x0, Tensor? residual, Tensor weight, Tensor? bias, Tensor? rowscale, "
    "Tensor? layerscale, Tensor? rng, float p, float eps, bool rms, bool residual_in_fp32, "
    "bool want_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    cuda=[triton("dropout_add_norm:forward")],
    npu=[torch_npu(_npu, "npu_add_layer_norm", "npu_add_rms_norm", "npu_rms_norm")],
    autograd=(_save, _backward),
    samples=_samples,
    workload=_workload,
    public="mindspeed.ops.dropout_add_layer_norm.npu_dropout_add_layer_norm",
    on_host=(6,),
)
