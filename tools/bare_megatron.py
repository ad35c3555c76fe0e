"""Check types on the Megatron that is importable, without this library's repairs and seams.

python tools/bare_megatron.py [LAYOUT ...]      one JSON object a line: layout, verdict, place

Only ``torch.cuda`` on the host and the missing kernels are ours: Apex's layer norm as a formula,
and attention where the local layer spec has none. Models are built by megatron.core's own classes
in its local layer spec, and one micro-batch runs through its own ``forward_step``. A layout whose
options a version does not know is ``absent`` there.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any
from unittest.mock import NonCallableMock

import spmd_types.checker
import torch
from spmd_types import SpmdTypeError
from spmd_types.checker import typecheck

from mindspeed import device
from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.repairs.scripts import absent_triton
from mindspeed.journal import Journal
from mindspeed.planner import isolated
from mindspeed.spmd import I, R, V
from mindspeed.training.fake_job import fake_groups
from mindspeed.type_check import rules, tensor_types
from mindspeed.type_check.chunk import Mesh, as_term, check_loss, give_types, mesh_of_job


class Attention(torch.nn.Module):
    """Attention of each head over the tokens of this rank, by formula."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Of ``[s, b, heads, n]``; returns ``[s, b, heads * n]``."""
        scores = torch.einsum("sbhn,tbhn->bhst", query, key).softmax(-1)
        return torch.einsum("bhst,tbhn->sbhn", scores, value).flatten(2)


class LayerNorm:
    """Apex's fused layer norm, by formula."""

    @staticmethod
    def forward(x: Any, weight: Any, bias: Any, shape: Any, eps: float) -> Any:
        """Normalise ``[..., h]``."""
        return torch.nn.functional.layer_norm(x, tuple(shape), weight, bias, eps)

    apply = forward


_CORE = "/megatron/core/"
SEQUENCE, VOCABULARY = 8, 64


@dataclass(frozen=True)
class Layout:
    """A model, and the ranks that share it.

    Attributes:
        shown: in words.
        tensor: tensor-parallel ranks.
        sequence: sequence parallelism.
        context: context-parallel ranks.
        expert: expert-parallel ranks.
        expert_tensor: ranks that share an expert; None for a model without experts.
        config: further values of Megatron's configuration.
        model: further arguments of ``GPTModel``.
        attention: core attention is :class:`Attention`; Megatron's needs Transformer Engine.
        padded: the model gets a padding mask.
        smoothing: of labels, in the vocabulary-parallel loss.
    """

    shown: str
    tensor: int = 2
    sequence: bool = False
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    attention: bool = False
    padded: bool = False
    smoothing: float = 0.0


def _experts(
    shown: str, expert: int, expert_tensor: int, padded: bool = False, **config: Any
) -> Layout:
    given = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
        "add_bias_linear": False,
    }
    return Layout(
        f"{shown}, sequence parallel",
        sequence=True,
        expert=expert,
        expert_tensor=expert_tensor,
        config=given | config,
        padded=padded,
    )


_LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "rope_type": "rope",
    "qk_layernorm": True,
}
_BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}

