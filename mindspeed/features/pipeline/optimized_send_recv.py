"""Pipeline messages in two directions at once: ``--optimize-send-recv-comm``, and with chunks.

Megatron's schedules send and receive in one process group, where messages of one direction wait for
those of the other. With ``--optimize-send-recv-comm``, or ``--optimize-vpp-send-recv-comm`` where a
rank has several model chunks, the same order runs over a group for each direction, and receives are
posted ahead of their use (:mod:`mindspeed.pipeline.schedule.channel`). Results stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.pipeline import plans as shared
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

_PLAIN, _CHUNKS = "--optimize-send-recv-comm", "--optimize-vpp-send-recv-comm"


class OptimizedSendRecv(
    Feature, level=2, megatron_versions=">=0.15", seams=("schedule",), excludes=shared.EXCLUDES
):
    """Pipeline messages of both directions at once, receives posted early."""

    optimize_send_recv_comm: bool = flag(
        False, "pipeline messages of both directions at once, receives posted early"
    )
    optimize_vpp_send_recv_comm: bool = flag(
        False, "the same where pipeline ranks have several model chunks"
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name = _PLAIN if self.optimize_send_recv_comm else _CHUNKS
        problems = list(shared.problems_of(name, megatron))
        yield from problems
        if problems:
            return
        chunks = shared.chunks_of(megatron)
        if self.optimize_send_recv_comm and chunks > 1:
            yield Problem(
                _PLAIN, f"is for one model chunk on a rank, there are {chunks}", f"give {_CHUNKS}"
            )
        if self.optimize_vpp_send_recv_comm and chunks == 1:
            yield Problem(
                _CHUNKS,
                "is for several model chunks on a rank, there is one",
                f"give {_PLAIN}, or --num-layers-per-virtual-pipeline-stage",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        group = None
        if self.optimize_vpp_send_recv_comm:
            group = megatron.get("microbatch_group_size_per_vp_stage")

        def schedule(previous: Any) -> Any:
            from mindspeed.pipeline.schedule.megatron import ScheduledPipeline, scheduled

            if isinstance(previous, ScheduledPipeline):
                return previous  # every plan sends its messages in this way
            return scheduled(previous, group_size=group)

        seams.schedule.add(schedule, owner=self.name)
