"""Figures of a rank, spliced from the recordings that stand for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mindspeed.planner.compose.covering import Cover, turn_of
from mindspeed.planner.compose.held import held_by, revealed
from mindspeed.planner.compose.splice import Spliced, micro_batches, splice
from mindspeed.planner.compose.surroundings import (
    Around,
    Surroundings,
    Turn,
    messages_near,
    nothing_near,
    turns_of,
)
from mindspeed.planner.compose.templates import (
    Growth,
    Key,
    NotSpliceable,
    Template,
    Templates,
    freed_in,
    freeing,
    own_seconds,
    summed,
)
from mindspeed.planner.compose.words import Word
from mindspeed.planner.count.recording import (
    BUILT,
    OF_LAYERS,
    PER_LAYER,
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
    if cover.source is not None:
        recording_of = _as_real(cover.chunks or (cover.source,), recording_of)
    own = _recordings(cover, recording_of)
    first, base, *longer = own
    grown = _grown(cover, own)
    if built is not None and not shards_gradients:
        grown.replace_steps(built.blocks)
    grown.surroundings = cover.around_large
    grown.freed = cover.freed(first.row, freed_in(first))
    static = _between_steps(cover, own)
    if cover.source is not None:
        source = _recordings(cover.source, recording_of)
        alone = [_grown(one, _recordings(one, recording_of)).found for one in cover.chunks]
        found = {k._replace(chunk=at): x for at, one in enumerate(alone) for k, x in one.items()}
        _take_layers(grown, found or _grown(cover.source, source).found, cover)
        static.update(_kept(_between_steps(cover.source, source)))
        static.subtract(_kept(recording_of(cover.source.bare_point).static))

    def line(of: Callable[[Recording], float]) -> int:
        return _line(of, own, cover.means)

    shared: Sent = {}
    add(shared, first.shared)
    for one, mean in zip(longer, cover.means, strict=True):
        add(shared, one.shared, mean)
        add(shared, base.shared, -mean)
    if built is not None and not shards_gradients:
        static = _kept(static) + built.static
    elif built is not None and sum(static[kind] for kind in BUILT) != built.static.total():
        raise NotSpliceable("paddings of sharded gradients do not grow with layers")
    return RankTrace(
        static,
        line(lambda one: one.parameters),
        line(lambda one: one.host),
        splice(grown, cover.row, cover.whole, micro_batches(first.row)),
        shared,
    )


def _recordings(cover: Cover, recording_of: Lookup) -> list[Recording]:
    """Recordings of the points of a cover."""
    first = recording_of(cover.point)
    base = first if cover.base == cover.point else recording_of(cover.base)
    return [first, base, *(recording_of(one.point) for one in cover.longer)]


def _grown(cover: Cover, recordings: Sequence[Recording]) -> Templates:
    """Templates of the rank for which a cover stands, from those of its points."""
    first, base, *longer = recordings
    expected = (cover.words, cover.words, *(x.words for x in cover.longer))
    for one, words in zip((first, base, *longer), expected, strict=True):
        if one.layers != tuple(map(len, words)):
            raise NotSpliceable(f"chunks of {one.layers} layers instead of {words}")
    without = OF_LAYERS if cover.source is not None else ()

    def templates(one: Recording, words: Sequence[Word]) -> Templates:
        own = freed_in(one)
        freed: Surroundings = nothing_near
        if cover.has_pairs:
            freed = cover.around_small
        elif cover.around_small is not messages_near:
            freed = lambda row, action, part: own.get(action, ())  # noqa: E731
        return Templates.of(one, words, cover.around_small, cover.reach, without, freed)

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
    return own.grown(growths)


def _as_real(sources: Sequence[Cover], recording_of: Lookup) -> Lookup:
    """Recordings with what real layers hold in place of the bytes of bare ones.

    Args:
        sources: covers with real layers.
        recording_of: recordings of them, also with bare ones, and of others.

    Raises:
        NotSpliceable: real layers keep something else between actions, or differ.
    """
    held = {held_by(recording_of(one.point), recording_of(one.bare_point)) for one in sources}
    if len(held) > 1:
        raise NotSpliceable("layers of different chunks keep different bytes between actions")

    def found(point: Point) -> Recording:
        one = recording_of(point)
        return revealed(one, *held) if point.bare else one

    return found


def _take_layers(grown: Templates, real: Mapping[Key, Template], cover: Cover) -> None:
    """Take the blocks of actions whose layers are bare from real ones.

    Real layers free the messages that bare ones free in the same action: if no real action with
    this turn frees as many, the events of one that frees others are changed.

    Raises:
        NotSpliceable: they depend on more than their turn and messages.
    """
    other: dict[_Name, dict[Key, Template]] = {}
    layers: dict[_Name, dict[Around, dict[Key, Template]]] = {}
    for key, one in real.items():
        if key.part in OF_LAYERS:
            name = _name(key.op, key.chunk, key.turn or Turn(), cover)
            blocks = other.setdefault(name, {})
            if key.part in PER_LAYER:
                blocks = layers.setdefault(name, {}).setdefault(key.around, {})
            key = key._replace(turn=name[2], around=())
            if blocks.setdefault(key, one).deltas != one.deltas:
                raise NotSpliceable(f"{key}: depends on the action before")
    examples = {
        key._replace(turn=None, around=()): one for key, one in real.items() if one.messages
    }
    grown.reach = max(one.reach for one in (cover.source, *cover.chunks) if one is not None)
    for action, (place, turn) in enumerate(zip(cover.row, turns_of(cover.row), strict=True)):
        name = _name(place.op, place.chunk, turn, cover)
        for key, one in other.get(name, {}).items():
            grown.found[key._replace(turn=turn)] = one
        freed = grown.freed(cover.row, action, Part.LAYER)
        alike = layers.get(name, {})
        nearest = min(alike, key=lambda x: (x != freed, not x), default=())
        for key, one in alike.get(nearest, {}).items():
            target = key._replace(turn=turn, around=freed)
            if nearest != freed and target not in grown.found:
                one = freeing(one, freed, examples.get(key._replace(turn=None)))
            grown.found.setdefault(target, one)


_Name = tuple[str, int, Turn]
"""Op, chunk, and what layers depend on of a turn."""


def _name(op: str, chunk: int, turn: Turn, cover: Cover) -> _Name:
    return op, chunk, turn_of(op, turn, cover.whole[chunk])


def _kept(static: Counter[str]) -> Counter[str]:
    """Bytes between steps that micro-batches left."""
    return Counter({kind: n for kind, n in static.items() if kind not in BUILT})


def _between_steps(cover: Cover, recordings: Sequence[Recording]) -> Counter[str]:
    """Bytes between steps of the rank for which a cover stands, by kind."""
    kinds = dict.fromkeys(kind for one in recordings for kind in one.static)
    return Counter({kind: _line(partial(_static, kind), recordings, cover.means) for kind in kinds})


def _line(
    of: Callable[[Recording], float], found: Sequence[Recording], means: Sequence[float]
) -> int:
    """A figure that grows with the layers, from the recordings of a cover."""
    first, base, *longer = found
    pairs = zip(longer, means, strict=True)
    return round(of(first) + sum((of(x) - of(base)) * mean for x, mean in pairs))


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
