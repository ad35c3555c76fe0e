"""``--pipeline-schedule``: the order of forwards and backwards of a pipeline.

    --pipeline-schedule zb-h1            a schedule by its name
    --pipeline-schedule auto             the fastest candidate within the memory limit, if one is
                                         given and there are no virtual stages also of those on a V
    --pipeline-schedule FILE.csv         one row per rank, as torch.distributed.pipelining writes it
    --pipeline-memory-limit FACTOR       activations, relative to Megatron's own schedule
    --pipeline-costs F,I,W[,L[,G]]       measured times by which actions are placed
    --pipeline-schedule-dump FILE        write the schedule that runs
    --pipeline-trace DIR                 write when the actions of the third step ran

Without any of them Megatron's own 1F1B or interleaved schedule runs. The schedule is made and
checked before training starts (:mod:`mindspeed.pipeline.schedule`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed import device
from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, Megatron, Option, Problem, conflict, exclusions
from mindspeed.features.memory.scheduled_recomputation import (
    LAYER_EXCLUDES,
    drop_layers,
    recomputing,
)
from mindspeed.features.pipeline import plans as shared
from mindspeed.features.pipeline.divided_backward import (
    costs_of,
    divide_backward,
    divided_backward_problems,
)
from mindspeed.flags import flag
from mindspeed.pipeline.placed_stages import placement_of
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.pipeline.schedule.costs import Costs
    from mindspeed.pipeline.schedule.plan import Plan

logger = logging.getLogger("mindspeed")
_SCHEDULE = "--pipeline-schedule"
_LIMIT = "--pipeline-memory-limit"
_DUMP = "--pipeline-schedule-dump"
_COSTS = "--pipeline-costs"
_TRACE = "--pipeline-trace"
_OTHER_SCHEDULES = {
    "use_nanopipe": "--use-nanopipe",
    "fold_mode": "--fold-mode",
    "recompute_in_bubble": "--recompute-in-bubble",
    "recompute_in_advance": "--recompute-in-advance",
    "optimized_pipeline": "--optimized-pipeline",
    "optimize_send_recv_comm": "--optimize-send-recv-comm",
    "optimize_vpp_send_recv_comm": "--optimize-vpp-send-recv-comm",
    "schedules_method": "--schedules-method",
}
"""Flags of ours that run a plan, too."""
_WHOLE_BACKWARDS = ("1f1b", "interleaved", "aiao", "wave")
_GROUPED = ("1f1b", "interleaved", "nanopipe", "zb-h1")
_GROUP_SIZE = "--microbatch-group-size-per-virtual-pipeline-stage"


class PipelineSchedule(
    Feature,
    level=2,
    megatron_versions=">=0.15",
    seams=("chunk", "schedule"),
    excludes=shared.EXCLUDES_OF_PAIRS,
    planning=("needs steps",),
    options=tuple(
        Option("schedule", name, {"pipeline_schedule": name}, f"pipeline schedule {name}")
        for name in ("zb-h1", "zb-v", "dualpipev", "v-half", "v-min", "zb-wave")
    ),
):
    """The order of forwards and backwards in a pipeline, by name or from a file."""

    pipeline_schedule: str | None = flag(
        None,
        "pipeline schedule: auto, 1f1b, interleaved, nanopipe, zb-h1, zb-v, dualpipev, v-half, "
        "v-min, v-auto, wave, zb-wave, aiao or FILE.csv",
    )
    pipeline_schedule_dump: str | None = flag(None, "write the pipeline schedule to this csv file")
    pipeline_trace: str | None = flag(
        None,
        "folder for the times of every action of the third step on every rank of the first "
        "pipeline; mindspeed pipeline trace shows them",
    )
    pipeline_memory_limit: float | None = flag(
        None,
        "most activations of a rank, relative to the fullest rank of Megatron's own schedule",
        range=Range(0, above=True),
    )
    pipeline_costs: str | None = flag(
        None,
        "measured times of a micro-batch on a rank, by which the schedule places its actions: "
        "forward, input gradients, weight gradients, then latency of a message and gradient "
        "reduction of a step: 31,33,28,2,150",
    )

    def _is_file(self) -> bool:
        return (self.pipeline_schedule or "").endswith(".csv")

    def derives(self, megatron: Megatron) -> dict[str, Any]:
        """Within a memory limit ``auto`` takes a V where it is faster and nothing refuses it."""
        if self.pipeline_schedule != "auto" or self.pipeline_memory_limit is None:
            return {}
        ranks, layers = megatron.get("pipeline_model_parallel_size"), megatron.get("num_layers")
        count = shared.num_microbatches(megatron)
        if shared.chunks_of(megatron) > 1 or not (ranks and layers and count) or ranks == 1:
            return {}
        from mindspeed.features.registry import resolve
        from mindspeed.pipeline.schedule.auto import v_is_faster

        taken = {"pipeline_schedule": "v-auto"}
        limit = shared.limit_of(self.pipeline_memory_limit, ranks, 1)
        if not v_is_faster(ranks, count, costs_of(megatron), limit):
            return {}
        try:
            resolve({**megatron, **taken}, device.current().name)
        except ConfigError:  # who asked for a loop of stages gets it, or its own reason
            return {}
        return taken

    def problems(self, megatron: Megatron) -> list[Problem]:
        others = [other for name, other in _OTHER_SCHEDULES.items() if megatron.get(name)]
        schedule = self.pipeline_schedule
        if schedule is None:
            without = f"has no effect on Megatron's own schedules; add {_SCHEDULE}"
            given = {
                _LIMIT: self.pipeline_memory_limit,
                _DUMP: self.pipeline_schedule_dump,
                _COSTS: self.pipeline_costs,
                _TRACE: self.pipeline_trace,
            }
            if others:
                return []
            return [
                Problem(name, without, "or remove it")
                for name, value in given.items()
                if value is not None
            ]
        name = f"{_SCHEDULE} {schedule}"
        problems = list(shared.problems_of(name, megatron))
        if schedule not in _WHOLE_BACKWARDS:
            problems += divided_backward_problems(name, megatron)
        if problems:
            return problems
        return [*self._schedule_problems(name, megatron)]

    def _schedule_problems(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        from mindspeed.pipeline.schedule.schedules import KINDS

        if not self._is_file() and self.pipeline_schedule not in KINDS:
            yield Problem(
                name, "no such schedule", f"choose one of {', '.join(KINDS)}, or FILE.csv"
            )
            return
        if self._is_file():
            for other in (key for key in _OTHER_SCHEDULES if megatron.get(key)):
                yield conflict(name, _OTHER_SCHEDULES[other], "they are two schedules")
            if megatron.get("rampup_batch_size"):
                yield Problem(
                    name,
                    "is for one number of micro-batches, which --rampup-batch-size changes",
                    "remove one of them",
                )
        else:
            yield from self._two_schedules(name, megatron)
        group = megatron.get("microbatch_group_size_per_vp_stage")
        if group is not None and self.pipeline_schedule not in _GROUPED:
            yield Problem(
                name,
                f"decides itself what {_GROUP_SIZE} {group} says",
                f"remove {_GROUP_SIZE}, or take one of {', '.join(_GROUPED)}",
            )
        try:
            changes = self._changes(megatron)
        except ConfigError as error:
            yield Problem(name, str(error))
            return
        from mindspeed.pipeline.schedule.schedules import ScheduleRequest

        plan = changes.get("plan")
        if plan is not None and _recomputes(plan):
            yield from exclusions(name, LAYER_EXCLUDES, megatron)
            if granularity := megatron.get("recompute_granularity"):
                yield Problem(
                    name,
                    f"says what is recomputed, as --recompute-granularity {granularity} does",
                    "remove one of them",
                )
        found = shared.plan_of(name, megatron, ScheduleRequest(**changes))
        if isinstance(found, Problem):
            yield found

    def _two_schedules(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        """Find flags that select another schedule; other flags modify the selected one."""
        chosen = {"use_nanopipe": "nanopipe", "fold_mode": "aiao", "schedules_method": "dualpipev"}
        for key, kind in chosen.items():
            if megatron.get(key) and self.pipeline_schedule != kind:
                yield conflict(name, _OTHER_SCHEDULES[key], "they are two schedules")

    def _changes(self, megatron: Megatron) -> dict[str, Any]:
        """The fields of ``ScheduleRequest`` that the flags set.

        Raises:
            ConfigError: the file is no schedule of this job.
        """
        ranks, chunks = (
            megatron.get("pipeline_model_parallel_size") or 1,
            shared.chunks_of(megatron),
        )
        placement = placement_of(megatron)
        changes: dict[str, Any] = {}
        if shared.has_pairs(megatron):
            changes["pairs"] = True
        if self._is_file():
            from mindspeed.pipeline.schedule.csv_file import read_plan

            plan = read_plan(
                Path(str(self.pipeline_schedule)),
                ranks=ranks,
                chunks=chunks if placement is None else placement.chunks,
                num_microbatches=shared.num_microbatches(megatron),
            )
            if plan.paired and not shared.has_pairs(megatron):
                # Without collectives that they hide, pairs would only wait for each other.
                _say_unpaired(str(self.pipeline_schedule), plan, costs_of(megatron))
                plan = plan.without_pairs()
            changes["plan"] = plan
        elif self.pipeline_schedule is not None:
            changes["kind"] = self.pipeline_schedule
            if self.pipeline_schedule in _GROUPED:
                changes["group_size"] = megatron.get("microbatch_group_size_per_vp_stage")
            if self.pipeline_schedule not in _WHOLE_BACKWARDS:
                changes["costs"] = costs_of(megatron)
        if self.pipeline_memory_limit is not None:
            # Other places are compared with 1F1B: a V or a file has no chunks without it.
            changes["memory_limit"] = shared.limit_of(
                self.pipeline_memory_limit, ranks, chunks if placement is None else 1
            )
        return changes

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        changes = self._changes(megatron)
        is_first = os.environ.get("RANK", "0") == "0"
        dump = self.pipeline_schedule_dump if is_first else None

        recomputes = "plan" in changes and _recomputes(changes["plan"])

        def schedule(previous: Any) -> Any:
            from mindspeed.pipeline.schedule.megatron import scheduled, traced, written_to

            pipeline = written_to(scheduled(previous, **changes), dump)
            pipeline = traced(pipeline, self.pipeline_trace)
            return recomputing(pipeline) if recomputes else pipeline

        if recomputes:
            name = f"{_SCHEDULE} {self.pipeline_schedule}"
            drop_layers(seams, self.name, name, megatron)
        if self.pipeline_schedule not in (None, *_WHOLE_BACKWARDS):
            divide_backward(seams, self.name)
        seams.schedule.add(schedule, owner=self.name)


@lru_cache(maxsize=1)  # a job makes its plan more than once
def _say_unpaired(name: str, plan: Plan, costs: Costs) -> None:
    from mindspeed.pipeline.schedule.simulate import unpaired_note

    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s %s: %s (--moe-fb-overlap)", _SCHEDULE, name, unpaired_note(plan, costs))


def _recomputes(plan: Plan) -> bool:
    return any(action.op == "R" for _, action in plan)
