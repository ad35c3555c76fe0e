"""The original library's builder classes, for scripts that load an operator through them.

    from mindspeed.op_builder import RmsNormOpBuilder
    y = RmsNormOpBuilder().load().rms_norm(x, gamma, 1e-6)

``load()`` compiles nothing: it imports the operator's file and returns its functions. New code
imports them directly, ``from mindspeed.ops.rms_norm import rms_norm``.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace

_FUNCTIONS = {
    "AllToAllAllGatherBatchMatMulOpBuilder": "npu_all_to_all_all_gather_bmm",
    "BatchMatMulReduceScatterAlltoAllOpBuilder": "npu_bmm_reduce_scatter_all_to_all",
    "DropoutAddLayerNormOpBuilder": "dropout_add_layer_norm:npu_dropout_add_layer_norm",
    "DropoutAddRmsNormOpBuilder": "dropout_add_rms_norm:npu_dropout_add_rms_norm",
    "FusionAttentionV2OpBuilder": (
        "fusion_attention_v2:npu_fusion_attention npu_fusion_attention_grad"
    ),
    "GMMOpBuilder": "gmm:npu_gmm",
    "GMMV2OpBuilder": "gmm:npu_gmm_v2",
    "GroupMatmulAddOpBuilder": "npu_groupmatmul_add:npu_groupmatmul_add_fp32",
    "GroupedMatMulAllReduceOpBuilder": "npu_grouped_mat_mul_all_reduce",
    "MatmulAddOpBuilder": "npu_matmul_add:npu_matmul_add_fp32 npu_matmul_add_fp16",
    "MmAllReduceAddRmsNormInplaceOpBuilder": "npu_mm_all_reduce_add_rms_norm_",
    "MmAllReduceAddRmsNormOpBuilder": "npu_mm_all_reduce_add_rms_norm",
    "MoeTokenPermuteOpBuilder": "npu_moe_token_permute",
    "MoeTokenUnpermuteOpBuilder": "npu_moe_token_unpermute",
    "RingAttentionUpdateOpBuilder": "npu_ring_attention_update",
    "RmsNormOpBuilder": "rms_norm",
    "RotaryPositionEmbeddingOpBuilder": "npu_rotary_position_embedding",
    "SwigluOpBuilder": "swiglu",
}
"""Builder -> ``file:functions`` in ``mindspeed.ops``; default: the function of that name."""


class OpBuilder:
    """``load()`` returns a namespace with the operator's functions."""

    functions = ""

    def load(self) -> SimpleNamespace:
        """Import the operator."""
        file, _, names = self.functions.partition(":")
        module = importlib.import_module(f"mindspeed.ops.{file}")
        return SimpleNamespace(**{name: getattr(module, name) for name in (names or file).split()})


__all__ = ["OpBuilder", *_FUNCTIONS]


def __getattr__(name: str) -> type[OpBuilder]:
    if name not in _FUNCTIONS:
        raise AttributeError(f"mindspeed.op_builder has no {name!r}; there are {list(_FUNCTIONS)}")
    return _builder(name)


@functools.cache
def _builder(name: str) -> type[OpBuilder]:
    return type(name, (OpBuilder,), {"functions": _FUNCTIONS[name], "__module__": __name__})
