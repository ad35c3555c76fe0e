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
    Key,
    NotSpliceable,
    Template,
    Templates,
    Turn,
    own_seconds,
    summed,
    turns_of,
)
from mindspeed.planner.compose.words import Word
from mindspeed.planner.count.recording import (
    BUILT,
    OF_LAYERS,
    PER_STEP,
    Part,
    Point,
    Recording,
    Sent,
    add,
)


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


Lookup = Callable[[Point], Recording]
"""The recording of a point."""


def trace(
    cover: Cover,
    recording_of: Lookup,
    built: Recording | None = None,
    shards_gradients: bool = False,
) -> RankTrace:
    """The figures of the rank for which a cover stands.

    Args:
        cover: the cover.
        recording_of: recordings of its points.
        built: the rank without a forward, where what it has between steps does not grow with
            layers.
        shards_gradients: its optimizer's step needs the gradients of a backward, so ``built`` only
            says whether what it has between steps grows with layers.

    Raises:
        NotSpliceable: blocks do not repeat.
    """
    first, base, *longer = map(recording_of, cover.points)
    grown, growths = _grown(cover, recording_of)
    if built is not None and not shards_gradients:
        grown.replace_steps(built.blocks)
    grown.surroundings = cover.around_large
    kept = _take_layers(grown, cover, recording_of) if cover.sources else Counter[str]()

    def line(of: Callable[[Recording], float]) -> int:
        pairs = zip(longer, growths, strict=True)
        return round(of(first) + sum((of(x) - of(base)) * growth.mean for x, growth in pairs))

    shared: Sent = {}
    add(shared, first.shared)
    for one, growth in zip(longer, growths, strict=True):
        add(shared, one.shared, growth.mean)
        add(shared, base.shared, -growth.mean)
    kinds = dict.fromkeys(kind for one in (first, base, *longer) for kind in one.static)
    static = Counter({kind: line(partial(_static, kind)) for kind in kinds})
    if built is not None and not shards_gradients:
        static = _kept(static) + built.static
    elif built is not None and sum(static[kind] for kind in BUILT) != built.static.total():
        raise NotSpliceable("paddings of sharded gradients do not grow with layers")
    return RankTrace(
        static + kept,
        line(lambda one: one.parameters),
        line(lambda one: one.host),
        splice(grown, cover.row, cover.whole, micro_batches(first.row)),
        shared,
    )


def _grown(cover: Cover, recording_of: Lookup) -> tuple[Templates, list[Growth]]:
    """Templates of the rank for which a cover stands, and how they grow with layers."""
    first, base, *longer = map(recording_of, cover.points)
    expected = (cover.words, cover.words, *(x.words for x in cover.longer))
    for one, words in zip((first, base, *longer), expected, strict=True):
        if one.layers != tuple(map(len, words)):
            raise NotSpliceable(f"chunks of {one.layers} layers instead of {words}")
    without = OF_LAYERS if cover.sources else ()

    def templates(one: Recording, words: Sequence[Word]) -> Templates:
        return Templates.of(one, words, cover.around_small, cover.reach, without)

    own = templates(first, cover.words)
    shorter = own if base is first else templates(base, cover.words)
    if cover.middle is not None:
        own.check_repeats(cover.middle.start, cover.middle.period)
    growths = [
        Growth(
            shorter,
            templates(one, cover_of.words),
            tuple(times.get(cover_of.unit, 0) for times in cover.times),
            cover_of.chunks,
        )
        for one, cover_of in zip(longer, cover.longer, strict=True)
    ]
    return own.grown(growths), growths


def _take_layers(grown: Templates, cover: Cover, recording_of: Lookup) -> Counter[str]:
    """Take the blocks of actions whose layers are bare from real ones.

    Returns:
        bytes that real layers keep between steps, by kind.

    Raises:
        NotSpliceable: real ones keep something between actions.
    """
    sources, found = [], list[Counter[str]]()
    for of in cover.distinct_sources:
        real, bare = recording_of(of.point), recording_of(replace(of.point, bare=True))
        if _between_actions(real) != _between_actions(bare):
            raise NotSpliceable("layers keep bytes between actions")
        longer = [recording_of(one.point) for one in of.longer]
        found += [_kept(one.static) - _kept(bare.static) for one in (real, *longer)]
        sources.append((of.point, _grown(of, recording_of)[0].found))
    if any(one != found[0] for one in found):
        raise NotSpliceable("layers keep bytes between steps, other ones in other chunks")
    turns = {(*place[:2], turn) for place, turn in zip(cover.row, turns_of(cover.row), strict=True)}
    for chunk, (source, index) in enumerate(cover.sources):
        layers = next(one for point, one in sources if point == source.point)
        grown.reach = source.reach
        first_known: dict[Key, Template] = {}
        for key, one in layers.items():
            if key.part in OF_LAYERS and key.chunk == index:
                key = key._replace(chunk=chunk, turn=_alone(key.turn))
                if first_known.setdefault(key, one).deltas != one.deltas:
                    raise NotSpliceable(f"{key}: depends on the action before")
        for key, one in first_known.items():
            for op, owner, turn in turns:
                if (op, owner, _alone(turn)) == (key.op, chunk, key.turn):
                    grown.found[key._replace(turn=turn)] = one
    return found[0]


def _kept(static: Counter[str]) -> Counter[str]:
    """Bytes between steps that micro-batches left."""
    return Counter({kind: n for kind, n in static.items() if kind not in BUILT})


def _alone(turn: Turn | None) -> Turn:
    """A turn without the action before."""
    return (turn or Turn())._replace(after="")


def _between_actions(recording: Recording) -> list[tuple[int, Part, list[int]]]:
    """Bytes of messages, and of what is left by the step before."""
    parts = (Part.HEAD, Part.OPEN, Part.PRE, Part.GAP)
    return [(x.action, x.part, x.deltas) for x in recording.blocks if x.part in parts]


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
