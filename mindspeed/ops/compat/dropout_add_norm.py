"""Dropout, residual and LayerNorm or RMSNorm in one operator; see :mod:`._dropout_add_norm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.ops import philox
from mindspeed.ops._check import ArgumentCheck, public
from mindspeed.ops.compat._dropout_add_norm import DROPOUT_ADD_NORM, scaled

__all__ = ["npu_dropout_add_layer_norm", "npu_dropout_add_rms_norm"]


def _dropout_add_norm(
    check: ArgumentCheck,
    rms: bool,
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """``LayerNorm`` or ``RMSNorm(dropout(x0 * rowscale * layerscale) + residual)``.

    Args:
        x0: ``[..., H]``, fp32, bf16 or fp16.
        residual: shape of ``x0``, its dtype or fp32, or None.
        weight: ``[H]``, dtype of ``x0``.
        bias: ``[H]``, added after the norm, or None.
        dropout_p: probability of dropping, in [0, 1).
        epsilon: added to the variance or the mean square, greater than 0.
        rowscale: ``[...]``, a factor for each row, or None.
        layerscale: ``[H]``, a factor for each column, or None.
        prenorm: also return what is normalised: in fp32 with ``residual_in_fp32``, else in the
            dtype of the residual (of ``x0`` without one).
        residual_in_fp32: see ``prenorm``.
        return_dropout_mask: also return the mask, bool, True where a value was kept.

    Returns:
        ``out``, ``(out, pre)``, ``(out, mask)`` or ``(out, pre, mask)``; out in the dtype of
        ``x0``.

    Raises:
        OperatorError: wrong dtype, shape, probability or epsilon.
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


npu_dropout_add_layer_norm = public("npu_dropout_add_layer_norm", _dropout_add_norm, False)
npu_dropout_add_rms_norm = public("npu_dropout_add_rms_norm", _dropout_add_norm, True)


def _drop_on_npu(
    x0: Tensor, rowscale: Tensor | None, layerscale: Tensor | None, p: float, want_mask: bool
) -> tuple[Tensor, Tensor | None]:
    x0 = scaled(x0, (rowscale, layerscale))
    if not want_mask:
        return torch.nn.functional.dropout(x0, p), None
    factor = torch.nn.functional.dropout(torch.ones_like(x0), p)
    return x0 * factor, factor != 0
