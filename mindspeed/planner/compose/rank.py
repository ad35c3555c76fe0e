"""Figures of a rank, spliced from the recordings that stand for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mindspeed.planner.compose.covering import Cover
from mindspeed.planner.compose.splice import Spliced, micro_batches, splice
from mindspeed.planner.compose.templates import (
    Growth,
    NotSpliceable,
    Templates,
    own_seconds,
    summed,
)
from mindspeed.planner.count.recording import BUILT, PER_STEP, Recording, Sent, add


@dataclass(frozen=True)
class RankTrace:
    """A rank.

    Attributes:
        static: bytes between steps, by kind.
        parameters: parameters on the rank.
        host: bytes of host memory between steps.
        step: its step.
        shared: communications of data-parallel ranks in a step.
    """

    static: Counter[str]
    parameters: int
    host: int
    step: Spliced
    shared: Sent

    @property
    def peak(self) -> int:
        """Most bytes alive."""
        return self.static.total() + self.step.peak

    @property
    def at_peak(self) -> Counter[str]:
        """These, by kind."""
        return Counter({k: n for k, n in (Counter(self.static) + self.step.at_peak).items() if n})


def trace(
    cover: Cover, recordings: Sequence[Recording], built: Recording | None = None
) -> RankTrace:
    """The figures of the rank for which a cover stands.

    Args:
        cover: the cover.
        recordings: recordings of its point, its base, and the longer ones.
        built: the rank without a forward, where what it has between steps does not grow with
            layers.

    Raises:
        NotSpliceable: blocks do not repeat.
    """
    first, base, *longer = recordings
    expected = (cover.words, cover.words, *(x.words for x in cover.longer))
    for one, words in zip(recordings, expected, strict=True):
        if one.layers != tuple(map(len, words)):
            raise NotSpliceable(f"chunks of {one.layers} layers instead of {words}")
    own = Templates.of(first, cover.words, cover.around_small, cover.reach)
    shorter = own
    if base is not first:
        shorter = Templates.of(base, cover.words, cover.around_small, cover.reach)
    if cover.middle is not None:
        own.check_repeats(cover.middle.start, cover.middle.period)
    growths = [
        Growth(
            shorter,
            Templates.of(one, cover_of.words, cover.around_small, cover.reach),
            tuple(times.get(cover_of.unit, 0) for times in cover.times),
            cover_of.chunks,
        )
        for one, cover_of in zip(longer, cover.longer, strict=True)
    ]
    grown = own.grown(growths)
    if built is not None:
        grown.replace_steps(built.blocks)
    grown.surroundings = cover.around_large

    def line(of: Callable[[Recording], float]) -> int:
        pairs = zip(longer, growths, strict=True)
        return round(of(first) + sum((of(x) - of(base)) * growth.mean for x, growth in pairs))

    shared: Sent = {}
    add(shared, first.shared)
    for one, growth in zip(longer, growths, strict=True):
        add(shared, one.shared, growth.mean)
        add(shared, base.shared, -growth.mean)
    kinds = {kind for one in recordings for kind in one.static}
    static = Counter({kind: line(partial(_static, kind)) for kind in kinds})
    if built is not None:
        kept = {kind: n for kind, n in static.items() if kind not in BUILT}
        static = Counter(kept) + built.static
    return RankTrace(
        static,
        line(lambda one: one.parameters),
        line(lambda one: one.host),
        splice(grown, cover.row, cover.whole, micro_batches(first.row)),
        shared,
    )


def with_replicas(one: Recording, few: Recording, more: Recording, times: float) -> Recording:
    """A recording with another number of data-parallel ranks, that shards are divided by.

    Args:
        one: the recording.
        few: a rank with the same layers and as many data-parallel ranks.
        more: the same with more of them, without a forward.
        times: how much of the difference of the two there is.
    """
    static = Counter(one.static)
    for kind in BUILT:
        static[kind] += round((more.static[kind] - few.static[kind]) * times)
    before = {block.part: block for block in few.blocks if block.part in PER_STEP}
    grows = {block.part: (before[block.part], block) for block in more.blocks}
    blocks = []
    for block in one.blocks:
        if (pair := grows.get(block.part)) is not None:
            deltas, kinds = summed(block, [(*pair, times)])
            seconds = block.seconds + (own_seconds(pair[1]) - own_seconds(pair[0])) * times
            block = replace(block, deltas=list(deltas), kinds=list(kinds), seconds=seconds)
        blocks.append(block)
    return replace(one, blocks=tuple(blocks), static=+static)


def _static(kind: str, recording: Recording) -> int:
    return recording.static[kind]
