"""Recomputation of whole layers where a pipeline schedule says so, not where backward asks for it.

The plan of a chunk names the layers that may be recomputed. A schedule decides micro-batch by
micro-batch whether they are, and when:

    recomputation = ScheduledRecomputation(runtime)
    with recomputation.stored(): ...            F: layers keep what backward needs
    with recomputation.dropped(3): ...          Fc: layers keep their inputs
    recomputation.recompute(3)                  R: everything that backward needs is there again

What the plan says about other sites holds in stored micro-batches. A dropped micro-batch that no
``R`` reached is recomputed in backward, layer by layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mindspeed.memory.plan import LAYER, ChunkPlan, SiteAction
from mindspeed.memory.runtime import Runtime


class ScheduledRecomputation:
    """The layers of one model chunk.

    Args:
        runtime: executes the chunk's plan; layers whose site ``layer`` has the action ``recompute``
            follow the schedule.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @contextlib.contextmanager
    def stored(self) -> Iterator[None]:
        """The forwards of the block store whole layers."""
        runtime, plan = self._runtime, self._runtime.plan
        runtime.plan = _without_layers(plan)
        try:
            yield
        finally:
            runtime.plan = plan

    @contextlib.contextmanager
    def dropped(self, microbatch: Any) -> Iterator[None]:
        """The forwards of the block drop whole layers."""
        with self._runtime.microbatch(microbatch):
            yield

    def recompute(self, microbatch: Any) -> None:
        """Compute what the forwards of :meth:`dropped` did not keep, in their order.

        Random numbers, and what forwards count beside their outputs, are as in the first run.
        """
        for segment in self._runtime.pending(microbatch):
            segment.materialize()


def _without_layers(plan: ChunkPlan) -> ChunkPlan:
    return ChunkPlan(
        {
            layer: {
                site: action
                for site, action in sites.items()
                if (site, action) != (LAYER, SiteAction.RECOMPUTE)
            }
            for layer, sites in plan.layers.items()
        }
    )
