"""Which matrix product an operator computes: rows, columns and summed entries, and how many.

Grouped products of experts are that many equal products: the balanced assumption of the planner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.instruments.clock import Call

Product = tuple[int, int, int, str]
"""Rows m, columns n, summed entries k, dtype of ``[m, k] @ [k, n]``."""
DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
_Sizes = tuple[int, int, int, int]  # m, n, k, batch


def product_of(call: Call) -> tuple[Product, int] | None:
    """The product and how many of it the operator computes; None: it is not a plain one."""
    sizes_of = _SIZES.get(call.func._schema.name)
    if sizes_of is None:
        return None
    m, n, k, batch = sizes_of(*call.args)
    return (m, n, k, dtype_of(call)), batch


def dtype_of(call: Call) -> str:
    """Name of the dtype that it multiplies: of its narrowest tensor, by the width of entries."""
    found = [
        tensor.dtype
        for value in call.args
        for tensor in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES and tensor.numel() > 1
    ]
    return DTYPES[min(found, key=lambda dtype: dtype.itemsize)] if found else "fp32"


def _plain(left: Any, right: Any, *_: Any) -> _Sizes:
    rows, columns = left.shape[-2], right.shape[-1]
    return rows, columns, left.shape[-1], left.shape[0] if left.dim() == 3 else 1


def _added(_: Any, left: Any, right: Any, *__: Any) -> _Sizes:
    return _plain(left, right)


def _weight_gradient(x: Any, dy: Any, *_: Any) -> _Sizes:
    return dy.shape[1], x.shape[1], x.shape[0], 1


def _grouped(x: Any, weight: Any, *_: Any) -> _Sizes:
    groups = weight.shape[0]
    return -(-x.shape[0] // groups), weight.shape[2], weight.shape[1], groups


def _grouped_outer(x: Any, dy: Any, ends: Any, *_: Any) -> _Sizes:
    groups = ends.shape[0]
    return x.shape[1], dy.shape[1], -(-x.shape[0] // groups), groups


_SIZES: dict[str, Callable[..., _Sizes]] = {
    "aten::mm": _plain,
    "aten::bmm": _plain,
    "aten::_scaled_mm": _plain,
    "aten::addmm": _added,
    "aten::addmm_": _added,
    "aten::baddbmm": _added,
    "aten::baddbmm_": _added,
    "mindspeed::matmul_add": _weight_gradient,
    "mindspeed::grouped_matmul": _grouped,
    "mindspeed::grouped_outer": _grouped_outer,
    "mindspeed::groupmatmul_add": _grouped_outer,
}
