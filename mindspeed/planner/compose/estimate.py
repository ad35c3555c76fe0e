"""Estimate a rank with several chunks from recordings of its layers only, for a search.

    estimate(cover, trace)      # a RankTrace

Each chunk is traced as the stage of a 1F1B pipeline. What a micro-batch keeps from its forward to
its backward, and what an action needs beyond that, are those of its chunk there; the messages that
lie between the actions of the real row are not known, some per mille of the bytes. Seconds of
actions are those of an exact trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from mindspeed.planner.compose.covering import Cover, Row
from mindspeed.planner.compose.rank import RankTrace
from mindspeed.planner.compose.splice import Spliced, micro_batches
from mindspeed.planner.count.recording import Sent, add


@dataclass(frozen=True)
class _Needs:
    """Bytes of a chunk beyond those between steps.

    Attributes:
        kept: what a micro-batch keeps from forward to backward.
        most: most bytes of an action by its op, beyond what micro-batches in flight keep.
    """

    kept: int
    most: dict[str, int]

    @classmethod
    def of(cls, row: Row, step: Spliced) -> _Needs:
        """Read them from a step of 1F1B."""
        levels = zip(row, step.after, strict=True)
        pairs = [(a.op + b.op, abs(y - x)) for (a, x), (b, y) in pairwise(levels)]
        forwards = [change for ops, change in pairs if ops == "FF"]
        kept = min(forwards or (change for _, change in pairs))
        most, alive = dict[str, int](), 0
        for place, top in zip(row, step.tops, strict=True):
            most[place.op] = max(most.get(place.op, 0), top - alive * kept)
            alive += 1 if place.op == "F" else -1
        return cls(kept, most)


def estimate(cover: Cover, trace: Callable[[Cover], RankTrace]) -> RankTrace:
    """Estimate the rank for which a cover stands; ``trace`` traces its chunks."""
    chunks = list(map(trace, cover.chunks))
    needs = [_Needs.of(of.row, one.step) for of, one in zip(cover.chunks, chunks, strict=True)]
    alive = most = 0
    for place in cover.row:
        own = needs[place.chunk]
        most = max(most, alive + own.most[place.op])
        alive += own.kept if place.op == "F" else -own.kept
    step, static, shared = Spliced(), Counter[str](), Sent()
    step.peak = max(most, sum(one.step.closing_top for one in chunks))
    step.closing = chunks[-1].step.closing
    uses = Counter(place[:2] for place in cover.row)
    for chunk, (of, one) in enumerate(zip(cover.chunks, chunks, strict=True)):
        static += one.static
        add(shared, one.shared)
        times = uses["F", chunk] / micro_batches(of.row)
        add(step.sent, {name: x for name, x in one.step.sent.items() if not name.shared}, times)
        step.seconds |= {(op, chunk): seconds for (op, _), seconds in one.step.seconds.items()}
        step.flops += round(one.step.flops * times)
        step.closing_seconds += one.step.closing_seconds
    parameters = sum(one.parameters for one in chunks)
    return RankTrace(static, parameters, sum(one.host for one in chunks), step, shared)
