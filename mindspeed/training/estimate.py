"""``--dry-run``: the resolved job, its memory per rank, FLOPs and pipeline bubble.

Parameters are those of the model that the flags build on each rank
(:mod:`mindspeed.training.parameter_counts`). Memory of them, in bytes of one parameter, of which d
ranks share an optimizer:

    weights              2 (fp16, bf16) or 4
    gradients            4 (2 without fp32 accumulation), of trained ones
    optimizer            8, and 4 main weights in 16-bit training, all / d if distributed; other
                         storages: .optimizer_size
    gradient copies      4 of 16-bit gradients, / d if distributed, when activations are gone
    ZeRO 2, 3            gradients / d; ZeRO 3: weights / d, and for a moment two layers whole, and
                         embedding and output layer

and of activations:

    activations          s b per layer times what it keeps of a token (.activations), s sequence and
                         b micro-batch; with full recomputation its input, and one layer whole
    in flight            micro-batches that a rank holds with the schedule of the job
                         (.pipeline_figures): stages - rank with 1F1B, a part more with the
                         interleaved one

It is an estimate for choosing a layout, not a promise. Below it is a table of the bytes that one
micro-batch keeps at each site (:mod:`mindspeed.training.activation_trace`), which are exact.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed.job import Parallel
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.training.activations import head_bytes, input_bytes, layer_bytes, policy_of
from mindspeed.training.flops import layer_kinds, training_flops
from mindspeed.training.optimizer_size import (
    exempt_bytes,
    gradient_copy_bytes,
    host_bytes,
    host_gradient_bytes,
    state_bytes,
    window_bytes,
)
from mindspeed.training.parameter_counts import (
    Parameter,
    RankParameters,
    count,
    entries_of_model,
)
from mindspeed.training.pipeline_figures import (
    PipelineFigures,
    figures,
    layers_of_stages,
    micro_batches,
)
from mindspeed.training.resolve import Settings
from mindspeed.training.zero import STRATEGIES

GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """Estimate for one layout; memory in bytes of the rank that needs most."""

    parameters: int
    bubble: float
    schedule: str
    flops_per_step: float
    parameters_per_rank: int = 0
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    host: float = 0.0
    windows: float = 0.0
    gradient_copies: float = 0.0
    gathered: float = 0.0
    activations: float = 0.0

    @property
    def memory(self) -> float:
        """Total bytes on the rank that needs most."""
        kept = self.weights + self.gathered + self.gradients + self.optimizer
        return kept + max(self.activations, self.gradient_copies + self.windows)


def estimate(args: argparse.Namespace, traced: Mapping[int, int] | None = None) -> Estimate:
    """Estimate a run from its final values.

    Args:
        args: final values, of a dry run; the process is not part of a job.
        traced: bytes of activations on pipeline ranks that hold as much as any other; by default
            those of all by formula.
    """
    stages, pipeline = count(args), figures(args)
    formula = enumerate(_activations(args, pipeline))
    activations: Mapping[int, float] = traced or dict(formula)
    whole = Estimate(
        parameters=entries_of_model(args, stages),
        bubble=pipeline.bubble,
        schedule=pipeline.name,
        flops_per_step=training_flops(args, args.global_batch_size),
    )
    ranks = (_of_rank(args, stages[rank], whole, nbytes) for rank, nbytes in activations.items())
    return max(ranks, key=lambda one: one.memory)


def _of_rank(
    args: argparse.Namespace, rank: RankParameters, whole: Estimate, activations: float
) -> Estimate:
    """The estimate with the bytes of a rank."""
    shares = _Shares(args)
    narrow = args.fp16 or args.bf16
    width = 4 if not narrow or args.accumulate_allreduce_grads_in_fp32 else 2
    trained = [one for one in rank.parameters if one.trained]
    updated = sum(shares.optimizer(one) for one in trained)
    states = _states(args, shares, trained)
    copied = sum(shares.optimizer(one) for one in trained if one.element < 4)
    host = host_bytes(args, updated, states)
    return replace(
        whole,
        parameters_per_rank=rank.entries(),
        weights=sum(shares.weights(one) * one.element for one in rank.parameters),
        gathered=shares.gathers * (2 * rank.largest_layer() + rank.nbytes(_outside)),
        gradients=sum(shares.gradients(one) * max(width, one.element) for one in trained),
        optimizer=states + _exempt(args, shares, trained) - host,
        host=host + host_gradient_bytes(args, updated),
        windows=window_bytes(args, states),
        gradient_copies=copied * gradient_copy_bytes(args),
        activations=activations,
    )


def _outside(parameter: Parameter) -> bool:
    return parameter.layer is None


@dataclass(frozen=True)
class _Shares:
    """Entries of a parameter that one of its replicas holds."""

    args: argparse.Namespace

    def replicas(self, parameter: Parameter) -> int:
        """Ranks that share a parameter."""
        parallel = Parallel.of(self.args)
        return parallel.expert_data if parameter.expert else parallel.data * parallel.context

    @property
    def gathers(self) -> bool:
        """Whether weights are sharded, and gathered to compute."""
        strategy = self.args.data_parallel_sharding_strategy
        return bool(self.args.use_megatron_fsdp and strategy == STRATEGIES[3])

    def weights(self, parameter: Parameter) -> float:
        """Between steps."""
        return parameter.entries / (self.replicas(parameter) if self.gathers else 1)

    def gradients(self, parameter: Parameter) -> float:
        """Of its gradient."""
        sharded = self.args.use_megatron_fsdp
        return parameter.entries / (self.replicas(parameter) if sharded else 1)

    def optimizer(self, parameter: Parameter) -> float:
        """That it updates."""
        sharded = self.args.use_distributed_optimizer
        ranks = self.replicas(parameter) // self.args.num_distributed_optimizer_instances
        return parameter.entries / (ranks if sharded else 1)


def _states(args: argparse.Namespace, shares: _Shares, trained: Sequence[Parameter]) -> float:
    """Bytes of the optimizer's states on the fullest rank."""

    def nbytes(one: Parameter) -> float:
        return state_bytes(args, one.element, one.matrix)

    if args.optimizer != "dist_muon":
        return sum(shares.optimizer(one) * nbytes(one) for one in trained)
    fullest = 0.0
    for experts in (False, True):  # whole parameters by size, there and back over their replicas
        some = sorted((one for one in trained if one.expert == experts), key=lambda p: p.entries)
        kept = [0.0] * shares.replicas(some[0]) if some else [0.0]
        places = itertools.cycle([*range(len(kept)), *reversed(range(len(kept)))])
        for one, place in zip(some, places, strict=False):
            kept[place] += one.entries * nbytes(one)
        fullest += max(kept)
    return fullest


