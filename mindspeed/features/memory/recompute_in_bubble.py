"""``--recompute-in-bubble``: interleaved 1F1B that stores no more than 1F1B without chunks.

With v model chunks on each of p ranks the first rank stores up to 2 (p - 1) + (v - 1) p + 1 chunks.
Here no rank stores more than p v: the rest is recomputed, while the rank would be idle wherever
that is possible (:mod:`mindspeed.pipeline.schedule.recompute`). With m = 2 p micro-batches this
takes no time; the more there are, the less of it hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.memory import scheduled_recomputation as shared
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

_FLAG = "--recompute-in-bubble"


class RecomputeInBubble(
    Feature,
    level=2,
    megatron_versions=">=0.15",
    seams=("chunk", "schedule"),
    excludes=shared.EXCLUDES,
    after=("pipeline-schedule", "nanopipe"),
    planning=("changes layers", "needs steps"),
):
    """What interleaved schedules store in excess is recomputed while ranks are idle."""

    recompute_in_bubble: bool = flag(
        False, "recompute what interleaving stores in excess while the pipeline is idle"
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        chunks = "in-bubble recomputation reorders them"
        yield from shared.problems_of(_FLAG, "bubble", megatron, chunks=chunks)
        if granularity := megatron.get("recompute_granularity"):
            yield conflict(
                _FLAG,
                f"--recompute-granularity {granularity}",
                "it chooses by itself what is recomputed",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        shared.attach_recomputation(seams, self.name, _FLAG, megatron, "bubble", None)
