"""The operator files, so that somebody who wants all operators gets them registered."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from mindspeed.ops import _registry
from mindspeed.ops._registry import Operator

FILES = (
    "_mm_all_reduce",
    "lcal_functional",
    "npu_grouped_mat_mul_all_reduce",
    "rms_norm",
    "swiglu",
    "npu_matmul_add",
    "npu_groupmatmul_add",
    "grouped_matmul",
)
"""Files of this package that define operators."""


def operators() -> Iterator[Operator]:
    """Every operator of the library, by name."""
    for file in FILES:
        importlib.import_module(f"mindspeed.ops.{file}")
    return _registry.operators()
