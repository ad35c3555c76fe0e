"""What frameworks do with the original's names at their start, in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist


def every_name() -> dict[str, str]:
    """``module.name`` of all names that the table says work -> type of what is there."""
    from mindspeed.original import table

    found = {}
    for row in table().values():
        for name in row.works:
            value = getattr(importlib.import_module(row.name), name)
            found[f"{row.name}.{name}"] = type(value).__name__
    return found


def trainer_on_npu() -> dict[str, Any]:
    """ms-swift: attention class before ``repatch``, frozen weights and the delta rule after it."""
    import megatron.core.ssm.gated_delta_net as megatron_net

    import megatron_adaptor
    import mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention as attention
    from mindspeed.core.context_parallel.adaptor import MindSpeedCPDotProductAttention
    from mindspeed.megatron_adaptor import repatch
    from mindspeed.patch_utils import MindSpeedPatchesManager

    original = getattr(attention, "MindSpeedTEDotProductAttention", None)
    attention.MindSpeedTEDotProductAttention = MindSpeedCPDotProductAttention
    repatch({"use_flash_attn": True, "context_parallel_size": 2, "seq_length": 64})
    own_net = importlib.import_module("mindspeed.core.ssm.gated_delta_net")
    linear = importlib.import_module("mindspeed.te.pytorch.module.layernorm_column_parallel_linear")
    importlib.import_module("mindspeed.te.pytorch.module.grouped_linear")
    rule = importlib.import_module("mindspeed.core.ssm.chunk_gated_delta_rule")
    heads = torch.randn(1, 8, 2, 4), torch.randn(1, 8, 2, 4), torch.randn(1, 8, 2, 4)
    decay, beta = -torch.rand(1, 8, 2), torch.rand(1, 8, 2)
    options = {"initial_state": None, "scale": None, "chunk_size": 64, "head_first": False}
    out, state = rule.chunk_gated_delta_rule(
        *heads, decay, beta, output_final_state=True, use_qk_l2norm_in_kernel=False, **options
    )
    theirs, last = megatron_net.torch_chunk_gated_delta_rule(
        *heads, g=decay, beta=beta, output_final_state=True
    )
    return {
        "same module": megatron_adaptor.repatch is repatch,
        "same class": original is MindSpeedCPDotProductAttention is _class("TEDotProductAttention"),
        "helpers": [hasattr(own_net, f"tensor_a2a_{way}") for way in ("cp2hp", "hp2cp")],
        "not offered": getattr(linear, "linear_with_grad_accumulation_and_async_allreduce", None),
        "registered": MindSpeedPatchesManager.patches_info.get("fla.ops.gated_delta_rule.chunk"),
        "error": max((out - theirs).abs().max().item(), (state - last).abs().max().item()),
    }


def _class(name: str) -> Any:
    return getattr(importlib.import_module("megatron.core.extensions.transformer_engine"), name)


def model_defaults() -> dict[str, Any]:
    """mcore-bridge: all flags with their defaults, by a parser of its own; the list is put back."""
    import mindspeed.features_manager as manager
    from mindspeed.arguments import process_args

    before = list(manager.FEATURES_LIST)
    everything = manager.create_features_list()
    manager.FEATURES_LIST.clear()
    parser = process_args(argparse.ArgumentParser())
    alone = set(vars(parser.parse_known_args([])[0]))
    manager.FEATURES_LIST.extend(everything)
    try:
        parser = argparse.ArgumentParser()
        process_args(parser)
        values, _ = parser.parse_known_args([])
    finally:
        manager.FEATURES_LIST.clear()
        manager.FEATURES_LIST.extend(before)
    return {"alone": alone, "defaults": vars(values), "listed": len(manager.FEATURES_LIST)}


def torch_compile() -> tuple[bool, bool, bool]:
    """verl: find the patch of ``torch.compile``, take it back for a while, apply it again."""
    from mindspeed.patch_utils import MindSpeedPatchesManager

    def eager(model: Any, *args: Any, **kwargs: Any) -> Any:
        return model

    original = torch.compile
    MindSpeedPatchesManager.register_patch("torch.compile", eager)
    MindSpeedPatchesManager.apply_patches()
    patches = MindSpeedPatchesManager.patches_info.values()
    (patch,) = [
        p for p in patches if (p.orig_module_name, p.orig_func_name) == ("torch", "compile")
    ]
    inside = patch.is_applied() and torch.compile(original) is original
    patch.remove_patch()
    outside = not patch.is_applied() and torch.compile.__wrapped__ is patch.orig_func
    patch.apply_patch()
    again = torch.compile(original) is original
    MindSpeedPatchesManager.remove_patches()
    return inside, outside, again


def patches() -> dict[str, Any]:
    """Replacements, wrappers, new names, what is refused; a library that others hold."""
    from mindspeed.errors import PatchConflict, PatchTargetMissing
    from mindspeed.patch_utils import MindSpeedPatchesManager as Manager
    from tests.original import library, user

    def plus_wrapper(function: Any) -> Any:
        @functools.wraps(function)
        def plus(x: int) -> int:
            return function(x) + 1

        return plus

    class Other(library.Layer):
        pass

    name = "tests.original.library"
    original = library.Layer
    Manager.register_patch(f"{name}.double", lambda x: 3 * x)
    Manager.register_patch(f"{name}.double", plus_wrapper)
    Manager.register_patch(f"{name}.Layer.forward", lambda self, x: -x)
    Manager.register_patch(f"{name}.Layer", Other)
    Manager.register_patch(f"{name}.absent.deep.function", create_dummy=True)
    before = library.double(2), user.twice(2)
    Manager.apply_patches()
    found: dict[str, Any] = {
        "before": before,
        "after": (library.double(2), user.twice(2)),
        "method": user.Layer().forward(5),
        "class": user.Layer is Other,
    }
    with contextlib.suppress(RuntimeError):
        importlib.import_module(f"{name}.absent.deep").function()
        found["dummy"] = "did not raise"
    refused = [_refusal(PatchConflict, Manager.register_patch, f"{name}.double", abs)]
    for error, target in (
        (PatchTargetMissing, f"{name}.Layer.backward"),
        (PatchTargetMissing, "no_such_package.function"),
        (PatchConflict, _REPLACED_BY_US),
    ):
        Manager.register_patch(target, abs, force_patch=True)
        refused.append(_refusal(error, Manager.apply_patches))
        del Manager.patches_info[target]
    Manager.register_patch(f"{name}.double", abs, force_patch=True)
    Manager.apply_patches()
    found["forced"] = user.twice(-2)
    Manager.remove_patches()
    found["removed"] = (
        library.double(2),
        user.twice(2),
        user.Layer is original,
        original().forward(5),
    )
    return {**found, "refused": refused, "left": dict(Manager.patches_info)}


_REPLACED_BY_US = "megatron.core.transformer.moe.router.TopKRouter.apply_z_loss"


def _refusal(error: type[Exception], call: Any, *args: Any) -> str:
    try:
        call(*args)
    except error as raised:
        return str(raised)
    return "not refused"


def added_feature() -> dict[str, Any]:
    """A feature of somebody else: its flag, its check, its patch, which ``repatch`` applies."""
    from mindspeed.errors import ConfigError
    from mindspeed.features_manager import FEATURES_LIST
    from mindspeed.features_manager.feature import MindSpeedFeature
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
    from mindspeed.megatron_adaptor import get_mindspeed_args, repatch
    from tests.original import user

    class Fast(MindSpeedFeature):
        def __init__(self) -> None:
            super().__init__("fast-double", optimization_level=1)

        def register_args(self, parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--fast-double", action="store_true")
            self.add_parser_argument_choices_value(parser, "--moe-zero-memory", "fast")

        def validate_args(self, args: argparse.Namespace) -> None:
            self.incompatible_check(args, "slow_double")
            self.dependency_check(args, "bf16")

        def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
            patch_manager.register_patch("tests.original.library.double", lambda x: x + x + 100)

    FEATURES_LIST.append(Fast())
    sys.argv = ["train.py", "--fast-double", "--moe-zero-memory", "fast", "--lr", "1"]
    args, results = get_mindspeed_args(), []
    messages = []
    for values in ({"slow_double": True, "bf16": True}, {"bf16": False}):
        try:
            MindSpeedFeaturesManager.validate_features_args(
                argparse.Namespace(fast_double=True, **values)
            )
        except ConfigError as error:
            messages.append(str(error))
    for values in ({"fast_double": True}, {}, {"fast_double": True, "optimization_level": 0}):
        repatch(values)
        results.append(user.twice(1))
    FEATURES_LIST.pop()
    return {
        "args": (args.fast_double, args.moe_zero_memory, args.cp_window_size),
        "messages": messages,
        "results": results,
    }


def runtime_values() -> dict[str, Any]:
    """twinkle: the defaults of all flags with the model's values over them go to ``repatch``."""
    from mindspeed.args_utils import get_full_args, get_mindspeed_args
    from mindspeed.core.context_parallel.adaptor import MindSpeedCPDotProductAttention
    from mindspeed.megatron_adaptor import repatch
    from mindspeed.patch_utils import MindSpeedPatchesManager

    values = vars(get_mindspeed_args(get_defaults=True)).copy()
    values |= {
        "context_parallel_size": 2,
        "context_parallel_algo": "megatron_cp_algo",
        "seq_length": 8,
    }
    configuration = repatch(values)
    MindSpeedPatchesManager.register_patch(
        "megatron.core.extensions.transformer_engine.TEDotProductAttention",
        MindSpeedCPDotProductAttention,
        force_patch=True,
    )
    MindSpeedPatchesManager.apply_patches()
    return {
        "on": [feature.name for feature in configuration.enabled],
        "in force": (get_mindspeed_args().context_parallel_algo, get_full_args().cp_window_size),
        "defaults": get_mindspeed_args(get_defaults=True).context_parallel_algo,
    }


