"""The operator files: importing them registers all operators."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from mindspeed.ops import _registry
from mindspeed.ops._registry import Operator

FILES = (
    "_dropout_add_norm",
    "_expert_exchange",
    "_mm_all_reduce",
    "attention",
    "ffn",
    "grouped_matmul",
    "lcal_functional",
    "moe_permutation",
    "npu_grouped_mat_mul_all_reduce",
    "npu_groupmatmul_add",
    "npu_matmul_add",
    "npu_ring_attention_update",
    "npu_rotary_position_embedding",
    "quant_gmm",
    "rms_norm",
    "scaled_masked_softmax",
    "swiglu",
    "weight_quant_gmm",
)
"""Files of this package that define operators."""


def operators() -> Iterator[Operator]:
    """Every operator of the library, by name."""
    for file in FILES:
        importlib.import_module(f"mindspeed.ops.{file}")
    return _registry.operators()
