"""Steps of small GPT models on the ranks of a pipeline, by Megatron's schedules and by plans.

Weights depend on the global names of parameters only, so that models with different numbers of
stages can be compared.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.support.pipeline_gpt import (
    BATCH,
    SEQUENCE,
    VOCABULARY,
    mean_loss,
    micro_batches,
    stage_of,
)

SIZES = {"hidden_size": 32, "num_attention_heads": 2}


@dataclass(frozen=True)
class Layout:
    """One model on some ranks."""

    pipeline: int = 1
    chunks: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    spec: str = "te"
    dropout: float = 0.1
    num_layers: int = 8
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Losses (last stage only) and the gradients after the reduction, by global name."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]


class Model:
    """The chunks of this rank with weights, wrapped for data parallelism."""

    def __init__(self, layout: Layout) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        from mindspeed.te.local_linears import new_store, split

        self.layout = layout
        self.limit: int | None = None  # of micro-batches that the data has
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            layout.chunks if layout.chunks > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
        )
        self.seed()
        stages = range(layout.chunks) if layout.chunks > 1 else [None]
        self.config = self._config()
        self.config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(**layout.ddp)
        self.chunks, store = [], new_store()
        for stage in stages:
            model = self._chunk(stage)
            for name, parameter in named(model):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.data.normal_(0, 0.2, generator=generator)
                parameter.data += "norm" in name and name.endswith("weight")
            split(store, model, self.config, stage)
            self.chunks.append(DistributedDataParallel(self.config, ddp, model))
        functions = [chunk.no_sync for chunk in self.chunks]
        if ddp.overlap_grad_reduce:
            self.config.no_sync_func = functions if layout.chunks > 1 else functions[0]
        if ddp.align_param_gather and ddp.overlap_param_gather:
            functions = [chunk.start_param_sync for chunk in self.chunks]
            self.config.param_sync_func = functions if layout.chunks > 1 else functions[0]

    def seed(self) -> None:
        """Dropout starts anew."""
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)

    def step(self, num_microbatches: int, schedule: Any = None, forward_only: bool = False) -> Step:
        """One step; by Megatron's schedule unless another is given."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        self.seed()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        several = self.layout.chunks > 1
        readers = [iter(batches(num_microbatches)[: self.limit]) for _ in self.chunks]
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            losses = (schedule or get_forward_backward_func())(
                forward_step_func=forward_step,
                data_iterator=readers if several else readers[0],
                model=self.chunks if several else self.chunks[0],
                num_microbatches=num_microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=forward_only,
            )
        gradients = {}
        for chunk in self.chunks:
            gradients |= {name: p.main_grad.clone() for name, p in named(chunk.module)}
        return Step([float(loss) for loss in losses], gradients)

    def _config(self) -> Any:
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        layout = self.layout
        several = layout.chunks > 1
        latent = layout.config.get("multi_latent_attention")
        return (MLATransformerConfig if latent else TransformerConfig)(
            **{
                **SIZES,
                "num_layers": layout.num_layers,
                "normalization": "RMSNorm",
                "add_bias_linear": False,
                "hidden_dropout": layout.dropout,
                "attention_dropout": layout.dropout,
                "gradient_accumulation_fusion": False,
                "tensor_model_parallel_size": layout.tensor,
                "sequence_parallel": layout.tensor > 1,
                "context_parallel_size": layout.context,
                "expert_model_parallel_size": layout.expert,
                "pipeline_model_parallel_size": layout.pipeline,
                "virtual_pipeline_model_parallel_size": layout.chunks if several else None,
                "microbatch_group_size_per_vp_stage": layout.pipeline,
                "pipeline_dtype": torch.float32,
                "deallocate_pipeline_outputs": True,
                "overlap_p2p_comm": several,
                "batch_p2p_comm": not several,
                **layout.config,
            }
        )

    def _specs(self, stage: int | None) -> tuple[Any, Any]:
        """Specs of the layers of a chunk, and of its multi-token prediction."""
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_layer_local_spec,
            get_gpt_layer_with_transformer_engine_spec,
        )

        if self.config.num_moe_experts:
            te = self.layout.spec == "te"
            return get_gpt_decoder_block_spec(self.config, te, vp_stage=stage), None
        if self.layout.spec == "te":
            return get_gpt_layer_with_transformer_engine_spec(), None
        return get_gpt_layer_local_spec(normalization="RMSNorm"), None

    def _chunk(self, stage: int | None) -> torch.nn.Module:
        from megatron.core.models.gpt import GPTModel

        spec, mtp = self._specs(stage)
        return GPTModel(
            self.config,
            spec,
            VOCABULARY,
            SEQUENCE,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp,
            **stage_of(stage),
        )


