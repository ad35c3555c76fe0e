"""``--pipeline-schedule``: the order of forwards and backwards in a pipeline, or a file with it.

Without it Megatron's own 1F1B or interleaved schedule runs. With it a plan does
(:mod:`mindspeed.pipeline.schedule`), which is made, checked and priced before training starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed.features._divided_backward import (
    divide_backward,
    divided_backward_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

_WHOLE_BACKWARDS = ("1f1b", "interleaved", "aiao")


@dataclass(frozen=True)
class PipelineScheduleOptions:
    """Which schedule, within which limits, and where it is written."""

    pipeline_schedule: str | None = flag(None, "pipeline schedule: a name or FILE.csv")


def _enabled(options: PipelineScheduleOptions, megatron: Megatron) -> bool:
    return options.pipeline_schedule is not None


def _validate(options: PipelineScheduleOptions, megatron: Megatron) -> list[Problem]:
    problems = []
    if (megatron.get("pipeline_model_parallel_size") or 1) == 1:
        problems.append(
            Problem(
                f"--pipeline-schedule {options.pipeline_schedule}",
                "there is one pipeline stage",
                "give --pipeline-model-parallel-size, or remove it",
            )
        )
    if options.pipeline_schedule not in _WHOLE_BACKWARDS:
        name = f"--pipeline-schedule {options.pipeline_schedule}"
        problems += divided_backward_problems(name, megatron)
    return problems


def _attach(seams: Seams, options: PipelineScheduleOptions, megatron: Megatron) -> None:
    def schedule(previous: Any) -> Any:
        from mindspeed.pipeline.schedule.megatron import scheduled

        return scheduled(previous, kind=options.pipeline_schedule)

    if options.pipeline_schedule not in _WHOLE_BACKWARDS:
        divide_backward(seams, FEATURE.name)
    seams.schedule.add(schedule, owner=FEATURE.name)


FEATURE = Feature(
    name="pipeline-schedule",
    summary="the order of forwards and backwards in a pipeline",
    level=2,
    options=PipelineScheduleOptions,
    enabled=_enabled,
    validate=_validate,
    attach=_attach,
    seams=("chunk", "schedule"),
)