def groups_and_heads() -> dict[str, Any]:
    """4 ranks, a ring of all-to-alls: the groups; a sequence to features and back."""
    from megatron.core import parallel_state

    from mindspeed.core.context_parallel import model_parallel_utils as groups
    from mindspeed.core.context_parallel.get_batch_utils import get_ring_degree
    from mindspeed.core.ssm.gated_delta_net import tensor_a2a_cp2hp, tensor_a2a_hp2cp
    from mindspeed.errors import ConfigError

    parallel_state.initialize_model_parallel(
        context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2]
    )
    rank, group = dist.get_rank(), parallel_state.get_context_parallel_group()
    whole = torch.arange(16 * 12.0).reshape(16, 1, 12)
    mine = whole.unflatten(0, (8, 2))[[rank, 7 - rank]].flatten(0, 1).requires_grad_()
    parts = {}
    for name, sections in (("whole", None), ("sections", [4, 8])):
        features = tensor_a2a_cp2hp(
            mine, seq_dim=0, head_dim=-1, cp_group=group, split_sections=sections
        )
        local = None if sections is None else [size // 4 for size in sections]
        back = tensor_a2a_hp2cp(
            features, seq_dim=0, head_dim=-1, cp_group=group, split_sections=local
        )
        (gradient,) = torch.autograd.grad((back * mine.detach()).sum(), mine)
        parts[name] = (
            features.detach(),
            torch.equal(back, mine) and torch.equal(gradient, mine),
        )
    with contextlib.suppress(ConfigError):
        tensor_a2a_cp2hp(mine[..., :6], 0, -1, group)
        parts["uneven"] = "not refused"
    found = {
        "ulysses": (
            groups.get_context_parallel_for_hybrid_ulysses_rank(),
            dist.get_process_group_ranks(groups.get_context_parallel_group_for_hybrid_ulysses()),
            groups.get_context_parallel_for_hybrid_ulysses_world_size(),
        ),
        "ring": (
            groups.get_context_parallel_for_hybrid_ring_rank(),
            groups.get_context_parallel_for_hybrid_ring_global_ranks(),
            groups.get_context_parallel_for_hybrid_ring_world_size(),
        ),
        "window": (groups.get_ring_ranks_for_intra_window(), get_ring_degree()),
    }
    return {**found, **parts}


def double_ring() -> tuple[list[int], list[int], Any]:
    """4 ranks, windows of 2: the rings inside and between them."""
    from megatron.core import parallel_state

    from mindspeed.core.context_parallel import model_parallel_utils as groups
    from mindspeed.megatron_adaptor import repatch

    flags = {"context_parallel_algo": "megatron_cp_algo", "cp_window_size": 2, "seq_length": 16}
    repatch({"context_parallel_size": 4, **flags})
    parallel_state.initialize_model_parallel(context_parallel_size=4)
    return (
        groups.get_ring_ranks_for_intra_window(),
        groups.get_ring_ranks_for_inter_window_kv(),
        groups.get_context_parallel_group_for_hybrid_ring(check_initialized=False),
    )


def discarded_outputs() -> dict[str, Any]:
    """MindSpeed-MM's norms of multi-token prediction, MindSpeed-LLM's up-projection of MLA."""
    from mindspeed.core.tensor_parallel.random import CheckpointWithoutOutput
    from mindspeed.errors import ConfigError

    torch.set_default_dtype(torch.float64)
    norms, up = [torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)], torch.nn.Linear(8, 12)
    inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    leaves = [*inputs, up.weight, norms[0].weight]
    ran = []

    def counted(function: Any) -> Any:
        return lambda *args: ran.append(1) or function(*args)

    def project(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (up(x) * scale).chunk(3, -1)

    def forward(call: Any) -> list[torch.Tensor]:
        first, second = call(norms[0], inputs[0]), call(norms[1], inputs[1])
        joined = torch.cat((first, second), -1)
        q, k, v = call(project, joined, torch.tensor(2.0))
        return [first, second, joined, q, (q @ k.T) @ v]

    expected = torch.autograd.grad(
        forward(lambda function, *args: function(*args))[-1].sum(), leaves
    )
    made = []

    def discarding(function: Any, *args: Any) -> Any:
        made.append(CheckpointWithoutOutput())
        return made[-1].checkpoint(counted(function), False, *args)

    first, second, joined, q, out = forward(discarding)
    made[2].ctx.actual_len = 5
    kept = made[2].ctx.actual_len
    for one in made:
        one.discard_output()
    sizes = [x.untyped_storage().size() for x in (first, second, q)]
    joined.register_hook(made[0].recompute)
    joined.register_hook(made[1].recompute)
    out.register_hook(made[2].recompute)
    out.sum().backward()
    error = max(
        (x.grad - wanted).abs().max().item() for x, wanted in zip(leaves, expected, strict=True)
    )
    refused = _refusal(ConfigError, CheckpointWithoutOutput().checkpoint, abs, True, inputs[0])
    return {
        "error": error,
        "discarded": sizes,
        "restored": torch.equal(first, norms[0](inputs[0])),
        "ran": len(ran),
        "kept on ctx": kept,
        "refused": refused.partition(": ")[2].partition(";")[0],
    }


def norms() -> dict[str, Any]:
    """MindSpeed-MM's and MindSpeed-LLM's norms by keyword and by position; rotary embedding."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import TransformerConfig

    from mindspeed.core.fusions.fused_rms_norm import RMSNorm
    from mindspeed.core.fusions.fused_rope import apply_rotary_pos_emb
    from mindspeed.core.megatron_basic.megatron_basic import PTNorm

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm"
    )
    x = torch.randn(3, 8)
    found = [RMSNorm(8, 1e-5, config=config), RMSNorm(dim=8, eps=1e-5, config=config)]
    found.append(PTNorm(config, 8, 1e-5))
    wanted = torch.nn.functional.rms_norm(x, (8,), eps=1e-5)
    return {
        "error": max((norm(x) - wanted).abs().max().item() for norm in found),
        "marked": RMSNorm(dim=8, sequence_parallel=True).weight.sequence_parallel,
        "norm": type(found[-1]).__name__,
        "rope": apply_rotary_pos_emb is rope_utils.apply_rotary_pos_emb,
    }


_LORA = """
import importlib.metadata
from packaging import version
from transformers.utils import is_torch_npu_available

def _use_legacy_npu_local_linear():
    if not is_torch_npu_available():
        return False
    return version.parse(importlib.metadata.version("mindspeed")) < version.parse("0.15.0")
"""
"""The test of mcore-bridge 1.6.5 in ``tuners/lora.py``."""


def version_tests(folder: str) -> dict[str, Any]:
    """How frameworks find out which MindSpeed is there, by their own expressions; on an NPU."""
    import importlib.metadata
    import inspect
    from pathlib import Path

    from packaging.requirements import Requirement

    package = Path(folder, "mcore_bridge", "tuners")
    package.mkdir(parents=True)
    for path, text in ((package.parent / "__init__.py", ""), (package / "__init__.py", "")):
        path.write_text(text)
    (package / "lora.py").write_text(_LORA)
    sys.path.insert(0, folder)

    import mindspeed
    from mindspeed import args_utils
    from mindspeed.megatron_adaptor import repatch

    args_utils._MINDSPEED_ARGS = argparse.Namespace()  # twinkle
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from transformers.utils import is_torch_npu_available

    lora = importlib.import_module("mcore_bridge.tuners.lora")
    load = getattr(DistributedOptimizer, "load_state_dict", None)
    layer = importlib.import_module("mindspeed.te.pytorch.module.grouped_linear")
    own_layer = layer.MindSpeedTEGroupedLinear
    installed = importlib.metadata.version(Requirement("mindspeed").name)
    return {
        "mcore-bridge sees an NPU": is_torch_npu_available(),
        "mcore-bridge uses plain layers": lora._use_legacy_npu_local_linear(),
        "twinkle requires": Requirement("mindspeed").specifier.contains(installed),
        "one version": installed == mindspeed.__version__,
        "ms-swift loads optimizers itself": getattr(load, "__module__", "").startswith(
            "mindspeed."
        ),
        "ms-swift keeps Megatron's layer": own_layer is extension.TEGroupedLinear
        and own_layer.__module__ != "mindspeed.te.pytorch.module.grouped_linear",
        "repatch": list(inspect.signature(repatch).parameters)[:1],
    }


def missing_delta_rule() -> bool:
    """ms-swift without the package ``fla``: a module of its own comes before the original's."""
    from types import ModuleType

    own = ModuleType("mindspeed.core.ssm.chunk_gated_delta_rule")
    own.chunk_gated_delta_rule = abs  # type: ignore[attr-defined]
    own._ms_swift_torch_fallback = True  # type: ignore[attr-defined]
    sys.modules[own.__name__] = own
    import mindspeed.megatron_adaptor  # noqa: F401
    from mindspeed.core.ssm.chunk_gated_delta_rule import chunk_gated_delta_rule
    from mindspeed.patch_utils import MindSpeedPatchesManager

    marked = sys.modules.get("mindspeed.core.ssm.chunk_gated_delta_rule")
    return (
        chunk_gated_delta_rule is abs
        and getattr(marked, "_ms_swift_torch_fallback", False)
        and MindSpeedPatchesManager.patches_info.get("fla.ops.gated_delta_rule.chunk") is None
    )
