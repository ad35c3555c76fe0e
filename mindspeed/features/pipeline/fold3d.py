"""Fold3D: ``--fold-mode aiao`` hides the reduction of gradients behind the backward of a step.

All micro-batches pass one model chunk before the next (all in, all out). So the gradients of the
last chunk are complete when those of the others have not begun, and its reduction among
data-parallel ranks hides behind their backward; only that of the first chunk is exposed. Gathering
parameters (``--overlap-param-gather``) hides in the forward in the same way.

By default one forward and one backward alternate where they can, which frees activations sooner;
``--fold-order strict`` runs every forward of a chunk before the next. ``--fold-mode fifo`` is the
interleaved order.

Source: Li et al., "Fold3D: Rethinking and parallelizing computational and communicational tasks in
the training of large DNN models" (TPDS 2023).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.pipeline import plans as shared
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

logger = logging.getLogger("mindspeed")
_KINDS = {"aiao": "aiao", "fifo": "interleaved"}


class Fold3D(
    Feature,
    level=2,
    megatron_versions=">=0.15",
    seams=("schedule",),
    conflicts=dict.fromkeys(("nanopipe", "dualpipev"), "they are two schedules"),
    excludes=shared.EXCLUDES,
    planning=("needs steps",),
):
    """The reduction of gradients hides behind the backward of a step."""

    fold_mode: Literal["aiao", "fifo"] | None = flag(
        None,
        "aiao: all micro-batches pass one model chunk before the next; fifo: interleaved",
        aliases=("--foldx-mode",),
    )
    fold_order: Literal["strict"] | None = flag(
        None, "strict: no backward starts before all forwards of a rank have run"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return bool(self.fold_mode or self.fold_order)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if self.fold_order and self.fold_mode != "aiao":
            yield Problem(
                f"--fold-order {self.fold_order}",
                "has no effect without --fold-mode aiao",
                "add it, or remove --fold-order",
            )
            return
        name = f"--fold-mode {self.fold_mode}"
        problems = list(shared.problems_of(name, megatron))
        if not problems and shared.chunks_of(megatron) == 1:
            problems.append(
                Problem(
                    name,
                    "needs several model chunks on each pipeline rank",
                    "give --num-layers-per-virtual-pipeline-stage, or remove it",
                )
            )
        kind = _KINDS[self.fold_mode or "aiao"]
        if (schedule := megatron.get("pipeline_schedule")) not in (None, kind):
            other = f"--pipeline-schedule {schedule}"
            problems.append(conflict(name, other, "they are two schedules"))
        if not problems:
            from mindspeed.pipeline.schedule.schedules import ScheduleRequest

            found = shared.plan_of(name, megatron, ScheduleRequest(**self._changes(megatron)))
            problems += [found] if isinstance(found, Problem) else []
        yield from problems

    def _changes(self, megatron: Megatron) -> dict[str, Any]:
        """The fields of ``ScheduleRequest`` that the flags set."""
        changes: dict[str, Any] = {"kind": _KINDS[self.fold_mode or "aiao"]}
        if self.fold_order:
            changes["strict"] = True
        if (factor := megatron.get("pipeline_memory_limit")) is not None:
            ranks = megatron["pipeline_model_parallel_size"]
            changes["memory_limit"] = shared.limit_of(factor, ranks, shared.chunks_of(megatron))
        return changes

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        hides = megatron.get("overlap_grad_reduce") and megatron.get("data_parallel_size", 2) > 1
        if not hides and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "--fold-mode %s: no reduction of gradients can be hidden, and activations take "
                "more memory; add --overlap-grad-reduce with more than one data-parallel rank, "
                "or remove it",
                self.fold_mode,
            )
        changes = self._changes(megatron)

        def schedule(previous: Any) -> Any:
            from mindspeed.pipeline.schedule.megatron import scheduled

            return scheduled(previous, **changes)

        seams.schedule.add(schedule, owner=self.name)