def _exempt(args: argparse.Namespace, shares: _Shares, trained: Sequence[Parameter]) -> float:
    """Bytes more of moments that stay fp32, on the rank that has most of them.

    Of one bucket the last data-parallel rank has the embedding, of several each a part.
    """
    exempt = [one for one in trained if one.exempt]
    each = sum(shares.optimizer(one) for one in exempt)
    if not args.overlap_grad_reduce:
        updated = sum(shares.optimizer(one) for one in trained)
        each = min(sum(one.entries for one in exempt), updated)
    return each * exempt_bytes(args)


def describe(settings: Settings) -> str:
    """The text of ``--dry-run``."""
    args = settings.args
    sites, traced = _sites(args)
    e = estimate(args, traced)
    by_formula = "" if traced else ", by formula: not traced, see below"
    only_with_flags = [
        ("gathered weights", e.gathered, "per rank"),
        ("optimizer (host)", e.host, "of host memory"),
        ("swap windows", e.windows, "per rank, not with activations"),
        ("gradient copies", e.gradient_copies, "per rank, not with activations"),
    ]
    lines: list[tuple[str, Any]] = [
        ("ranks", _layout(args)),
        ("micro-batches", f"{micro_batches(args)} per step and rank"),
        ("parameters", f"{e.parameters:,} ({e.parameters_per_rank:,} on the fullest rank)"),
        ("weights", f"{e.weights / GIB:10.3f} GiB per rank"),
        ("gradients", f"{e.gradients / GIB:10.3f} GiB per rank"),
        ("optimizer", f"{e.optimizer / GIB:10.3f} GiB per rank"),
        *((name, f"{size / GIB:10.3f} GiB {of}") for name, size, of in only_with_flags if size),
        ("activations", f"{e.activations / GIB:10.3f} GiB per rank{by_formula}"),
        ("memory", f"{e.memory / GIB:10.3f} GiB per rank, estimated"),
        ("pipeline bubble", f"{100 * e.bubble:.1f} % ({e.schedule})"),
        ("model FLOPs", f"{e.flops_per_step:.3e} per step"),
    ]
    figures = "\n".join(f"  {name:<16} {value}" for name, value in lines)
    return (
        f"# resolved configuration\n{settings.recipe}\n# figures\n{figures}\n"
        f"# MiB that one micro-batch keeps for backward, by site\n{sites}"
    )


