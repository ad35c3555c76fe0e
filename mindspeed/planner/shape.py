"""The shape of a job, for composition: layers of each pipeline stage, schedule, sizes.

Each layer has a kind; layers of one kind have equal shapes and keep equal activations.

| kind           | layer                                                               |
|---             |---                                                                  |
| dense          | attention and an MLP                                                |
| expert         | attention and a mixture of experts                                  |
| noop           | returns its input                                                   |
| ...+recomputed | keeps its input only, in a stage where other layers keep everything |
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed.features.registry import uneven_layers
from mindspeed.flags import read
from mindspeed.job import Batch, Parallel, Precision, RecomputeOptions, Sharding
from mindspeed.pipeline.noop_layers import indices_of
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.schedules import ScheduleRequest
from mindspeed.planner.expert_loads import loads_of
from mindspeed.preference.options import PreferenceOptions

if TYPE_CHECKING:
    from mindspeed.planner.cluster import Cluster

PAIRS = "forward and backward of two micro-batches at once (--overlap-moe-expert-parallel-comm)"


def whole_only(args: argparse.Namespace) -> str:
    """The part of a job that small runs cannot compose; empty if there is none.

    Either layers of one kind differ, or what they share is not shared layer by layer.
    """
    from mindspeed.training.pipeline_figures import scheduled_pipeline

    values = vars(args)
    if values.get("overlap_moe_expert_parallel_comm") and scheduled_pipeline(args) is None:
        return PAIRS
    if flag := uneven_layers(values):
        return f"layers that differ by {flag}"
    if (values.get("num_distributed_optimizer_instances") or 1) > 1:
        return "--num-distributed-optimizer-instances"
    return ""


def _pairs(args: argparse.Namespace) -> str:
    """What training on pairs of answers has beside layers: a reference model, steps read ahead."""
    objective = read(PreferenceOptions, args).objective
    if objective == "next_token":
        return ""
    return f"training on pairs of answers (--objective {objective})"


@dataclass(frozen=True)
class FeatureFlags:
    """Flags of features that estimates depend on."""

    unaligned_linear: bool = False
    attention_mask_type: str | None = None
    moe_zero_memory: str | None = None
    optimize_recomp_communication_level: int | None = None
    adaptive_memory_optimization: bool = False
    adaptive_recompute_device_swap: bool = False


DENSE, EXPERT, NOOP = "dense", "expert", "noop"
RECOMPUTED = "+recomputed"


@dataclass(frozen=True)
class Shape:
    """Properties of a job that composition uses.

    Attributes:
        ranks: pipeline parallel size.
        chunks: model chunks of a rank.
        stages: kinds of the layers of each stage, in the order in which a micro-batch passes them.
        micro_batches: micro-batches of a step on one data-parallel rank.
        message: bytes of a micro-batch between two stages.
        overlap_messages: send messages while the next action runs.
        overlap_gradients: reduce gradients while backward runs.
        overlap_parameters: gather parameters while forward runs.
        distributed_optimizer: data-parallel ranks shard the optimizer states.
        model_flops: FLOPs of a step on all devices, without recomputation.
        tokens: tokens of a step on all devices.
        dtype: dtype of parameters and activations; MFU is relative to its peak.
        whole_only: the part that cannot be composed (:func:`whole_only`), or empty.
        shards_gradients: data-parallel ranks shard gradients, or weights, too.
        recomputed_together: layers of a group of full recomputation; 0 without it.
        recomputes_some: whether the first layers of each chunk are recomputed.
        predictions: layers of multi-token prediction.
        bucket: parameters of a bucket of gradients, where they are reduced while backward runs; 0:
            all are one.
        rows_again: experts of pairs get their rows a second time in backward.
        uneven: part of its tokens of experts that the busiest rank may get beyond what is assumed.
    """

    request: ScheduleRequest
    ranks: int
    chunks: int
    stages: tuple[tuple[str, ...], ...]
    micro_batches: int
    data_parallel: int
    devices: int
    tensor: int
    context: int
    expert: int
    expert_tensor: int
    message: int
    overlap_messages: bool
    overlap_gradients: bool
    overlap_parameters: bool
    distributed_optimizer: bool
    model_flops: float
    tokens: int
    dtype: str = "bf16"
    whole_only: str = ""
    shards_gradients: bool = False
    recomputed_together: int = 0
    recomputes_some: bool = False
    predictions: int = 0
    bucket: int = 0
    rows_again: bool = False
    uneven: float = 0.0

    @property
    def recomputes_all(self) -> bool:
        """Whether every layer is recomputed as a whole."""
        return self.recomputed_together > 0

    @property
    def layer_kinds(self) -> frozenset[str]:
        """Kinds of the layers, recomputed or not."""
        return frozenset(kind.removesuffix(RECOMPUTED) for stage in self.stages for kind in stage)

    @property
    def placement(self) -> Placement:
        """Stages of each pipeline rank."""
        if self.ranks == 1:
            return Placement.loop(1, self.chunks)
        return self.request.placement(self.ranks, self.chunks)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that occur, in the order of their first layer."""
        found = dict.fromkeys(kind for stage in self.stages for kind in stage)
        return tuple(kind for kind in found if kind != NOOP)

    def kinds_on(self, cluster: Cluster) -> list[Cluster]:
        """The kind of devices of each pipeline rank."""
        each = self.devices // self.ranks
        return [cluster.at(rank * each) for rank in range(self.ranks)]

    def role(self, stage: int) -> str:
        """Role of a stage: ``first``, ``middle`` or ``last``; ``only`` without a pipeline."""
        if len(self.stages) == 1:
            return "only"
        return "first" if stage == 0 else "last" if stage == len(self.stages) - 1 else "middle"

    @property
    def unspliceable(self) -> str:
        """The part that recordings of small runs cannot show; empty if there is none."""
        request = self.request
        if request.recompute:
            return f"recomputation in {request.recompute} of a pipeline schedule"
        if request.sizes is not None:
            return "micro-batches of different sizes"
        if request.plan is not None or request.order is not None:
            return "a pipeline schedule of one's own"
        if request.swap:
            return "inputs of weight gradients on the host"
        return self.whole_only

    def chunks_of(self, rank: int) -> list[tuple[str, tuple[str, ...]]]:
        """Role and layers of the chunks of a pipeline rank."""
        return [(self.role(stage), self.stages[stage]) for stage in self.placement.stages[rank]]


