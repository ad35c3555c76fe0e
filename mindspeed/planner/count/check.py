"""Count bytes, FLOPs and messages of all pipeline ranks of a configuration: does it fit?

    settings = prepare(["--dry-run", ...])
    found = check(settings.args, memory_limit=60 * 2**30, jobs=2)
    found.fits, found.ranks[0].peak

The first rank of each stage runs one step on FakeTensors
(:mod:`mindspeed.planner.count.counted_step`): the tensor, context and data parallel ranks of a
stage are equal, with the exceptions in :attr:`Check.note`. Ranks with equal figures are grouped.
:func:`megatron_formula` is Megatron-LM's estimate for comparison.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mindspeed.adaptor.repairs.experts.memory_estimate import has_unknown_experts
from mindspeed.flags import read
from mindspeed.instruments.ledger import Communication
from mindspeed.job import (
    Batch,
    MixtureOfExperts,
    OptimizerStates,
    Parallel,
    RecomputeOptions,
    Sharding,
)
from mindspeed.models.model_config import ModelConfig
from mindspeed.planner import isolated
from mindspeed.planner.count.counted_step import CountedStep, count_step
from mindspeed.profiling.model_flops import (
    ModelShape,
    attention_products,
    mlp_weights,
    moe_pattern,
)
from mindspeed.training.fake_job import rank_in_stage
from mindspeed.training.token_counts import model_shape

Progress = Callable[[int, int], None]
"""Progress callback: how many parts are done, and the total."""


@dataclass(frozen=True)
class GroupTraffic:
    """Bytes that a rank sends in a step through one process group by one operation.

    Attributes:
        group: Megatron's description of the group.
        op: such as ``all_gather``, see :mod:`mindspeed.instruments.ledger`.
        calls: number of calls; None: unknown.
        payload: bytes of the tensors.
        wire: bytes that this rank sends.
    """

    group: str
    size: int
    op: str
    calls: int | None
    payload: int
    wire: int


@dataclass(frozen=True)
class RankCheck:
    """Pipeline ranks with the same figures.

    Attributes:
        pipeline_ranks: their numbers.
        static: bytes between steps, by kind.
        peak: largest number of bytes alive at once.
        at_peak: bytes at the peak, by kind.
        flops: FLOPs executed in a step, recomputation included.
        traffic: messages, by group and operation.
        host: bytes of host memory between steps.
    """

    pipeline_ranks: tuple[int, ...]
    parameters: int
    static: Mapping[str, int]
    peak: int
    at_peak: Mapping[str, int]
    flops: int
    recomputed: int
    traffic: tuple[GroupTraffic, ...]
    host: int = 0


@dataclass(frozen=True)
class Check:
    """The figures of a configuration.

    Attributes:
        micro_batches: micro-batches of a step on one data-parallel rank.
        ranks: all pipeline ranks.
        memory_limit: bytes that the tensors of a rank may take; None: unknown.
        composed: whether figures are composed of small runs
            (:mod:`mindspeed.planner.compose.compose`), not counted.
        note: the counted rank of a stage, if others have other bytes.
    """

    micro_batches: int
    ranks: tuple[RankCheck, ...]
    memory_limit: int | None = None
    composed: bool = False
    note: str = ""

    @property
    def fullest(self) -> RankCheck:
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool | None:
        """Whether every rank stays within the limit; None without a limit."""
        return None if self.memory_limit is None else self.fullest.peak <= self.memory_limit


def check(
    args: argparse.Namespace,
    memory_limit: int | None = None,
    *,
    jobs: int = 1,
    progress: Progress = lambda done, of: None,
    micro_batches: Sequence[int] | None = None,
) -> Check:
    """Count a step of every pipeline rank.

    Args:
        args: final values, of a dry run; their features are attached.
        micro_batches: micro-batches that each pipeline rank runs; default: those of the job.

    Raises:
        MindSpeedError: the step cannot be counted; gives the reason.
    """
    steps: list[CountedStep] = []
    stages = Parallel.of(args).pipeline
    progress(0, stages)
    for step in _count(args, micro_batches or [None] * stages, jobs):
        steps.append(step)
        progress(len(steps), stages)
    ranks = [figures_of_step(stage, step) for stage, step in enumerate(steps)]
    equal = tuple(group_equal_ranks(ranks))
    return Check(steps[0].micro_batches, equal, memory_limit, note=counted_rank(args))


def counted_rank(args: argparse.Namespace) -> str:
    """Note on the counted rank of a stage, if its optimizer states differ from other ranks'."""
    parallel, states = Parallel.of(args), OptimizerStates.of(args)
    replicas = parallel.data * parallel.context
    if max(replicas, parallel.expert_data if MixtureOfExperts.of(args).count else 1) == 1:
        return ""
    quantized = states.quantized or torch.uint8 in states.moments
    if states.name == "dist_muon":
        why = "--optimizer dist_muon gives whole parameters to ranks"
    elif quantized and states.exempt and Sharding.of(args).distributed_optimizer:
        why = "parameters that --quant-states-exempt leaves in fp32 are on some ranks only"
    else:
        return ""
    return f"the first data-parallel rank of each stage is counted; others differ: {why}"


