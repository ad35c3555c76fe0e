"""Dynamic pipeline parallelism (DPP): ``--optimized-pipeline``, ``--manual-mbs``.

The first and last micro-batches of a step are smaller and those between larger, so the pipeline
fills and drains sooner (:mod:`mindspeed.pipeline.schedule.micro_batch_sizes`). A step has the same
samples, and as many micro-batches, as with equal sizes; losses and gradients are the same.

``--manual-mbs`` gives the sizes, otherwise the simulator of schedules chooses them
(:mod:`mindspeed.pipeline.schedule.size_search`). Peak memory grows by a quarter or so:
``--pipeline-memory-limit`` bounds it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.pipeline import plans as shared
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

logger = logging.getLogger("mindspeed")
_COUNT = "the number of micro-batches must not change"


class DynamicPipeline(
    Feature,
    level=2,
    megatron_versions=">=0.15",
    seams=("schedule", "batch"),
    excludes={
        **shared.EXCLUDES,
        "rampup_batch_size": _COUNT,
        "decrease_batch_size_if_needed": _COUNT,
    },
    planning=("needs steps",),
):
    """Smaller micro-batches where the pipeline fills and drains."""

    optimized_pipeline: bool = flag(
        False, "smaller micro-batches at both ends of a step, where the pipeline fills and drains"
    )
    manual_mbs: str = flag(
        "", "sizes of the micro-batches of a step, such as 1,2,3,2, or example-config-1 or -2"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.optimized_pipeline or bool(self.manual_mbs)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name = "--optimized-pipeline"
        if not self.optimized_pipeline:
            yield Problem(
                "--manual-mbs", f"has no effect without {name}", f"add {name}, or remove it"
            )
            return
        problems = list(shared.problems_of(name, megatron))
        yield from problems
        if megatron.get("micro_batch_size") == 1 and not self.manual_mbs:
            yield Problem(
                name,
                "has no effect with --micro-batch-size 1, of which no sample can be taken away",
                "give --micro-batch-size 2 or more, or remove it",
            )
        from mindspeed.pipeline.schedule.micro_batch_sizes import step_shape

        if step_shape(megatron) is not None and not problems:
            try:
                sizes = self._sizes(megatron)
            except ConfigError as error:
                flag_name, _, message = str(error).partition(": ")
                yield Problem(flag_name, message)
                return
            from mindspeed.pipeline.schedule.schedules import ScheduleRequest

            if not megatron.get("pipeline_schedule"):  # it checks its own
                request = ScheduleRequest(sizes=sizes, memory_limit=_limit(megatron))
                if isinstance(found := shared.plan_of(name, megatron, request), Problem):
                    yield found

    def _sizes(self, megatron: Megatron) -> tuple[int, ...] | None:
        from mindspeed.pipeline.schedule.size_search import sizes_of_arguments

        own = {"optimized_pipeline": self.optimized_pipeline, "manual_mbs": self.manual_mbs}
        return sizes_of_arguments({**megatron, **own})

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        sizes = self._sizes(megatron)
        if sizes is not None and os.environ.get("RANK", "0") == "0":
            logger.info(
                "--optimized-pipeline: micro-batches of %s samples", ",".join(map(str, sizes))
            )

        def schedule(previous: Any) -> Any:
            from mindspeed.pipeline.schedule.megatron import scheduled

            return scheduled(previous, sizes=sizes)

        seams.schedule.add(schedule, owner=self.name)
        if (megatron.get("tensor_model_parallel_size") or 1) > 1:
            # Megatron-LM's reader sends tensors of --micro-batch-size samples to the other ranks;
            # with a function at this seam ours does, which sends their shape first.
            seams.batch.add(lambda batch: batch, owner=self.name)


def _limit(megatron: Megatron) -> float | None:
    """Value of ``--pipeline-memory-limit`` in micro-batches of ``--micro-batch-size``."""
    factor, ranks = megatron.get("pipeline_memory_limit"), megatron["pipeline_model_parallel_size"]
    return None if factor is None else shared.limit_of(factor, ranks, shared.chunks_of(megatron))
