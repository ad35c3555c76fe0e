"""The pipeline schedule of a resolved job, and its bubble.

The flags of a job choose a schedule (seam ``schedule``; without a flag of ours Megatron's own). Its
plan is made as in training and simulated, with a backward that takes twice as long as a forward.
A step with more micro-batches repeats the middle of a shorter one: plans of long steps are not
made, their figures are continued from two short ones.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from mindspeed.adaptor.versions.trainer import schedule_of
from mindspeed.errors import ConfigError
from mindspeed.flags import read
from mindspeed.job import Batch, Parallel
from mindspeed.models.model_config import ModelConfig
from mindspeed.pipeline.placed_stages import layers_of_stages
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate

MOST_ACTIONS = 40_000
LARGEST = 120_000
_BACKWARD = 2.0


@dataclass(frozen=True)
class PipelineFigures:
    """A step of the pipeline.

    Attributes:
        name: of the schedule.
        bubble: fraction of the step in which the mean rank computes nothing that must be computed.
    """

    name: str
    bubble: float


@dataclass(frozen=True)
class _Interleaved:
    """Flags of Megatron's interleaved schedule."""

    microbatch_group_size_per_vp_stage: int | None = None
    overlap_moe_expert_parallel_comm: bool = False

    @property
    def group(self) -> int | None:
        """Micro-batches that run through a chunk before the next chunk's turn."""
        return self.microbatch_group_size_per_vp_stage


def figures(args: argparse.Namespace) -> PipelineFigures:
    """Those of a job whose features are attached.

    Args:
        args: final values.

    Raises:
        ConfigError: the schedule does not exist for these sizes.
    """
    parallel, count, shares = Parallel.of(args), micro_batches(args), stage_shares(args)
    chunks = len(parallel.vp_stages)
    return figures_of(request_of(args), parallel.pipeline, chunks, count, shares)


def micro_batches(args: argparse.Namespace) -> int:
    """Micro-batches of a step, on one data-parallel rank."""
    return max(1, Batch.of(args).micro_batches)


def check_interleaved(args: argparse.Namespace) -> None:
    """Refuse steps that Megatron's interleaved schedule stops at, before work starts.

    Args:
        args: final values of a job whose features are attached.

    Raises:
        ConfigError: says which number of micro-batches or which groups of them would do.
    """
    parallel, batch = Parallel.of(args), Batch.of(args)
    if parallel.chunks is None or scheduled_pipeline(args) is not None:
        return
    stages = parallel.pipeline
    count, group = micro_batches(args), read(_Interleaved, args).group or stages

    def runs(group: int) -> bool:
        return stages <= group <= count and not 0 < count % group < stages

    if runs(group):
        return
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    other = next(filter(runs, range(stages, count + 1)), None)
    raise ConfigError(
        f"--global-batch-size {batch.whole} has {count} micro-batches on a rank, which "
        f"the interleaved schedule cannot run in groups of {group}: each group must have at least "
        f"{stages} (--pipeline-model-parallel-size), the last one too; give a multiple of "
        f"{batch.samples_of(max(group, stages))} samples"
        + (f", or {flag} {other}" if other is not None else "")
    )


def request_of(args: argparse.Namespace) -> ScheduleRequest:
    """The schedule that the flags of a job ask for."""
    if (pipeline := scheduled_pipeline(args)) is not None:
        return pipeline.request  # type: ignore[no-any-return]
    if Parallel.of(args).chunks is None:
        return ScheduleRequest()
    flags = read(_Interleaved, args)
    return ScheduleRequest(
        "interleaved", group_size=flags.group, pairs=flags.overlap_moe_expert_parallel_comm
    )


def overlaps_experts(args: argparse.Namespace) -> bool:
    """Whether forward of one micro-batch runs between the experts' messages of another's."""
    return read(_Interleaved, args).overlap_moe_expert_parallel_comm


def scheduled_pipeline(args: argparse.Namespace) -> Any:
    """The ``ScheduledPipeline`` that runs steps; None where Megatron's own schedules do."""
    parallel = Parallel.of(args)
    function: Any = schedule_of(parallel.pipeline, parallel.chunks)
    while function is not None:
        if isinstance(getattr(function, "request", None), ScheduleRequest):
            return function
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return None


def stage_shares(args: argparse.Namespace) -> tuple[float, ...] | None:
    """The part of a mean rank's layers on each stage; None where all have as many."""
    layers = layers_of_stages(vars(args))
    if len(set(layers)) == 1:
        return None
    mean = read(ModelConfig, args).num_layers / Parallel.of(args).pipeline
    return tuple(count / mean for count in layers)


def figures_of(
    request: ScheduleRequest,
    ranks: int,
    chunks: int,
    count: int,
    shares: tuple[float, ...] | None = None,
) -> PipelineFigures:
    """Those of a schedule.

    Args:
        ranks: p.
        chunks: v.
        count: micro-batches of the step, m.
        shares: :attr:`Costs.stage_shares`.
    """
    if ranks == 1:
        return PipelineFigures("no pipeline", 0.0)
    costs = replace(request.costs, forward=1.0, stage_shares=shares, recompute=None)
    costs = replace(costs, input_gradient=_BACKWARD / 2, weight_gradient=_BACKWARD / 2)

    def at(number: int) -> _Step:
        return _Step.of(build_plan(request, ranks, chunks, number), costs)

    group = (request.group_size or ranks) if chunks > 1 else 1
    period = min(group, count)
    if 2 * ranks * chunks * count <= MOST_ACTIONS or request.sizes is not None or request.plan:
        step = at(count)
    else:
        enough = 2 * ranks + 4 * period
        short = min(count, enough + (count - enough) % period)
        plain = request.kind in ("1f1b", "interleaved") and not request.recompute
        if plain and shares is None and 2 * ranks * chunks * (short + period) > LARGEST:
            name = "1f1b" if chunks == 1 else "interleaved"  # of millions of actions
            return PipelineFigures(name, (ranks - 1) / (chunks * count + ranks - 1))
        step = at(short)
        if short < count:
            step = step.continued(at(short + period), (count - short) / period)
    bubble = 1 - step.useful / step.makespan
    name = "interleaved" if step.name == "1f1b" and chunks > 1 else step.name
    if request.recompute:
        name += f", recomputation in {request.recompute}"
    return PipelineFigures(name, bubble)


@dataclass(frozen=True)
class _Step:
    name: str
    makespan: float
    useful: float

    @classmethod
    def of(cls, plan: Plan, costs: Costs) -> _Step:
        simulation = simulate(plan, costs)
        return cls(plan.name, simulation.makespan, simulation.useful)

    def continued(self, longer: _Step, steps: float) -> _Step:
        """Continue as far again as from here to ``longer``, so many times."""
        makespan = self.makespan + steps * (longer.makespan - self.makespan)
        useful = self.useful + steps * (longer.useful - self.useful)
        return _Step(self.name, makespan, useful)
