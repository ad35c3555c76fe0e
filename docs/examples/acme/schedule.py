"""``--acme-gpipe``: all forward passes of a step, then all backward passes (GPipe, 2019)."""

from mindspeed.features.feature import Feature, Problem
from mindspeed.flags import flag


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


class GPipe(
    Feature,
    name="acme-gpipe",
    level=2,
    seams=("schedule",),
    conflicts=("nanopipe", "fold3d", "dualpipev"),
):
    """The pipeline schedule GPipe."""

    acme_gpipe: bool = flag(False, "all forward passes, then all backward passes")

    def problems(self, megatron):
        if megatron.get("pipeline_model_parallel_size", 1) == 1:
            yield Problem("--acme-gpipe", "there is one pipeline rank", "remove it")

    def attach(self, seams, megatron):
        def schedule(previous):
            from mindspeed.pipeline.schedule.megatron import scheduled

            return scheduled(previous, order=gpipe)

        seams.schedule.add(schedule, owner=self.name)
