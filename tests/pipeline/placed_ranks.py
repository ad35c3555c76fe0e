"""Builds GPTs whose stages are placed inside rank processes and runs a step."""

from __future__ import annotations

import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.support.pipeline_gpt import BATCH, SEQUENCE, VOCABULARY, forward_step, micro_batches

EMBEDDING = "embedding.word_embeddings.weight"
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_layer_freq": [0, 1, 0, 0, 1, 1, 0, 1],
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}


@dataclass(frozen=True)
class Case:
    """One model, and the places of its stages: on one rank there are none.

    Attributes:
        chunks: of a rank, for waves.
        places: stages of every rank, for a file.
    """

    ranks: int = 1
    spec: str = "te"
    layout: str | None = None
    tied: bool = False
    num_layers: int = 8
    schedule: str = "zb-v"
    chunks: int = 2
    places: tuple[tuple[int, ...], ...] = ()
    split: bool = False
    microbatches: int = 8
    dropout: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def placement(self) -> Any:
        from mindspeed.pipeline.schedule.placement import Placement

        return Placement(self.places) if self.places else Placement.snake(self.ranks, self.chunks)

    @property
    def virtual(self) -> int | None:
        """Megatron's number of model chunks."""
        return self.placement.chunks if self.ranks > 1 and self.placement.chunks > 1 else None


@dataclass(frozen=True)
class Built:
    """What one rank has.

    Attributes:
        chunks: the layers of each chunk, counted from 0 over the model, and ``embedding``,
            ``norm``, ``output``, ``mtp``.
        shapes: parameters of this rank by their name in the whole model.
        checkpoint: name, global shape and offset of every tensor that a checkpoint gets.
        losses: of the micro-batches, on the last rank.
        gradients: by name in the whole model.
    """

    chunks: list[list[int | str]]
    shapes: dict[str, tuple[int, ...]]
    checkpoint: list[tuple[Any, ...]]
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def build_all(cases: dict[str, Case]) -> dict[str, Built]:
    """Each model, without a step."""
    return {name: _run(case, step=False) for name, case in cases.items()}


def step_all(cases: dict[str, Case]) -> dict[str, Built]:
    """One step of each model, with weights that depend on their names only."""
    return {name: _run(case, step=True) for name, case in cases.items()}


def _run(case: Case, step: bool) -> Built:
    from megatron.core import parallel_state, tensor_parallel

    from mindspeed.megatron_adaptor import repatch

    parallel_state.destroy_model_parallel()
    values = {"num_layers": case.num_layers, "pipeline_model_parallel_size": case.ranks}
    values["virtual_pipeline_model_parallel_size"] = case.virtual
    if case.ranks > 1:
        values["pipeline_schedule"] = _file_of(case) if case.places else case.schedule
    repatch(values)
    parallel_state.initialize_model_parallel(1, case.ranks, case.virtual)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    models = [_model(case, stage) for stage in (range(case.virtual) if case.virtual else [None])]
    named = {}
    for model in models:
        _seed_parts(model)
        named |= {global_name(model, name): p for name, p in model.named_parameters()}
    for name, parameter in named.items():
        copied = case.tied and name == "output_layer.weight"  # on another rank than the embedding
        seed = zlib.crc32((EMBEDDING if copied else name).encode())
        generator = torch.Generator().manual_seed(seed)
        parameter.data.normal_(0, 0.2, generator=generator)
        parameter.data += "norm" in name and name.endswith("weight")
    return Built(
        [_contents(model) for model in models],
        {name: tuple(p.shape) for name, p in named.items()},
        [entry for model in models for entry in _checkpoint(model)],
        *(_step(case, models, named) if step else ()),
    )


def _file_of(case: Case) -> str:
    from pathlib import Path

    from mindspeed.pipeline.schedule.csv_file import write_plan
    from tests.pipeline.any_order import greedy

    file = Path(tempfile.gettempdir()) / f"greedy-{os.getpid()}.csv"
    write_plan(file, greedy(case.placement, case.microbatches))
    return str(file)


