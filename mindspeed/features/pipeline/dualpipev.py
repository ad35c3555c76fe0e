"""Pipeline stages in a V-shape: ``--schedules-method dualpipev``, ``--pipeline-schedule zb-v``.

Every rank has two chunks, and the first and the last stage are both on rank 0. A micro-batch goes
down the ranks and up again, so all ranks hold equally many activations, those of p micro-batches,
and the bubble is that of an interleaved schedule whose weight gradients fill the gaps.

    --schedules-method dualpipev [--dualpipev-dw-detach]   the order of DeepSeek's DualPipeV
    --pipeline-schedule zb-v                               weight gradients wherever a rank waits

DualPipeV computes some weight gradients apart from those of the inputs, in its warm-up and, with
``--dualpipev-dw-detach``, in its cool-down (as ``--pipeline-schedule dualpipev`` always does).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.pipeline import placed_stages
from mindspeed.features.pipeline import plans as shared
from mindspeed.features.pipeline.divided_backward import divide_backward, divided_backward_problems
from mindspeed.flags import flag
from mindspeed.pipeline.placed_stages import flag_of

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class DualPipeV(
    Feature,
    level=2,
    megatron_versions=">=0.15",
    seams=("pipeline_ends", "model_arguments", "chunk", "schedule"),
    conflicts=(
        "adaptive-memory",  # these four ask which layers wait for backward in Megatron's order
        "recompute-in-advance",
        "recompute-in-bubble",
        "swap-attention",
        "automated-pipeline",
        "dynamic-pipeline",
        "recompute-layers-per-pp-rank",
        "tensor-parallel-2d",
        "unaligned-pipeline",
    ),
    excludes={**shared.EXCLUDES_OF_PAIRS, **placed_stages.EXCLUDES},
    planning=("needs steps",),
    schedule="dualpipev",
):
    """Pipeline stages in a V-shape: first and last on rank 0."""

    schedules_method: Literal["dualpipev"] | None = flag(
        None, "pipeline schedule: dualpipev has two chunks per rank in a V-shape"
    )
    dualpipev_dw_detach: bool = flag(
        False, "dualpipev: split the backwards of the cool-down into input and weight gradients"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self != DualPipeV() or flag_of(megatron) is not None

    def asked_by(self, megatron: Megatron) -> str | None:
        return flag_of(megatron)

    def problems(self, megatron: Megatron) -> list[Problem]:
        name = flag_of(megatron)
        if name is None or (self.dualpipev_dw_detach and self.schedules_method is None):
            fix = "add it, or remove this flag"
            return [
                Problem(
                    "--dualpipev-dw-detach", "is a variant of --schedules-method dualpipev", fix
                )
            ]
        found = list(placed_stages.problems(name, megatron))
        if self.schedules_method is not None:  # else --pipeline-schedule checks its own
            found += shared.problems_of(name, megatron)
            found += divided_backward_problems(name, megatron)
            found += [] if found else self._plan_problems(name, megatron)
        return found

    def _plan_problems(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        ranks, count = (
            megatron["pipeline_model_parallel_size"],
            placed_stages.num_microbatches(megatron),
        )
        if count is not None and count < 2 * ranks:
            yield Problem(
                name,
                f"needs 2 * --pipeline-model-parallel-size {ranks} = {2 * ranks} micro-batches or "
                f"more in every step; there are {count}",
                "make --global-batch-size larger or --micro-batch-size smaller, or take "
                "--pipeline-schedule zb-v, which has no such limit",
            )
            return
        from mindspeed.pipeline.schedule.schedules import ScheduleRequest

        factor = megatron.get("pipeline_memory_limit")
        limit = None if factor is None else shared.limit_of(factor, ranks, 1)
        request = ScheduleRequest(
            kind="dualpipev",
            split_cooldown=self.dualpipev_dw_detach,
            memory_limit=limit,
            pairs=shared.has_pairs(megatron),
        )
        if isinstance(problem := shared.plan_of(name, megatron, request), Problem):
            yield problem

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        return placed_stages.corrects(megatron)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        placed_stages.attach_placement(seams, megatron, self.name)
        if self.schedules_method is None:
            return  # --pipeline-schedule chooses the order

        def schedule(previous: Any) -> Any:
            from mindspeed.pipeline.schedule.megatron import scheduled

            return scheduled(
                previous,
                kind="dualpipev",
                split_cooldown=self.dualpipev_dw_detach,
                pairs=shared.has_pairs(megatron),
            )

        divide_backward(seams, self.name)
        seams.schedule.add(schedule, owner=self.name)
