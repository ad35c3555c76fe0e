"""Pipeline stages in a V-shape: ``--schedules-method dualpipev``, ``--pipeline-schedule zb-v``.

Every rank has two chunks, and the first and the last stage are both on rank 0. A micro-batch goes
down the ranks and up again, so all ranks hold equally many activations, those of p micro-batches,
and the bubble is that of an interleaved schedule whose weight gradients fill the gaps.

    --schedules-method dualpipev [--dualpipev-dw-detach]   the order of DeepSeek's DualPipeV
    --pipeline-schedule zb-v                               weight gradients wherever a rank waits

``--dualpipev-dw-detach`` computes the weight gradients of the cool-down apart from those of the
inputs; without it the cool-down runs whole backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features import _v_shape
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


@dataclass(frozen=True)
class DualPipeVOptions:
    """The schedule under the original's flags."""

    schedules_method: Literal["dualpipev"] | None = flag(
        None, "pipeline schedule: dualpipev has two chunks per rank in a V-shape"
    )
    dualpipev_dw_detach: bool = flag(
        False, "dualpipev: split the backwards of the cool-down into input and weight gradients"
    )


def _enabled(options: DualPipeVOptions, megatron: Megatron) -> bool:
    return options != DualPipeVOptions() or _v_shape.flag_of(megatron) is not None


def _validate(options: DualPipeVOptions, megatron: Megatron) -> list[Problem]:
    detach, schedule = "--dualpipev-dw-detach", megatron.get("pipeline_schedule")
    if options.schedules_method is None:
        found = list(_v_shape.problems(megatron))
        if options.dualpipev_dw_detach and schedule != "dualpipev":
            found.append(
                Problem(detach, "has no effect without --schedules-method dualpipev", "remove it")
            )
        return found
    name = "--schedules-method dualpipev"
    found = []
    if schedule not in (None, "dualpipev"):
        found.append(
            Problem(
                name, f"and --pipeline-schedule {schedule} name two schedules", "give one of them"
            )
        )
    return [*found, *_v_shape.problems(megatron), *_too_few(name, megatron)]


def _too_few(name: str, megatron: Megatron) -> list[Problem]:
    ranks = megatron.get("pipeline_model_parallel_size") or 1
    count = _v_shape.num_microbatches(megatron)
    if ranks < 2 or count is None or count >= 2 * ranks:
        return []
    return [
        Problem(
            name,
            f"needs 2 * --pipeline-model-parallel-size {ranks} = {2 * ranks} micro-batches or more "
            f"in every step; there are {count}",
            "make --global-batch-size larger or --micro-batch-size smaller, or take "
            "--pipeline-schedule zb-v, which has no such limit",
        )
    ]


def _corrects(options: DualPipeVOptions, megatron: Megatron) -> dict[str, Any]:
    return _v_shape.corrects(megatron)


def _attach(seams: Seams, options: DualPipeVOptions, megatron: Megatron) -> None:
    _v_shape.attach_v_shape(seams, megatron, FEATURE.name)

    def schedule(previous: Any) -> Any:
        from mindspeed.pipeline.schedule.megatron import scheduled

        changes: dict[str, Any] = {"split_cooldown": options.dualpipev_dw_detach}
        if options.schedules_method is not None:
            changes["kind"] = options.schedules_method
        return scheduled(previous, **changes)

    seams.schedule.add(schedule, owner=FEATURE.name)


FEATURE = Feature(
    name="dualpipev",
    summary="pipeline stages in a V-shape: first and last on rank 0",
    level=2,
    options=DualPipeVOptions,
    enabled=_enabled,
    validate=_validate,
    corrects=_corrects,
    attach=_attach,
    seams=("pipeline_ends", "model_arguments", "chunk", "schedule"),
    conflicts=("unaligned-pipeline",),
)