def _count(
    args: argparse.Namespace, micro_batches: Sequence[int | None], jobs: int
) -> Iterator[CountedStep]:
    def count(stage: int, batches: int | None) -> CountedStep:
        return count_step(args, rank_in_stage(args, stage), micro_batches=batches)

    isolated.import_ahead()  # what a module keeps from its import is of no step
    return isolated.each(count, enumerate(micro_batches), jobs)


def group_equal_ranks(ranks: Iterable[RankCheck]) -> Iterator[RankCheck]:
    """Group single pipeline ranks with equal figures."""
    found: list[RankCheck] = []
    for one in ranks:
        for index, other in enumerate(found):
            if replace(other, pipeline_ranks=one.pipeline_ranks) == one:
                numbers = other.pipeline_ranks + one.pipeline_ranks
                found[index] = replace(other, pipeline_ranks=numbers)
                break
        else:
            found.append(one)
    yield from found


def figures_of_step(stage: int, step: CountedStep) -> RankCheck:
    """Build the figures of a pipeline rank from the counts of its step."""
    return RankCheck(
        (stage,),
        step.parameters,
        dict(step.static),
        step.peak,
        dict(step.at_peak),
        step.flops.total,
        step.flops.recompute,
        traffic(step.communications),
        step.host_static,
    )


def traffic(communications: Iterable[Communication]) -> tuple[GroupTraffic, ...]:
    """Sum messages by group and operation, the largest first; groups of one rank are left out."""
    sums: dict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for one in communications:
        if len(one.ranks) > 1:
            found = sums[one.description, len(one.ranks), one.op]
            found[0] += 1
            found[1] += one.payload
            found[2] += one.wire
    rows = [GroupTraffic(*key, *numbers) for key, numbers in sums.items()]
    return tuple(sorted(rows, key=lambda row: (-row.wire, row.group, row.op)))


def megatron_formula(args: argparse.Namespace, micro_batches: int) -> float | None:
    """Megatron-LM's closed formula of memory; None where the formula does not apply.

    Bytes per rank of the first pipeline stage: parameters of the fullest shard times 18, or
    6 + 12 / d with a distributed optimizer over d ranks, and activations

        s b h (18 + 4 f/h) / t      a layer, with sequence parallelism and selective recomputation
        s b h (10 + 24/t)           a layer, otherwise, and 5 % for the rest

    times the micro-batches in flight of 1F1B (f: width of the MLP, t: tensor parallel size). It
    ignores gated activations, grouped heads, kernels, experts' tokens and context parallelism, and
    does not apply to experts that are sharded differently from dense layers. Source:
    ``megatron/training/theoretical_memory_usage.py``; Korthikanti et al., arXiv:2205.05198.
    """
    if read(ModelConfig, args).multi_latent_attention or has_unknown_experts(vars(args)):
        return None
    shape = replace(model_shape(args), output_gate=False)
    return _weights_and_optimizer(args, shape) + _activations(args, shape, micro_batches)


def _weights_and_optimizer(args: argparse.Namespace, shape: ModelShape) -> float:
    model, pattern, hidden = read(ModelConfig, args), moe_pattern(vars(args)), shape.hidden_size
    sparse, last = sum(pattern), pattern[-1] if pattern else 0
    norm = hidden * (1 if model.normalization == "RMSNorm" else 2)
    widths = {
        0: shape.ffn_hidden_size,
        1: shape.moe_ffn_hidden_size * (model.num_experts or 1) + shape.shared_expert_size,
    }
    attention = attention_products(shape).weights
    layer = {
        kind: attention + mlp_weights(shape, width) + 2 * norm for kind, width in widths.items()
    }
    block = layer[0] * (len(pattern) - sparse) + layer[1] * sparse + norm
    edge = hidden * shape.vocab_size
    parallel = Parallel.of(args)
    untied_here = model.untie_embeddings_and_output_weights and parallel.pipeline == 1
    fullest = block / parallel.pipeline + edge * (2 if untied_here else 1)
    fullest += shape.mtp_layers * layer[last]
    each = 6 + 12 / parallel.data if Sharding.of(args).distributed_optimizer else 18
    return each * fullest / parallel.tensor


def _activations(args: argparse.Namespace, shape: ModelShape, micro_batches: int) -> float:
    parallel, hidden = Parallel.of(args), shape.hidden_size
    tokens, tp, stages = shape.seq_length * Batch.of(args).micro, parallel.tensor, parallel.pipeline
    parted = parallel.sequence > 1 and RecomputeOptions.of(args).granularity == "selective"
    layer = 18 * hidden + 4 * shape.ffn_hidden_size if parted else hidden * (10 + 24 / tp)
    kept = layer * read(ModelConfig, args).num_layers + (8 + hidden) * stages
    if parallel.chunks is not None:
        kept *= 1 + (stages - 1) / (stages * parallel.chunks)
    elif stages > 1:
        kept *= min(1, micro_batches / stages)
    if stages == 1:
        vocab = shape.vocab_size
        kept += 4 * (hidden + vocab) if parted else 2 * (vocab / tp + hidden)
    return float(tokens * kept / tp if parted else 1.05 * tokens * kept)