def named(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters with the numbers that their layers have in the whole model."""

    def number(match: re.Match[str]) -> str:
        return f"decoder.layers.{model.decoder.layers[int(match[1])].layer_number - 1}."

    for name, parameter in model.named_parameters():
        yield re.sub(r"^decoder\.layers\.(\d+)\.", number, name), parameter


def batches(count: int) -> list[torch.Tensor]:
    """Tokens ``[b, s]`` of this data-parallel rank's micro-batches."""
    from megatron.core import parallel_state

    return micro_batches(count, 5 + parallel_state.get_data_parallel_rank())


def forward_step(reader: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's ``forward_step_func``."""
    from mindspeed.adaptor.versions.batch_functions import zigzag_chunks

    tokens = next(reader)
    batch = zigzag_chunks(
        {
            "tokens": tokens,
            "labels": tokens.roll(-1, 1),
            "positions": torch.arange(SEQUENCE).expand(len(tokens), -1),
        }
    )
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return output, partial(mean_loss)


@dataclass(frozen=True)
class Case:
    """A schedule of a layout's model.

    Attributes:
        request: fields of ``ScheduleRequest``.
        num_microbatches: of the step.
        group: of Megatron's schedule that draws its random numbers in the same order.
        tolerance: of gradients; 0 where micro-batches are summed in the same order.
    """

    request: dict[str, Any]
    num_microbatches: int = 4
    group: int | None = None
    tolerance: float = 0.0


@dataclass(frozen=True)
class Executed:
    """What the executor did on this rank: its last clock, its actions, most activations alive."""

    end: float
    trace: tuple[Any, ...]
    peak_chunks: int


class _Observed:
    """Makes clocks that count activations, and keeps the last."""

    def __init__(self, costs: Any) -> None:
        self.costs, self.peak = costs, 0

    def __call__(self, plan: Any, work: Any) -> Any:
        from mindspeed.pipeline.schedule.virtual_time import VirtualTime

        self.time = VirtualTime(plan, self.costs)
        done = self.time.done

        def counted(action: Any) -> None:
            done(action)
            # A whole backward frees its activations when it ends, the counter when it begins.
            self.peak = max(self.peak, work.num_live)

        self.time.done = counted
        return self.time

    @property
    def executed(self) -> Executed:
        return Executed(self.time.now, tuple(self.time.trace), self.peak)


def compare(
    layouts: dict[str, tuple[Layout, list[Case]]],
) -> dict[str, tuple[list[str], list[Executed]]]:
    """Differences between Megatron's schedule and plans of the same model, for each layout.

    Returns:
        By name of the layout: differences, and what the executor did for each case.
    """
    from dataclasses import replace

    from mindspeed.pipeline.schedule.megatron import scheduled

    found = {}
    for name, (layout, cases) in layouts.items():
        model = Model(layout)
        expected = {}
        for m, group in dict.fromkeys((case.num_microbatches, case.group) for case in cases):
            model.config.microbatch_group_size_per_vp_stage = group or layout.pipeline
            expected[m, group] = model.step(m)
        model.config.microbatch_group_size_per_vp_stage = layout.pipeline
        texts, executed = [], []
        for case in cases:
            schedule = scheduled(None, **case.request)
            observed = _Observed(schedule.request.costs)
            schedule = replace(schedule, instrument=observed)
            step = model.step(case.num_microbatches, schedule)
            different = differences(
                step, expected[case.num_microbatches, case.group], case.tolerance
            )
            texts += [f"{case.request}: {text}" for text in different]
            executed.append(observed.executed)
        schedule = scheduled(None, **cases[0].request)
        step = model.step(4, schedule, forward_only=True)
        if step.losses != model.step(4, forward_only=True).losses:
            texts.append("losses of an evaluation")
        found[name] = texts, executed
    return found


def one_rank(layout: Layout, num_microbatches: int) -> Step:
    """The step of a model without pipeline."""
    return Model(layout).step(num_microbatches)


def with_given_groups(layout: Layout, seconds: float) -> tuple[list[str], int, float]:
    """Steps whose caller passes its own groups.

    Args:
        layout: of the model.
        seconds: timeout of the caller's pipeline group.

    Returns:
        Differences to Megatron's schedule, groups that steps after the first made, and the timeout
        of messages.
    """
    from datetime import timedelta
    from functools import partial

    import torch.distributed as dist
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mindspeed.errors import ConfigError
    from mindspeed.pipeline.schedule.channel import directions_of
    from mindspeed.pipeline.schedule.megatron import scheduled

    model = Model(layout)
    expected = model.step(4)
    groups = ProcessGroupCollection.use_mpu_process_groups(
        ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"]
    )
    dist.new_group([0])  # rank 1 is in fewer groups
    ranks = dist.get_process_group_ranks(groups.pp)
    groups.pp = dist.new_group(ranks, timeout=timedelta(seconds=seconds))
    communicator = P2PCommunicator(groups.pp, model.config)
    given = {"p2p_communicator": communicator, "pg_collection": groups}
    found = differences(model.step(4, partial(scheduled(None), **given)), expected)
    made = len(dist.distributed_c10d._world.pg_names)
    found += differences(model.step(4, partial(scheduled(None), **given)), expected)
    made = len(dist.distributed_c10d._world.pg_names) - made
    try:
        model.step(4, partial(scheduled(None), pg_collection=groups))
    except ConfigError:
        pass
    else:
        found.append("half of the groups were taken")
    backend = directions_of(groups.pp).downward._get_backend(torch.device("cpu"))
    return found, made, backend.options._timeout.total_seconds()


def step_without_data(layout: Layout) -> None:
    """A step whose data ends after two of four micro-batches on the first stage."""
    from mindspeed.pipeline.schedule.megatron import scheduled

    model = Model(layout)
    if torch.distributed.get_rank() == 0:
        model.limit = 2
    model.step(4, scheduled(None))


def plans(layout: Layout, cases: list[Case]) -> list[Step]:
    """The steps of one model by several plans."""
    from mindspeed.pipeline.schedule.megatron import scheduled

    model = Model(layout)
    return [model.step(case.num_microbatches, scheduled(None, **case.request)) for case in cases]


def differences(step: Step, expected: Step, tolerance: float = 0.0) -> list[str]:
    """What is not equal."""
    found = [] if step.losses == expected.losses else [f"{step.losses} != {expected.losses}"]
    for name, gradient in expected.gradients.items():
        difference = (step.gradients[name] - gradient).abs().max()
        if not difference <= tolerance * gradient.abs().max():
            found.append(f"{name}: {difference}")
    return found
