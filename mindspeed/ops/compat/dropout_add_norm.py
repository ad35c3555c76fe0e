"""Dropout, residual and LayerNorm or RMSNorm in one operator; see :mod:`._dropout_add_norm`."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.ops._check import Check
from mindspeed.ops.compat._dropout_add_norm import dropout_add_norm

__all__ = ["npu_dropout_add_layer_norm", "npu_dropout_add_rms_norm"]

_check = Check("npu_dropout_add_layer_norm")


def npu_dropout_add_layer_norm(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: torch.Tensor | None = None,
    layerscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """``LayerNorm(dropout(x0 * rowscale * layerscale) + residual)``.

    Args:
        x0: ``[..., H]``, fp32, bf16 or fp16.
        residual: shape of ``x0``, its dtype or fp32, or None.
        weight: ``[H]``, dtype of ``x0``.
        bias: ``[H]`` or None.
        dropout_p: probability of dropping, in [0, 1).
        epsilon: added to the variance, greater than 0.
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
    return dropout_add_norm(
        _check,
        x0,
        residual,
        weight,
        bias,
        dropout_p,
        epsilon,
        rowscale,
        layerscale,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        return_dropout_mask=return_dropout_mask,
        rms=False,
    )


_check_rms = Check("npu_dropout_add_rms_norm")


def npu_dropout_add_rms_norm(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: torch.Tensor | None = None,
    layerscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """``RMSNorm(dropout(x0 * rowscale * layerscale) + residual)``, ``x0 [..., H]``.

    Arguments, results and errors are those of :func:`npu_dropout_add_layer_norm`; ``bias`` is added
    to the normalised values, ``epsilon`` to the mean square.
    """
    return dropout_add_norm(
        _check_rms,
        x0,
        residual,
        weight,
        bias,
        dropout_p,
        epsilon,
        rowscale,
        layerscale,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        return_dropout_mask=return_dropout_mask,
        rms=True,
    )
