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
from typing import Any

import torch

from mindspeed.ops import philox
from mindspeed.ops._check import Check
from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, random, row_blocks, store
from mindspeed.ops.registry import Operator, torch_npu, triton
from mindspeed.ops.rms_norm import _reference as rms_norm_reference
from mindspeed.ops.rms_norm import _reference_backward as rms_norm_reference_backward

Scales = tuple[torch.Tensor | None, torch.Tensor | None]


def dropout_add_norm(
    check: Check,
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: torch.Tensor | None,
    layerscale: torch.Tensor | None,
    *,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
    rms: bool,
) -> Any:
    """Check the arguments of a public function, ``x0 [..., H]``, and call the operator.

    They are those of :func:`mindspeed.ops.compat.dropout_add_norm.npu_dropout_add_layer_norm`;
    ``rms`` is RMSNorm instead of LayerNorm.
    """
    check.tensor(x0=x0, weight=weight)
    check.floating(x0=x0, weight=weight, bias=bias, rowscale=rowscale, layerscale=layerscale)
    if residual is not None:
        check.dtype((x0.dtype, torch.float32), residual=residual)
        check.shape(x0.shape, residual=residual)
        check.same("device", x0=x0, residual=residual)
    check.require(x0.dim() > 0, "x0", "at least 1 dimension", x0)
    vectors = {"weight": weight, "bias": bias, "layerscale": layerscale}
    check.shape(x0.shape[-1:], **{name: x for name, x in vectors.items() if x is not None})
    if rowscale is not None:
        check.shape(x0.shape[:-1], rowscale=rowscale)
    check.number(dropout_p=dropout_p, epsilon=epsilon)
    check.require(0 <= dropout_p < 1, "dropout_p", "a number in [0, 1)", dropout_p)
    check.require(epsilon > 0, "epsilon", "a number greater than 0", epsilon)

    mask, rng = None, None
    if dropout_p and x0.device.type == "npu":
        x0, mask = _drop_on_npu(x0, rowscale, layerscale, dropout_p, return_dropout_mask)
        rowscale, layerscale, dropout_p = None, None, 0.0
    elif dropout_p:
        rng = philox.reserve(x0, x0.numel())
    out, pre, _, _, kept = DROPOUT_ADD_NORM(
        x0, residual, weight, bias, rowscale, layerscale, rng, dropout_p, epsilon, rms,
        residual_in_fp32, return_dropout_mask,
    )  # fmt: skip
    results = (out, *([pre] if prenorm else []))
    if return_dropout_mask:
        results += (kept if mask is None else mask,)
    return results if len(results) > 1 else out


def _drop_on_npu(
    x0: torch.Tensor,
    rowscale: torch.Tensor | None,
    layerscale: torch.Tensor | None,
    p: float,
    want_mask: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x0 = _scaled(x0, (rowscale, layerscale))
    if not want_mask:
        return torch.nn.functional.dropout(x0, p), None
    factor = torch.nn.functional.dropout(torch.ones_like(x0), p)
    return x0 * factor, factor != 0


def _scaled(x: torch.Tensor, scales: Scales) -> torch.Tensor:
    rowscale, layerscale = scales
    if rowscale is not None:
        x = x * rowscale.to(x.dtype).unsqueeze(-1)
    return x if layerscale is None else x * layerscale.to(x.dtype)


def _pre_dtype(
    x0: torch.Tensor, residual: torch.Tensor | None, residual_in_fp32: bool
) -> torch.dtype:
    if residual_in_fp32:
        return accumulation_dtype(x0)
    return (x0 if residual is None else residual).dtype


def _sum(
    h: torch.Tensor,
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    scales: Scales,
    keep: torch.Tensor | None,
    p: float,
) -> None:
    """``h = residual + dropout(scaled x0)``, computed in fp32; ``keep`` is of that dtype."""
    wide, scale = accumulation_dtype(x0), 1 / (1 - p)
    x = _scaled(x0.to(wide), scales)
    if residual is None:
        store(h, torch.mul, x if keep is None else x * keep, scale)
    elif keep is None:
        store(h, torch.add, residual.to(wide), x, alpha=scale)
    else:
        store(h, torch.addcmul, residual.to(wide), x, keep, value=scale)


def _reference(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rowscale: torch.Tensor | None,
    layerscale: torch.Tensor | None,
    rng: torch.Tensor | None,
    p: float,
    eps: float,
    rms: bool,
    residual_in_fp32: bool,
    want_mask: bool,
) -> tuple[torch.Tensor, ...]:
    exact, size = accumulation_dtype(x0), x0.shape[-1:]
    draws = None if rng is None else philox.draws(rng, x0.shape)
    out = x0.new_empty(x0.shape)
    pre = x0.new_empty(x0.shape, dtype=_pre_dtype(x0, residual, residual_in_fp32))
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


def _rows(x: torch.Tensor | None, size: torch.Size) -> Any:
    return None if x is None else x.reshape(-1, size[0])


def _reference_backward(
    dout: torch.Tensor,
    dpre: torch.Tensor | None,
    pre: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    rng: torch.Tensor | None,
    x0: torch.Tensor | None,
    rowscale: torch.Tensor | None,
    layerscale: torch.Tensor | None,
    p: float,
    rms: bool,
    separate: bool,
) -> tuple[torch.Tensor, ...]:
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
        dx.copy_(_scaled(g, (row, layerscale)))
        if x is not None:
            products = g * x
            if drowscale is not None:
                drowscale.view(-1)[block] = _scaled(products, (None, layerscale)).sum(-1)
            sums[2] += _scaled(products, (row, None)).sum(0)
    empty = pre.new_empty(0)
    return (
        dx0,
        dresidual,
        sums[0].to(weight.dtype),
        sums[1].to(weight.dtype),
        empty if drowscale is None else drowscale,
        pre.new_empty(0) if x0 is None or layerscale is None else sums[2].to(layerscale.dtype),
    )


def _npu(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rowscale: torch.Tensor | None,
    layerscale: torch.Tensor | None,
    rng: torch.Tensor | None,
    p: float,
    eps: float,
    rms: bool,
    residual_in_fp32: bool,
    want_mask: bool,
) -> tuple[torch.Tensor, ...]:
    mask = x0.new_ones(x0.shape if want_mask else 0, dtype=torch.bool)
    x = _scaled(x0, (rowscale, layerscale))
    dtype = _pre_dtype(x0, residual, residual_in_fp32)
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


def _npu_backward(
    dout: torch.Tensor,
    dpre: torch.Tensor | None,
    pre: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    rng: torch.Tensor | None,
    x0: torch.Tensor | None,
    rowscale: torch.Tensor | None,
    layerscale: torch.Tensor | None,
    p: float,
    rms: bool,
    separate: bool,
) -> tuple[torch.Tensor, ...]:
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
            dscales[0] = _scaled(products, (None, layerscale)).sum(-1).to(rowscale.dtype)
        if layerscale is not None:
            by_row = _scaled(products, (rowscale, None)).reshape(-1, size[0])
            dscales[1] = by_row.sum(0).to(layerscale.dtype)
    dx0 = _scaled(g, (rowscale, layerscale)).to(dout.dtype)
    return dx0, dresidual, dweight.to(weight.dtype), dbias.to(weight.dtype), *dscales


def _fake(
    x0: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
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
    dout: torch.Tensor, dpre: torch.Tensor | None, pre: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
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
    ctx: Any, dout: torch.Tensor | None, dpre: torch.Tensor | None, *unused: None
) -> tuple[torch.Tensor | None, ...]:
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
    """Without dropout, whose random numbers differ between devices."""
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