LAYOUTS: Mapping[str, Layout] = {
    "dense": Layout("dense"),
    "dense-sp": Layout("dense, sequence parallel", sequence=True),
    "query-norms": Layout("norms of queries and keys", config={"qk_layernorm": True}),
    "query-norms-sp": Layout(
        "norms of queries and keys, sequence parallel", sequence=True, config={"qk_layernorm": True}
    ),
    "one-key-head": Layout("one key head for two ranks", config={"num_query_groups": 1}),
    "output-gate": Layout("gate of attention outputs", config={"attention_output_gate": True}),
    "attention-sink": Layout("learnable attention sink", config={"softmax_type": "learnable"}),
    "latent-key": Layout(
        "latent attention", config=_LATENT | {"qk_layernorm": False}, attention=True
    ),
    "latent-key-sp": Layout(
        "latent attention, sequence parallel",
        sequence=True,
        config=_LATENT | {"qk_layernorm": False},
        attention=True,
    ),
    "latent": Layout("latent attention with norms", config=_LATENT, attention=True),
    "latent-sp": Layout(
        "latent attention, sequence parallel", sequence=True, config=_LATENT, attention=True
    ),
    "gathered-logits": Layout("gathered logits", model={"parallel_output": False}),
    "smoothed-labels": Layout("smoothed labels", smoothing=0.1),
    "context": Layout("context parallel, masked tokens", tensor=1, context=2, attention=True),
    "recomputed": Layout(
        "recomputation, sequence parallel",
        sequence=True,
        config={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "predicted-tokens": Layout(
        "multi-token prediction, sequence parallel",
        sequence=True,
        config={"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1},
    ),
    "experts": _experts("experts over ranks", 2, 1, **_BALANCED),
    "experts-split": _experts("experts split over ranks", 1, 2, **_BALANCED),
    "experts-whole": _experts("whole experts, the same on all ranks", 1, 1),
    "experts-gathered": _experts(
        "experts over ranks, all-gather", 2, 1, moe_token_dispatcher_type="allgather"
    ),
    "experts-shared": _experts(
        "experts with a shared one", 2, 1, moe_shared_expert_intermediate_size=32
    ),
    "experts-gate": _experts(
        "experts with a gated shared one",
        2,
        1,
        moe_shared_expert_intermediate_size=32,
        moe_shared_expert_gate=True,
    ),
    "experts-biased": _experts("experts with biases", 2, 1, add_bias_linear=True),
    "experts-sequence-loss": _experts(
        "experts, loss per sequence",
        2,
        1,
        **_BALANCED | {"moe_router_load_balancing_type": "seq_aux_loss"},
    ),
    "experts-global-loss": _experts(
        "experts, global loss",
        2,
        1,
        **_BALANCED | {"moe_router_load_balancing_type": "global_aux_loss"},
    ),
    "experts-z-loss": _experts("experts, z-loss", 2, 1, moe_z_loss_coeff=0.1),
    "experts-router-bias": _experts(
        "experts, bias of the router",
        2,
        1,
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
    ),
    "hyper": Layout(
        "hyper-connections", config={"enable_mhc_connections": True, "mhc_num_residual_streams": 2}
    ),
    "hyper-sp": Layout(
        "hyper-connections, sequence parallel",
        sequence=True,
        config={"enable_mhc_connections": True, "mhc_num_residual_streams": 2},
    ),
    "repeated": Layout(
        "multi-token prediction, one layer twice, sequence parallel",
        sequence=True,
        config={"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    ),
    "mixed": Layout(
        "multi-token prediction, mixed states, sequence parallel",
        sequence=True,
        config={"mtp_num_layers": 2, "mtp_hsm": True},
    ),
    "tied": Layout("tied embeddings", model={"share_embeddings_and_output_weights": True}),
    "attention-sink-sp": Layout(
        "learnable attention sink, sequence parallel",
        sequence=True,
        config={"softmax_type": "learnable"},
    ),
    "experts-padded": _experts("experts, padding mask", 2, 1, padded=True, **_BALANCED),
}


def check(name: str) -> dict[str, Any]:
    """What the check says about a layout, in a process of its own."""
    layout = LAYOUTS[name]
    warnings.simplefilter("ignore")
    journal = Journal()
    world = max(layout.tensor * layout.context, layout.expert)
    with fake_groups(0, world):
        _make_groups(layout)
        try:
            model = _build(layout)
        except (_Absent, AssertionError, ValueError) as error:
            reason = str(error).partition(" when instantiating ")[0].splitlines()[0]
            return {"layout": name, "verdict": "absent", "place": reason}
        rules.install(journal)
        mesh = mesh_of_job()
        with spmd_types.set_current_mesh(mesh.axes):
            give_types(model, model.config, mesh)
            try:
                with typecheck(strict_mode="strict", local=True):
                    _run(layout, model, mesh)
            except ValueError as error:  # a kind of loss that this version does not know
                return {"layout": name, "verdict": "absent", "place": str(error)}
            except SpmdTypeError as error:
                unknown = "autograd Function is not registered" in str(error)
                return {
                    "layout": name,
                    "verdict": "no rule" if unknown else "refused",
                    "place": str(error).partition(".apply")[0] if unknown else _place(error),
                }
    return {"layout": name, "verdict": "accepted", "place": ""}


def _place(error: Exception) -> str:
    """File and function of the innermost frame in Megatron."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [one for one in frames if _CORE in one.filename]
    if not inside:  # what the program returns
        return "the loss"
    return f"{inside[-1].filename.rpartition(_CORE)[2]}:{inside[-1].name}"


class _Absent(Exception):
    """This Megatron has no such option; others that it refuses are errors of its own."""


def _make_groups(layout: Layout) -> None:
    from megatron.core import parallel_state

    given = {
        "tensor_model_parallel_size": layout.tensor,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "create_gloo_process_groups": False,
    }
    parallel_state.initialize_model_parallel(**given)


def _build(layout: Layout) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if "q_lora_rank" in layout.config else TransformerConfig
    known = {one.name for one in fields(kind)}
    if missing := sorted(layout.config.keys() - known):
        raise _Absent(", ".join(missing))
    values = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "normalization": "LayerNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence,
        "context_parallel_size": layout.context,
        "params_dtype": torch.float32,
    }
    values["transformer_impl"] = "local"
    config = kind(**{name: one for name, one in (values | layout.config).items() if name in known})
    layer = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=getattr(config, "multi_latent_attention", False),
    )
    if layout.attention:
        layer.submodules.self_attention.submodules.core_attention = Attention
    if getattr(config, "enable_mhc_connections", False):
        from megatron.core.transformer import hyper_connection, transformer_layer

        layer.module = transformer_layer.HyperConnectionTransformerLayer
        layer.submodules.self_attention_hyper_connection = hyper_connection.HyperConnectionModule
        layer.submodules.mlp_hyper_connection = hyper_connection.HyperConnectionModule
    model = dict(layout.model)
    if getattr(config, "mtp_num_layers", None):
        model["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, False)
    built = GPTModel(config, layer, VOCABULARY, SEQUENCE, position_embedding_type="rope", **model)
    if layout.padded and "padding_mask" not in inspect.signature(built.forward).parameters:
        raise _Absent("padding_mask")
    return built


def _run(layout: Layout, model: Any, mesh: Mesh) -> None:
    """One micro-batch through Megatron's own step."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    def step(batch: Any, model: Any) -> Any:
        mask = batch.pop("loss_mask")
        if getattr(model.config, "mtp_num_layers", None):  # some releases need it for their loss
            batch["loss_mask"] = mask
        losses = _smoothed(layout, batch, model) if layout.smoothing else model(**batch)
        return losses, lambda losses: _loss(losses, mask, mesh)

    found: list[Any] = []
    given = {
        "forward_step_func": step,
        "data_iterator": _batch(layout, mesh),
        "model": model,
        "num_microbatches": 1,
        "input_tensor": None,
        "forward_data_store": found,
        "config": model.config,
        "cp_group_size": parallel_state.get_context_parallel_world_size(),
        "is_last_stage": True,
    }
    known = inspect.signature(schedules.forward_step).parameters
    out, _ = schedules.forward_step(**{name: one for name, one in given.items() if name in known})
    check_loss(out[0] if isinstance(out, list) else out, mesh)


def _smoothed(layout: Layout, batch: dict[str, Any], model: Any) -> torch.Tensor:
    """Losses ``[b, s]`` of a caller that smooths its labels."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    labels = batch.pop("labels")
    return vocab_parallel_cross_entropy(model(**batch), labels, layout.smoothing)


def _loss(losses: torch.Tensor, mask: torch.Tensor, mesh: Mesh) -> tuple[Any, ...]:
    """The sum of the losses of ``[b, s]`` tokens, their number, and a report."""
    return as_term((losses * mask).sum(), mesh), mask.sum(), {}


def _batch(layout: Layout, mesh: Mesh) -> dict[str, Any]:
    tokens = SEQUENCE // layout.context
    ids = torch.arange(tokens)[None]
    mask = torch.ones(1, 1, tokens, tokens).triu(1).bool() if layout.context == 1 else None
    batch = {
        "input_ids": tensor_types.give(ids.clone(), mesh.types(R, V)),
        "position_ids": tensor_types.give(ids.clone(), mesh.types(R, R)),
        "attention_mask": mask if mask is None else tensor_types.give(mask, mesh.types(R, R)),
        "labels": tensor_types.give((ids + 1) % VOCABULARY, mesh.types(R, V)),
        "loss_mask": tensor_types.give(torch.ones(1, tokens), mesh.types(I, V)),
    }
    if layout.padded:
        batch["padding_mask"] = tensor_types.give(torch.zeros(1, tokens).bool(), mesh.types(R, V))
    return batch


def _be_without_transformer_engine() -> None:
    """Make classes of it, which Megatron replaces by mocks, classes of which there is no object."""
    for module in [one for name, one in sys.modules.items() if name.startswith("megatron.core")]:
        for name, value in list(vars(module).items()):
            if name.startswith(("TE", "Inference")) and (
                value is None or isinstance(value, NonCallableMock)
            ):
                setattr(module, name, LayerNorm)
    router = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(router, "te_general_gemm"):  # 0.16 reads it whatever is installed
        router.te_general_gemm = None  # type: ignore[attr-defined]


def main() -> int:
    """Check the layouts that are named, or all."""
    warnings.simplefilter("ignore")
    journal = Journal()
    device.install(journal)
    for name in ("apex", "apex.normalization", "apex.normalization.fused_layer_norm"):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].FusedLayerNormAffineFunction = LayerNorm  # type: ignore[attr-defined]
    hooks = PostImportHooks()
    absent_triton.install(hooks)
    hooks.install()
    import megatron.core
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: F401
    from megatron.core.pipeline_parallel import schedules  # noqa: F401

    _be_without_transformer_engine()
    # The buffer of scores, which is read with the factor 0: zeros have a type.
    buffers = importlib.import_module("megatron.core.utils").GlobalMemoryBuffer
    journal.set(
        buffers,
        "get_tensor",
        lambda self, shape, dtype, *rest: torch.zeros(shape, dtype=dtype),
        owner="bare-megatron",
    )
    names = sys.argv[1:] or list(LAYOUTS)
    print(json.dumps({"version": megatron.core.__version__}), flush=True)
    for name, found in zip(names, isolated.map(check, [(one,) for one in names]), strict=True):
        one = (
            found
            if isinstance(found, dict)
            else {"layout": name, "verdict": "error", "place": str(found)}
        )
        print(json.dumps(one), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
