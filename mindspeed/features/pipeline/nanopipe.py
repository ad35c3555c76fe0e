"""``--use-nanopipe``: weight gradients are computed where a pipeline rank would wait.

Backward is divided into input gradients, which the stage before waits for, and weight gradients,
which nobody waits for. With model chunks the order is Megatron's interleaved one, and nearly all of
its bubble but the unavoidable (p - 1) F / v disappears, within the memory of its fullest rank; with
one chunk per rank it is 1F1B's (ZB-H1). Losses and gradients stay the same, bit for bit.

``--use-nanopipe-swap``: weight gradients that wait keep their inputs in host memory, so that each
rank has on its device what the interleaved schedule has there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.pipeline import plans
from mindspeed.features.pipeline.divided_backward import (
    costs_of,
    divide_backward,
    divided_backward_problems,
)
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

_NAME, _SWAP = "--use-nanopipe", "--use-nanopipe-swap"


class Nanopipe(
    Feature,
    level=2,
    megatron_versions=">=0.15",
    seams=("chunk", "schedule"),
    conflicts={
        "tensor-parallel-2d": "",
        "adaptive-memory": "",
        "dualpipev": "they are two schedules",
    },
    excludes=plans.EXCLUDES_OF_PAIRS,
    planning=("needs steps",),
    schedule="nanopipe",
):
    """Weight gradients are computed where a pipeline rank would wait."""

    use_nanopipe: bool = flag(False, "compute weight gradients where a pipeline rank would wait")
    use_nanopipe_swap: bool = flag(
        False, "weight gradients that wait keep what they need in host memory"
    )

    def problems(self, megatron: Megatron) -> list[Problem]:
        if not self.use_nanopipe:
            fix = f"add {_NAME}, or remove it"
            return [Problem(_SWAP, f"moves what weight gradients of {_NAME} need", fix)]
        problems = [
            *plans.problems_of(_NAME, megatron),
            *divided_backward_problems(_NAME, megatron),
            *self._other_schedule(megatron),
        ]
        return problems or [*self._plan_problems(megatron)]

    def _other_schedule(self, megatron: Megatron) -> Iterator[Problem]:
        given = megatron.get("pipeline_schedule")
        if given not in (None, "nanopipe"):
            yield conflict(_NAME, f"--pipeline-schedule {given}", "they are two schedules")

    def _plan_problems(self, megatron: Megatron) -> Iterator[Problem]:
        from mindspeed.pipeline.schedule.schedules import ScheduleRequest

        request = ScheduleRequest(**self._changes(megatron))
        found = plans.plan_of(_NAME, megatron, request)
        if isinstance(found, Problem):
            yield found

    def _changes(self, megatron: Megatron) -> dict[str, Any]:
        changes: dict[str, Any] = {
            "kind": "nanopipe",
            "swap": self.use_nanopipe_swap,
            "group_size": megatron.get("microbatch_group_size_per_vp_stage"),
            "costs": costs_of(megatron),
            "pairs": plans.has_pairs(megatron),
        }
        if (factor := megatron.get("pipeline_memory_limit")) is not None:
            ranks = megatron.get("pipeline_model_parallel_size") or 1
            chunks = plans.chunks_of(megatron)
            changes["memory_limit"] = plans.limit_of(factor, ranks, chunks)
        return changes

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        changes = self._changes(megatron)

        def schedule(previous: Any) -> Any:
            from mindspeed.pipeline.schedule.megatron import scheduled

            return scheduled(previous, **changes)

        divide_backward(seams, self.name, _host_check(megatron))
        seams.schedule.add(schedule, owner=self.name)


def _host_check(megatron: Megatron) -> Callable[[int, int], None]:
    """Refuse stashes that exceed host memory.

    Rank r keeps those of 2 r backwards there, of r without model chunks.
    """
    from mindspeed.memory.host_pool import HostLimit, ranks_of_host

    ranks = megatron.get("pipeline_model_parallel_size") or 1
    each = 2 if plans.chunks_of(megatron) > 1 else 1

    def check(stage: int, nbytes: int) -> None:
        HostLimit(
            _SWAP,
            lambda: each * (stage % ranks),
            ranks_of_host(),
            unit="backwards whose weight gradients wait",
            remedy=f"remove {_SWAP} and bound memory with --pipeline-memory-limit",
        ).check(nbytes)

    return check
