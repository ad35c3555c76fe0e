"""Trains one step of a GPT with no-op layers inside rank processes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.pipeline_gpt import (
    BATCH,
    SEQUENCE,
    VOCABULARY,
    forward_step,
    micro_batches,
    stage_of,
)

MICRO_BATCHES = 4
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_layer_freq": [0, 1, 0, 1],
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}


@dataclass(frozen=True)
class Case:
    """One model and its place in a pipeline."""

    noop_layers: tuple[int, ...]
    spec: str = "te"
    num_layers: int = 4
    pipeline: int = 1
    chunks: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Losses of the micro-batches (last stage only), gradients by layer index without no-ops."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    checkpoint: set[tuple[Any, ...]]  # name, shape of the whole, offset of this rank's part
    projection_std: float


def run_all(cases: dict[str, Case]) -> dict[str, Step]:
    """One step of each case."""
    return {name: run(case) for name, case in cases.items()}


def run(case: Case) -> Step:
    """Build the model, give it weights that depend on their names only, run one step."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mindspeed.megatron_adaptor import repatch

    parallel_state.destroy_model_parallel()
    repatch({"noop_layers": case.noop_layers, "num_layers": case.num_layers})
    parallel_state.initialize_model_parallel(1, case.pipeline, case.chunks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    models = [_model(case, stage) for stage in (range(case.chunks) if case.chunks else [None])]
    named = {}
    for model in models:
        named |= {_name(model, case, name): p for name, p in model.named_parameters()}
    for name, parameter in named.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data.normal_(0, 0.2, generator=generator)
        parameter.data += "norm" in name and name.endswith("weight")
    batches = micro_batches(MICRO_BATCHES)
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in models] if case.chunks else iter(batches),
        model=models if case.chunks else models[0],
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return Step(
        losses=[float(loss) for loss in losses],
        gradients={name: p.grad.clone() for name, p in named.items()},
        checkpoint={entry for model in models for entry in _checkpoint(model)},
        projection_std=models[0].config.output_layer_init_method.keywords["std"],
    )


def _model(case: Case, stage: int | None) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=case.num_layers,
        hidden_size=16,
        num_attention_heads=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.chunks,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        # Two ranks must not have several messages of one kind in a batch.
        overlap_p2p_comm=bool(case.chunks),
        batch_p2p_comm=not case.chunks,
        **case.config,
    )
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, case.spec == "te", vp_stage=stage)
    elif case.spec == "te":
        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **stage_of(stage),
    )


def _checkpoint(model: torch.nn.Module) -> Iterator[tuple[Any, ...]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    state = model.sharded_state_dict()
    apply_factories(state)
    for entry in nested_values(state):
        yield entry.key, tuple(entry.global_shape), tuple(entry.global_offset)


def _name(model: torch.nn.Module, case: Case, name: str) -> str:
    """The parameter's name in the model without no-op layers."""

    def real_index(match: re.Match[str]) -> str:
        index = model.decoder.layers[int(match[1])].layer_number - 1
        return f"decoder.layers.{index - sum(i < index for i in case.noop_layers)}."

    return re.sub(r"^decoder\.layers\.(\d+)\.", real_index, name)
