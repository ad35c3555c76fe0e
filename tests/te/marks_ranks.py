"""Jobs for the ranks of test_parameter_marks.py: what the norm counts of each parameter."""

from __future__ import annotations

import re
import types
import zlib
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

EXPERT = re.compile(r"(weight|bias|local_experts\.|lora_[AB]\.)(\d+)")
HIDDEN, SEQUENCE, VOCABULARY, EXPERTS = 16, 8, 32, 4


class Layout(NamedTuple):
    """A model and how it is sharded."""

    kind: str = "dense"
    impl: str = "te"
    tp: int = 1
    sp: bool = False
    ep: int = 1
    etp: int = 1
    grouped: bool = False
    lora: bool = False
    bias: bool = False
    drawn: bool = True

    @property
    def model(self) -> Layout:
        """The same model on one rank."""
        return self._replace(tp=1, sp=False, ep=1, etp=1)


def counted(
    layouts: list[Layout], shapes: dict[Layout, Any], muon: bool = False
) -> dict[Layout, Any]:
    """For each layout the squared norm and the unsharded shape of each parameter.

    Args:
        layouts: Layouts for the ranks of this process group.
        shapes: The shapes of each model on one rank; empty on one rank.
        muon: The norm of layer-wise Muon instead.
    """
    from megatron.core import parallel_state

    found = {}
    for layout in layouts:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
        )
        found[layout] = (_norm_of_muon if muon else _squares)(layout, shapes.get(layout.model))
        parallel_state.destroy_model_parallel()
    return found


def _with_gradients(layout: Layout, whole: Any) -> tuple[Any, dict[str, Any]]:
    """The model, wrapped, and the shapes of its parameters."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindspeed.lora.linear import sum_partial_gradients

    model_parallel_cuda_manual_seed(7)
    model = build_model(layout)
    shapes = {}
    for name, parameter in model.named_parameters():
        name = global_name(name, parallel_state.get_expert_model_parallel_rank())
        shapes[name] = tuple(parameter.shape)
        shape = whole[name][1] if whole else shapes[name]
        with torch.no_grad():
            parameter.copy_(slice_of(name, shape, parameter.shape))
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    tokens = torch.arange(SEQUENCE)[None] * 3 % VOCABULARY
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    labels = (tokens + 1) % VOCABULARY
    wrapped(tokens, torch.arange(SEQUENCE)[None], mask, labels=labels).mean().backward()
    finalize_model_grads([wrapped])
    sum_partial_gradients([wrapped])
    return wrapped, shapes


def _norm_of_muon(layout: Layout, whole: Any) -> float:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    chunks = [_with_gradients(layout, whole)[0]]
    optimizer = get_megatron_muon_optimizer(
        OptimizerConfig(lr=1.0), chunks, {}, layer_wise_distributed_optimizer=True
    )
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def _squares(layout: Layout, whole: Any) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    from mindspeed.training import log

    wrapped, shapes = _with_gradients(layout, whole)
    model = wrapped.module
    squares = defaultdict[str, Any](float)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # A copy of the optimizer's has the marks that Megatron copies.
        square = parameter.main_grad.double().square().sum()
        mine = square * param_is_not_tensor_parallel_duplicate(
            _master(parameter), parallel_state.get_tensor_model_parallel_group()
        )
        dist.all_reduce(mine, group=_stats_group(parameter))
        squares[EXPERT.sub(r"\1*", name) if ".experts." in name else name] += mine.item()
    norm = log._params_norm(types.SimpleNamespace(chunks=[model]))  # type: ignore[arg-type]
    return {
        "squares": dict(squares),
        "norm": norm,
        "shapes": {n: (0, s) for n, s in shapes.items()},
    }


def _master(parameter: torch.Tensor) -> torch.Tensor:
    from megatron.core import tensor_parallel

    master = parameter.detach().clone().float()
    tensor_parallel.copy_tensor_model_parallel_attributes(master, parameter)
    return master


def _stats_group(parameter: Any) -> Any:
    """The ranks over which Megatron's optimizer sums what it counts."""
    from megatron.core import parallel_state

    if getattr(parameter, "allreduce", True):
        return parallel_state.get_model_parallel_group()
    return parallel_state.get_expert_tensor_model_pipeline_parallel_group()


def global_name(name: str, expert_rank: int) -> str:
    """A parameter's name with the number of its expert in the whole model."""
    from megatron.core import parallel_state

    if ".experts." not in name:
        return name
    local = EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    return EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + expert_rank * local}", name)


def slice_of(name: str, whole: tuple[int, ...], mine: torch.Size) -> torch.Tensor:
    """This rank's slice of a parameter that is made from its name."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    full = torch.randn(whole, generator=generator) * 0.3
    dims = [i for i, (a, b) in enumerate(zip(whole, mine, strict=True)) if a != b]
    if not dims:
        return full
    experts = ".experts." in name
    rank = (
        parallel_state.get_expert_tensor_parallel_rank()
        if experts
        else parallel_state.get_tensor_model_parallel_rank()
    )
    ranks, (dim,) = whole[dims[0]] // mine[dims[0]], dims
    if dim == 0 and "linear_fc1" in name and "lora" not in name:  # gate and up
        return torch.cat([half.chunk(ranks)[rank] for half in full.chunk(2)])
    return full.chunk(ranks, dim)[rank]


def build_model(layout: Layout) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from mindspeed.lora.attach import attach
    from mindspeed.lora.config import LoraConfig

    moe, mla = layout.kind == "moe", layout.kind == "mla"
    options: dict[str, Any] = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "gradient_accumulation_fusion": False, "normalization": "RMSNorm",
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "qk_layernorm": True,
        "add_bias_linear": layout.bias, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp, "perform_initialization": layout.drawn,
    }  # fmt: skip
    if moe:
        options |= {
            "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_token_dispatcher_type":
            "alltoall", "moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": 16,
            "moe_grouped_gemm": layout.grouped, "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "moe_shared_expert_intermediate_size": None if layout.bias else 16,
        }  # fmt: skip
    kind = TransformerConfig
    if mla:
        kind = MLATransformerConfig
        options |= {
            "multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 4,
            "qk_pos_emb_head_dim": 4, "v_head_dim": 4, "rope_type": "rope",
            "apply_rope_fusion": False,
        }  # fmt: skip
    elif not layout.lora:
        options["softmax_type"] = "learnable"
    spec = {"num_experts": EXPERTS if moe else None, "moe_grouped_gemm": layout.grouped}
    spec |= {"multi_latent_attention": mla, "qk_layernorm": True}
    if layout.impl == "te":
        layers = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**spec)
    else:
        layers = gpt_layer_specs.get_gpt_layer_local_spec(**spec, normalization="RMSNorm")
    model = GPTModel(
        kind(**options), layers, VOCABULARY, SEQUENCE, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    if layout.lora:
        attach([model], LoraConfig(r=4, target_modules=("all-linear",)))
    return model
