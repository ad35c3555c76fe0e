"""The operator files: importing them registers all operators."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from mindspeed.ops import registry
from mindspeed.ops.registry import Operator

FILES = (
    "attention",
    "causal_conv1d",
    "compat._dropout_add_norm",
    "compat.expert_bmm",
    "compat.ffn",
    "compat.lcal_functional",
    "compat.mm_all_reduce",
    "compat.npu_grouped_mat_mul_all_reduce",
    "compat.quant_gmm",
    "compat.weight_quant_gmm",
    "gated_delta_rule",
    "grouped_matmul",
    "moe_permutation",
    "npu_groupmatmul_add",
    "npu_matmul_add",
    "npu_ring_attention_update",
    "npu_rotary_position_embedding",
    "quantized_weight",
    "rms_norm",
    "scaled_masked_softmax",
    "swiglu",
)
"""Files of this package that define operators."""


def operators() -> Iterator[Operator]:
    """Every operator of the library, by name."""
    for file in FILES:
        importlib.import_module(f"mindspeed.ops.{file}")
    return registry.operators()
