"""Operators that nothing here calls: they are for scripts that import the original's names.

Such a script finds them where the original has them, ``from mindspeed.ops.gmm import npu_gmm``:
:class:`OriginalPaths` gives the modules of this package a second name each.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ORIGINAL_PATHS = {
    "dropout_add_layer_norm": "dropout_add_norm",
    "dropout_add_rms_norm": "dropout_add_norm",
    "ffn": "ffn",
    "fusion_attention_v2": "fusion_attention_v2",
    "gmm": "gmm",
    "lcal_functional": "lcal_functional",
    "npu_all_to_all_all_gather_bmm": "expert_bmm",
    "npu_bmm_reduce_scatter_all_to_all": "expert_bmm",
    "npu_grouped_mat_mul_all_reduce": "npu_grouped_mat_mul_all_reduce",
    "npu_mm_all_reduce_add_rms_norm": "mm_all_reduce",
    "npu_mm_all_reduce_add_rms_norm_": "mm_all_reduce",
    "npu_moe_token_permute": "moe_token_permute",
    "npu_moe_token_unpermute": "moe_token_permute",
    "quant_gmm": "quant_gmm",
    "weight_quant_gmm": "weight_quant_gmm",
}
"""Module of the original's ``mindspeed.ops`` -> module of this package."""


class OriginalPaths(MetaPathFinder, Loader):
    """Imports ``mindspeed.ops.NAME`` as the module of this package that has its functions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of one of :data:`ORIGINAL_PATHS`, None for any other name."""
        package, _, name = fullname.rpartition(".")
        known = package == "mindspeed.ops" and name in ORIGINAL_PATHS
        return ModuleSpec(fullname, self) if known else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of this package in the place of the new one."""
        name = ORIGINAL_PATHS[module.__name__.rpartition(".")[2]]
        sys.modules[module.__name__] = importlib.import_module(f"{__name__}.{name}")