def shape_of(args: argparse.Namespace) -> Shape:
    """The shape of a job whose features are attached in this process."""
    from mindspeed.pipeline.placed_stages import layers_of_stages
    from mindspeed.training.pipeline_figures import micro_batches, request_of
    from mindspeed.training.token_counts import training_flops

    parallel, batch, precision = Parallel.of(args), Batch.of(args), Precision.of(args)
    sharding = Sharding.of(args)
    pp = parallel.pipeline
    length = args.seq_length // parallel.context // parallel.sequence
    counts = layers_of_stages(vars(args)) if pp > 1 else (args.num_layers,)
    recomputation = RecomputeOptions.of(args)
    method = recomputation.method if recomputation.whole_layers else None
    again = recomputation.layers or 0
    return Shape(
        request=request_of(args) if pp > 1 else ScheduleRequest(),
        ranks=pp,
        chunks=parallel.chunks or 1,
        stages=_stages(args, counts, again if method == "block" else 0),
        micro_batches=micro_batches(args),
        data_parallel=parallel.data,
        devices=parallel.world,
        tensor=parallel.tensor,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        message=batch.micro * length * args.hidden_size * precision.element,
        overlap_messages=bool(args.overlap_p2p_comm) and pp > 1,
        overlap_gradients=sharding.overlap_gradients,
        overlap_parameters=sharding.overlap_parameters,
        distributed_optimizer=sharding.distributed_optimizer,
        model_flops=training_flops(args, batch.whole),
        tokens=batch.whole * args.seq_length,
        dtype=precision.name,
        whole_only=whole_only(args) or _pairs(args),
        shards_gradients=sharding.fsdp,
        recomputed_together=again or 1 if method == "uniform" else 0,
        recomputes_some=method == "block",
        predictions=args.mtp_num_layers or 0,
        bucket=_bucket(args, parallel.data) if sharding.overlap_gradients else 0,
        rows_again=read(FeatureFlags, args).moe_zero_memory == "level0",
        uneven=loads_of(args).more(args),
    )


def _bucket(args: argparse.Namespace, data_parallel: int) -> int:
    """Parameters of a bucket, as Megatron-Core's default has them for many ranks."""
    return args.ddp_bucket_size or max(40_000_000, 1_000_000 * data_parallel)


def _stages(
    args: argparse.Namespace, counts: tuple[int, ...], again: int
) -> tuple[tuple[str, ...], ...]:
    """Kinds of the layers of each stage; arguments as for :func:`spread`."""
    from mindspeed.profiling.model_flops import moe_pattern

    noop = indices_of(getattr(args, "noop_layers", None))
    kinds = [EXPERT if expert else DENSE for expert in moe_pattern(vars(args))]
    kinds = [NOOP if i in noop else kind for i, kind in enumerate(kinds)]
    return spread(kinds, counts, again)


def spread(kinds: list[str], counts: tuple[int, ...], again: int) -> tuple[tuple[str, ...], ...]:
    """Assign layers to stages.

    Args:
        kinds: kinds of all layers.
        counts: number of layers of each stage.
        again: number of layers, the first ones, that each stage recomputes.
    """
    stages, start = [], 0
    for count in counts:
        stage = kinds[start : start + count]
        stages.append(
            tuple(k + RECOMPUTED if k != NOOP and i < again else k for i, k in enumerate(stage))
        )
        start += count
    return tuple(stages)