def _step(case: Case, models: list[Any], named: dict[str, Any]) -> tuple[Any, ...]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from mindspeed.pipeline.schedule.megatron import scheduled

    schedule, several = get_forward_backward_func(), len(models) > 1
    if several and not case.places:
        schedule = scheduled(schedule, kind=case.schedule, split_cooldown=case.split)
    config = models[0].config
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True)
    chunks = [DistributedDataParallel(config, ddp, model) for model in models]
    functions = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = functions if several else functions[0]
    batches = list(enumerate(micro_batches(case.microbatches)))
    losses = schedule(
        forward_step_func=_forward,
        data_iterator=[iter(batches) for _ in chunks] if several else iter(batches),
        model=chunks if several else chunks[0],
        num_microbatches=case.microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    gradients = {name: p.main_grad.clone() for name, p in named.items()}
    return [float(loss) for loss in losses], gradients


_MICROBATCH = [0]  # that is computed


def _seed_parts(model: Any) -> None:
    """Let dropout depend on layer and micro-batch only, not on rank and order."""
    parts = [(layer.layer_number, layer) for layer in model.decoder.layers]
    parts += [(0, model.embedding)] if model.pre_process else []
    for number, part in parts:
        part.register_forward_pre_hook(partial(_seed, number))


def _seed(number: int, *_: Any) -> None:
    torch.manual_seed(100 * number + _MICROBATCH[0])


def _model(case: Case, stage: int | None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import TransformerConfig

    from mindspeed.pipeline.layout import even_layout
    from mindspeed.pipeline.megatron_placement import PlacedLayout

    layout = None
    if case.ranks > 1:
        predicted = case.config.get("mtp_num_layers", 0)
        stages = case.placement.num_stages
        text = case.layout or even_layout(case.num_layers, stages, predicted)
        layout = PlacedLayout(text, case.placement)
    config = TransformerConfig(
        num_layers=case.num_layers,
        hidden_size=16,
        num_attention_heads=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=case.dropout,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        pipeline_model_parallel_size=case.ranks,
        virtual_pipeline_model_parallel_size=case.virtual,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        **case.config,
    )
    engine = case.spec == "te"
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, engine, vp_stage=stage)
    elif engine:
        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    predicted = None
    if config.mtp_num_layers:
        predicted = get_gpt_mtp_block_spec(config, spec, engine, vp_stage=stage)
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case.tied,
        mtp_block_spec=predicted,
        vp_stage=stage,
    )


def global_name(model: Any, name: str) -> str:
    """The parameter's name in a model on one rank."""

    def whole(match: re.Match[str]) -> str:
        return f"decoder.layers.{model.decoder.layers[int(match[1])].layer_number - 1}."

    return re.sub(r"^decoder\.layers\.(\d+)\.", whole, name)


def _contents(model: Any) -> list[int | str]:
    parts = {"embedding": "embedding", "mtp": "mtp", "output": "output_layer"}
    found: list[int | str] = [layer.layer_number - 1 for layer in model.decoder.layers]
    found += [part for part, name in parts.items() if name in dict(model.named_children())]
    return [*found, "norm"] if model.decoder.final_layernorm is not None else found


def _checkpoint(model: Any) -> Iterator[tuple[Any, ...]]:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    for entry in nested_values(state):
        offset = tuple(getattr(entry, "global_offset", ()))
        yield entry.key, tuple(entry.global_shape), offset, entry.replica_id


def _forward(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    _MICROBATCH[0], tokens = next(batches)
    return forward_step(iter([tokens]), model)


def refusal() -> str:
    """What a framework hears that builds a model of another layout."""
    from megatron.core import parallel_state

    from mindspeed.errors import ConfigError
    from mindspeed.megatron_adaptor import repatch

    repatch({"schedules_method": "dualpipev", "pipeline_model_parallel_size": 2})
    parallel_state.initialize_model_parallel(1, 2, 2)
    try:
        _model(Case(), 0)
    except ConfigError as error:
        return str(error)
    return ""