def _sites(args: argparse.Namespace) -> tuple[str, dict[int, int] | None]:
    """Table by site, and bytes of the micro-batches in flight on traced pipeline ranks."""
    from mindspeed.training import activation_trace

    try:
        stages = activation_trace.trace(args)
        return activation_trace.table(stages), {stage.number: stage.bytes for stage in stages}
    except Exception as error:  # the other figures do not depend on it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"  not traced: {reason}", None


def _layout(args: argparse.Namespace) -> str:
    return (
        f"{args.world_size} = tensor {args.tensor_model_parallel_size} x pipeline "
        f"{args.pipeline_model_parallel_size} x context {args.context_parallel_size} x data "
        f"{args.data_parallel_size}"
    )


def _kinds(args: argparse.Namespace) -> list[bool]:
    """For every layer, whether it has experts; dense ones come first."""
    dense, sparse = layer_kinds(args)
    return [False] * dense + [True] * sparse


def _activations(args: argparse.Namespace, pipeline: PipelineFigures) -> list[float]:
    """Of every pipeline rank: the first holds most micro-batches, the last the logits of one."""
    tokens = args.seq_length * args.micro_batch_size / args.context_parallel_size
    kinds, placement, counts = _kinds(args), pipeline.placement, layers_of_stages(args)
    if pipeline.recompute:  # what is held is there as a whole
        args = copy.copy(args)
        args.recompute_granularity = args.recompute_method = None
    last = placement.rank(placement.num_stages - 1)
    kept = []
    for rank, here in enumerate(_layers_of_ranks(args, placement)):
        held, once = _stage(args, [kinds[layer] for layer in here])
        parts = tuple(counts[stage] / max(len(here), 1) for stage in placement.stages[rank])
        head = head_bytes(args) if rank == last else 0.0
        kept.append(tokens * (pipeline.in_flight(rank, parts) * held + once + head))
    return kept


def _layers_of_ranks(args: argparse.Namespace, placement: Placement) -> list[list[int]]:
    """The layers on each pipeline rank, counted from 0 in the model."""
    counts = layers_of_stages(args)
    ends = list(itertools.accumulate(counts))
    return [
        [n for stage in stages for n in range(ends[stage] - counts[stage], ends[stage])]
        for stages in placement.stages
    ]


def _stage(args: argparse.Namespace, kinds: Sequence[bool]) -> tuple[float, float]:
    """Bytes per token: kept by every micro-batch in flight, and by the one in backward."""
    everything = [layer_bytes(args, experts=kind) for kind in kinds]
    whole = [
        layer_bytes(args, experts=kind, policy=policy_of(args, layer))
        for layer, kind in enumerate(kinds)
    ]
    # The level takes the granularity from Megatron, and keeps two inputs a layer if it is 2.
    level = getattr(args, "optimize_recomp_communication_level", 0)
    if args.recompute_granularity != "full" and not (level and args.recompute_method):
        again = max((x - y for x, y in zip(everything, whole, strict=True)), default=0.0)
        return sum(whole), again
    kept = input_bytes(args) * (2 if level == 2 else 1)
    every = args.recompute_num_layers or 1
    if args.recompute_method == "block":  # this many layers of a stage are computed again
        chunks = args.virtual_pipeline_model_parallel_size or 1
        again = min(len(whole), every * chunks)
        return sum(whole[again:]) + again * kept, max(whole[:again], default=0.0)
    return -(-len(whole) // every) * kept, min(every, len(whole)) * max(whole, default=0.0)
