"""``--acme-gpipe``: all forward passes of a step, then all backward passes (GPipe, 2019)."""

from dataclasses import dataclass

from mindspeed.features.feature import Feature, Problem
from mindspeed.flags import flag


@dataclass(frozen=True)
class Options:
    acme_gpipe: bool = flag(False, "all forward passes, then all backward passes")


def gpipe(placement, num_microbatches):
    """The row of each rank: its chunks down, for all micro-batches, and up again."""
    from mindspeed.pipeline.schedule.actions import BACKWARD, FORWARD, Action

    return tuple(
        (
            *(Action(FORWARD, stage, i) for stage in stages for i in range(num_microbatches)),
            *(
                Action(BACKWARD, stage, i)
                for stage in stages[::-1]
                for i in range(num_microbatches)
            ),
        )
        for stages in placement.stages
    )


def validate(options, megatron):
    if megatron.get("pipeline_model_parallel_size", 1) > 1:
        return []
    return [Problem("--acme-gpipe", "there is one pipeline rank", "remove it")]


def attach(seams, options, megatron):
    def schedule(previous):
        from mindspeed.pipeline.schedule.megatron import scheduled

        return scheduled(previous, order=gpipe)

    seams.schedule.add(schedule, owner="acme-gpipe")


FEATURE = Feature(
    name="acme-gpipe",
    summary="the pipeline schedule GPipe",
    level=2,
    options=Options,
    enabled=lambda options, megatron: options.acme_gpipe,
    validate=validate,
    attach=attach,
    seams=("schedule",),
    conflicts=("nanopipe", "fold3d", "dualpipev"),
)
