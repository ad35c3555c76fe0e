"""The table of modules that make up the substitute, and their registration.

``MODULES`` lists every module name with the names Megatron imports from it. A name that is not
listed raises ImportError like in any package, and Megatron has a fall-back for each of those.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

from mindspeed.journal import Journal

OWNER = "transformer-engine"

TE = "transformer_engine"
PT = f"{TE}.pytorch"

# module -> {exported name: "file of this package:name there"}
MODULES: Mapping[str, Mapping[str, str]] = {
    TE: {},
    f"{TE}.common": {},
    f"{TE}.common.recipe": {
        name: f"recipes:{name}"
        for name in (
            "Recipe",
            "Format",
            "DelayedScaling",
            "Float8CurrentScaling",
            "Float8BlockScaling",
            "MXFP8BlockScaling",
            "NVFP4BlockScaling",
        )
    },
    PT: {
        "Linear": "linear:Linear",
        "LayerNormLinear": "linear:LayerNormLinear",
        "LayerNormMLP": "layernorm_mlp:LayerNormMLP",
        "LayerNorm": "norm:LayerNorm",
        "RMSNorm": "norm:RMSNorm",
        "GroupedLinear": "grouped:GroupedLinear",
        "DotProductAttention": "dot_product:DotProductAttention",
        "CudaRNGStatesTracker": "distributed:CudaRNGStatesTracker",
        "checkpoint": "distributed:checkpoint",
        "fp8_autocast": "fp8:fp8_autocast",
        "fp8_model_init": "fp8:fp8_model_init",
        "Fp8Padding": "fp8_state:Fp8Padding",
        "Fp8Unpadding": "fp8_state:Fp8Unpadding",
        "moe_permute": "permutation:moe_permute",
        "moe_permute_with_probs": "permutation:moe_permute_with_probs",
        "moe_unpermute": "permutation:moe_unpermute",
        "moe_sort_chunks_by_index": "permutation:moe_sort_chunks_by_index",
        "moe_sort_chunks_by_index_with_probs": "permutation:moe_sort_chunks_by_index_with_probs",
        "parallel_cross_entropy": "cross_entropy:parallel_cross_entropy",
        "get_cpu_offload_context": "cpu_offload:get_cpu_offload_context",
    },
    f"{PT}.fp8": {
        "FP8GlobalStateManager": "fp8_state:FP8GlobalStateManager",
        "fp8_autocast": "fp8:fp8_autocast",
        "fp8_model_init": "fp8:fp8_model_init",
        "check_fp8_support": "fp8:supported",
        "check_mxfp8_support": "fp8:supported",
        "check_fp8_block_scaling_support": "fp8:supported",
    },
    f"{PT}.tensor": {"QuantizedTensor": "fp8:QuantizedTensor"},
    f"{PT}.distributed": {
        "CudaRNGStatesTracker": "distributed:CudaRNGStatesTracker",
        "checkpoint": "distributed:checkpoint",
        "activation_recompute_forward": "distributed:activation_recompute_forward",
        "get_all_rng_states": "distributed:get_all_rng_states",
        "is_fp8_activation_recompute_enabled": "distributed:is_fp8_activation_recompute_enabled",
        "in_fp8_activation_recompute_phase": "distributed:in_fp8_activation_recompute_phase",
    },
    f"{PT}.module": {
        "Linear": "linear:Linear",
        "LayerNormLinear": "linear:LayerNormLinear",
        "LayerNormMLP": "layernorm_mlp:LayerNormMLP",
        "GroupedLinear": "grouped:GroupedLinear",
        "LayerNorm": "norm:LayerNorm",
        "RMSNorm": "norm:RMSNorm",
    },
    f"{PT}.module.base": {
        "TransformerEngineBaseModule": "base:TransformerEngineBaseModule",
        "get_workspace": "base:get_workspace",
        "get_dummy_wgrad": "base:get_dummy_wgrad",
        "UserBufferQuantizationMode": "base:UserBufferQuantizationMode",
        "initialize_ub": "base:initialize_ub",
    },
    f"{PT}.ops": {
        name: f"ops:{name}"
        for name in (
            "FusibleOperation",
            "Sequential",
            "GELU",
            "ReLU",
            "SiLU",
            "GEGLU",
            "ReGLU",
            "SwiGLU",
            "Bias",
            "BasicLinear",
            "LayerNorm",
            "RMSNorm",
            "ReduceScatter",
            "AllReduce",
        )
    },
    f"{PT}.cpp_extensions": {"general_gemm": "gemm:general_gemm"},
    f"{PT}.permutation": {
        name: f"permutation:{name}"
        for name in (
            "moe_permute",
            "moe_permute_with_probs",
            "moe_unpermute",
            "moe_sort_chunks_by_index",
            "moe_sort_chunks_by_index_with_probs",
        )
    },
    f"{PT}.optimizers": {
        "FusedAdam": "optimizers:FusedAdam",
        "FusedSGD": "optimizers:FusedSGD",
        "multi_tensor_applier": "optimizers:multi_tensor_applier",
        "multi_tensor_l2norm": "optimizers:multi_tensor_l2norm",
        "multi_tensor_scale": "optimizers:multi_tensor_scale",
    },
    f"{PT}.router": {
        name: f"router:{name}"
        for name in (
            "fused_topk_with_score_function",
            "fused_compute_score_for_moe_aux_loss",
            "fused_moe_aux_loss",
        )
    },
    f"{PT}.cpu_offload": {"get_cpu_offload_context": "cpu_offload:get_cpu_offload_context"},
    f"{PT}.cross_entropy": {"parallel_cross_entropy": "cross_entropy:parallel_cross_entropy"},
    f"{PT}.attention": {
        "DotProductAttention": "dot_product:DotProductAttention",
        "apply_rotary_pos_emb": "rope:apply_rotary_pos_emb",
    },
    f"{PT}.attention.rope": {
        "apply_rotary_pos_emb": "rope:apply_rotary_pos_emb",
        "apply_fused_qkv_rotary_pos_emb": "rope:apply_fused_qkv_rotary_pos_emb",
    },
    "grouped_gemm": {},
    "grouped_gemm.ops": {"gmm": "grouped_gemm:gmm"},
    "emerging_optimizers": {},
    "emerging_optimizers.orthogonalized_optimizers": {
        "OrthogonalizedOptimizer": "muon:OrthogonalizedOptimizer",
        "get_muon_scale_factor": "muon:get_muon_scale_factor",
    },
    "emerging_optimizers.orthogonalized_optimizers.muon_utils": {
        "newton_schulz_tp": "muon:newton_schulz_tp",
    },
    "fused_weight_gradient_mlp_cuda": {
        "wgrad_gemm_accum_fp32": "gemm:wgrad_gemm_accum_fp32",
        "wgrad_gemm_accum_fp16": "gemm:wgrad_gemm_accum_fp16",
    },
}


def install(journal: Journal, version: str) -> dict[str, ModuleType]:
    """Register every module of :data:`MODULES`; ``journal.undo()`` takes them away again."""
    modules = _register(journal, MODULES)
    modules[TE].__version__ = version  # type: ignore[attr-defined]
    _put_aside(journal, [name for name in _loaded() if name not in modules])
    return modules


def install_extensions(journal: Journal) -> None:
    """Register what Megatron imports from other packages with CUDA kernels, where they are absent.

    For a native Transformer Engine on another device.
    """
    absent = {
        name: exports
        for name, exports in MODULES.items()
        if (package := name.partition(".")[0]) not in (TE, *sys.modules)
        and importlib.util.find_spec(package) is None
    }
    _register(journal, absent)


def _register(journal: Journal, listed: Mapping[str, Mapping[str, str]]) -> dict[str, ModuleType]:
    modules = {name: _module(name, exports) for name, exports in listed.items()}
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, module)
    for name, module in modules.items():
        journal.set_module(name, module, owner=OWNER)
    return modules


def install_alias(journal: Journal, package: str) -> None:
    """Let ``transformer_engine`` be another package; ``journal.undo()`` takes it away again."""
    if any(isinstance(finder, _Alias) for finder in sys.meta_path):
        return
    _put_aside(journal, _loaded())
    alias = _Alias(package)
    sys.meta_path.insert(0, alias)

    def undo() -> None:
        sys.meta_path.remove(alias)
        for name in _loaded():
            del sys.modules[name]

    journal.call_on_undo(undo)


class _Alias(MetaPathFinder, Loader):
    """Imports ``transformer_engine.x`` as ``package.x``: the same modules under two names."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != TE:
            return None
        found = importlib.util.find_spec(self._real(fullname))
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(
            fullname, self, origin=found.origin, is_package=is_package
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the real module in the place of the new one."""
        name = module.__name__
        sys.modules[name] = importlib.import_module(self._real(name))

    def _real(self, fullname: str) -> str:
        return self._package + fullname.removeprefix(TE)


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == TE]


def _put_aside(journal: Journal, names: Sequence[str]) -> None:
    for name in names:
        before = sys.modules.pop(name)
        journal.call_on_undo(lambda name=name, before=before: sys.modules.update({name: before}))


def _module(name: str, exports: Mapping[str, str]) -> ModuleType:
    """Build one module: a package without files, so that looking for it finds a spec."""
    module = ModuleType(name, f"Substitute for {name}, see mindspeed.te.")
    spec = importlib.machinery.ModuleSpec(name, None, origin="mindspeed.te", is_package=True)
    module.__spec__, module.__path__, module.__package__ = spec, [], name
    for public, source in exports.items():
        file, _, attribute = source.partition(":")
        value = getattr(importlib.import_module(f"mindspeed.te.{file}"), attribute)
        setattr(module, public, value)
    return module
