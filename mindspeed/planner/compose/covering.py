"""Small jobs whose recordings stand for the ranks of a large one.

    for cover in covering(layout, shape, ranks):
        cover.point, cover.words        # the small rank to record, and its layers
        cover.base, cover.longer        # one with these layers, and with a unit of them once more

The small job has the tensor, context, expert and data parallel sizes of the large one, its
precision and its flags. It has fewer layers, with all neighbourhoods of the large one. In 1F1B and
in the interleaved schedule it has fewer pipeline ranks and micro-batches, with all surroundings of
an action that the large one has. Messages of other schedules live as long as their rows say: the
small job has the same ranks, and as many micro-batches as repeat. Except in 1F1B its layers are
bare (:mod:`mindspeed.planner.count.bare`), and real ones are recorded in pipelines of few ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Any

from mindspeed.pipeline.schedule.schedules import ScheduleRequest
from mindspeed.planner.compose.short_rows import (
    Middle,
    Size,
    fewest,
    has_all,
    is_interleaved,
    repeating,
    request_of_ranks,
    seen_in_1f1b,
)
from mindspeed.planner.compose.surroundings import (
    Around,
    NearInRow,
    Surroundings,
    Turn,
    messages_near,
    nothing_near,
    place_in_row,
    seen_near,
    turns_of,
)
from mindspeed.planner.compose.templates import NotSpliceable
from mindspeed.planner.compose.words import Layer, Word, shortened, shortened_alike
from mindspeed.planner.count.recording import Part, Point, Row, row_of
from mindspeed.planner.layout import Layout
from mindspeed.planner.shape import DENSE, EXPERT, NOOP, RECOMPUTED, Shape

PREDICTION = "prediction"
"""Kind of a layer of multi-token prediction, which comes after those of the last stage."""


@dataclass(frozen=True)
class Longer:
    """A small rank with a unit of layers once more.

    Attributes:
        unit: the unit.
        point: rank to record.
        words: layers of its chunks.
        chunks: how many of its chunks have the unit once more.
    """

    unit: Word
    point: Point
    words: tuple[Word, ...]
    chunks: int


@dataclass(frozen=True)
class Cover:
    """Recordings that stand for a rank.

    Attributes:
        point: the small rank.
        words: layers of its chunks.
        times: how often each unit was left out of each chunk.
        base: a rank with these layers, which others have as well: middle ranks of a pipeline grow
            alike.
        longer: for each unit the base with the unit once more.
        row: actions of the large rank.
        whole: layers of its chunks.
        around_small: surroundings of actions of the small rank.
        around_large: those of the large rank, in terms of the small one.
        reach: neighbours of a layer on either side that matter.
        middle: what the large row repeats more often than the small one.
        source: short pipeline with real layers, if the rank is recorded with bare ones.
        chunks: pipelines of each chunk alone, of which layers are taken instead; ``source`` then
            only shows what there is between steps.
    """

    point: Point
    words: tuple[Word, ...]
    times: tuple[dict[Word, int], ...]
    base: Point
    longer: tuple[Longer, ...]
    row: Row
    whole: tuple[Word, ...]
    around_small: Surroundings
    around_large: Surroundings
    reach: int
    middle: Middle | None = None
    source: Cover | None = None
    chunks: tuple[Cover, ...] = ()

    def freed(self, recorded: Row, messages: Mapping[int, Around]) -> Surroundings:
        """What layers of an action of the large row free of messages.

        Args:
            recorded: the row that was recorded.
            messages: what layers of its actions free.

        Raises:
            NotSpliceable: actions with equal surroundings free others.
        """
        if self.around_large is messages_near:
            return nothing_near
        if self.has_pairs:
            return self.around_large
        known: dict[Around, Around] = {}
        for action in range(len(recorded)):
            own = messages.get(action, ())
            if known.setdefault(self.around_small(recorded, action, Part.GAP), own) != own:
                raise NotSpliceable(f"action {action} frees other messages than others like it")
        return lambda row, action, part: known.get(self.around_large(row, action, Part.GAP), ())

    @property
    def has_pairs(self) -> bool:
        """Whether layers run beside those of other micro-batches: they depend on their place."""
        return any(place.paired for place in self.row)

    @property
    def bare_point(self) -> Point:
        """The small rank with bare layers."""
        return replace(self.point, bare=True)

    @property
    def means(self) -> list[float]:
        """How often figures of the whole rank grow by each unit."""
        return [sum(t.get(one.unit, 0) for t in self.times) / one.chunks for one in self.longer]

    @property
    def points(self) -> list[Point]:
        """Ranks to record, without those of sources."""
        return [self.point, self.base, *(one.point for one in self.longer)]

    def between_steps(self) -> Cover:
        """The cover of which no step is recorded."""
        longer = tuple(replace(x, point=replace(x.point, step=False)) for x in self.longer)
        own, base = (replace(one, step=False) for one in (self.point, self.base))
        return replace(self, point=own, base=base, longer=longer)

    def with_bare_growth(self) -> Cover:
        """The cover whose growth with layers is recorded with bare ones.

        What grows outside of layers does so by their parameters, which bare layers have.
        """
        chunks = tuple(one.with_bare_growth() for one in self.chunks)
        if not self.longer:
            return replace(self, chunks=chunks)
        longer = tuple(replace(x, point=replace(x.point, bare=True)) for x in self.longer)
        base = replace(self.base, bare=True)
        return replace(self, base=base, longer=longer, chunks=chunks)


class Layers(Enum):
    """Place where the layers of a rank that does not run 1F1B are recorded."""

    IN_ROW = "in its row"
    SHORT = "in short pipelines; the row with bare ones"
    ALONE = "each chunk alone, for an estimate"


def words_of(shape: Shape, stage: int) -> Word:
    """The layers of a stage that compute anything."""
    real = [kind for kind in shape.stages[stage] if kind != NOOP]
    group, last = shape.recomputed_together, stage == len(shape.stages) - 1
    word = []
    for index, kind in enumerate(real):
        if kind.endswith(RECOMPUTED):
            word.append(Layer(kind.removesuffix(RECOMPUTED), 0, 1))
        elif group:
            first = index - index % group
            word.append(Layer(kind, index % group, min(group, len(real) - first)))
        else:
            word.append(Layer(kind))
    extra = Layer(PREDICTION, 0, 1 if shape.recomputes_all else 0)
    return (*word, *[extra] * (shape.predictions if last else 0))


def covering(
    layout: Layout,
    shape: Shape,
    ranks: Sequence[int],
    reach: int = 1,
    layers: Layers = Layers.SHORT,
) -> list[Cover]:
    """The recordings that stand for ranks of a job.

    Args:
        layout: layout of the job.
        shape: its shape.
        ranks: the pipeline ranks.
        reach: neighbours of a layer on either side that matter.
        layers: where layers are recorded.

    Raises:
        NotSpliceable: none does.
    """
    if is_plain(layout, shape):
        sizes = _sizes(shape, ranks, seen_in_1f1b)
        covers = [_of_1f1b(layout, shape, rank, reach, sizes[rank]) for rank in ranks]
    else:
        short = layers is Layers.SHORT and is_interleaved(shape)
        sizes = _sizes(shape, ranks, seen_near, True) if short else dict.fromkeys(ranks)
        covers = [_of_row(layout, shape, rank, reach, layers, sizes[rank]) for rank in ranks]
    shortest: dict[object, Cover] = {}
    for rank, cover in zip(ranks, covers, strict=True):
        known = shortest.setdefault(_growth_of(cover, rank, shape), cover)
        if _samples(cover) < _samples(known):
            shortest[_growth_of(cover, rank, shape)] = cover
    return [
        replace(cover, base=one.base, longer=one.longer)
        for rank, cover in zip(ranks, covers, strict=True)
        for one in (shortest[_growth_of(cover, rank, shape)],)
    ]


def _growth_of(cover: Cover, rank: int, shape: Shape) -> object:
    """Equal for ranks that grow alike with layers."""
    units = frozenset(one.unit for one in cover.longer)
    between = cover.source is not None and any(map(_keeps_graph, cover.whole))
    own = rank if between else None  # what lies between its actions grows, too
    return rank == 0, rank == shape.ranks - 1, cover.words, units, own


def _samples(cover: Cover) -> int:
    """Samples of the step that is recorded."""
    found: int = cover.point.overrides["global_batch_size"]
    return found


def is_plain(layout: Layout, shape: Shape) -> bool:
    """Whether ranks have one chunk and run 1F1B, or there is no pipeline."""
    return shape.chunks == 1 and layout.schedule is None


def _sizes(
    shape: Shape, ranks: Sequence[int], seen: Callable[[Row], set[Any]], interleaved: bool = False
) -> dict[int, Size | None]:
    """Sizes that cover ranks; those of one rank cover others with the same layers, too."""
    found: dict[int, Size | None] = {}
    known: dict[object, list[Size]] = {}
    for rank in sorted(ranks):  # the first of the middle needs most
        row, words = _row_and_words(shape, rank)
        ends, wanted = (rank == 0, rank == shape.ranks - 1), seen(row)
        alike = known.setdefault((ends, words), [])
        own = next((one for one in alike if has_all(shape, one, wanted, seen)), None)
        if own is None and (own := fewest(shape, wanted, seen, *ends, interleaved)) is not None:
            alike.append(own)
        found[rank] = own
    return found


def _of_1f1b(layout: Layout, shape: Shape, rank: int, reach: int, size: Size | None) -> Cover:
    row, whole = _row_and_words(shape, rank)
    size = size or (shape.ranks, rank, shape.micro_batches)
    return _cover(layout, shape, size, whole, reach)(row, messages_near, messages_near)


def _of_row(
    layout: Layout, shape: Shape, rank: int, reach: int, layers: Layers, size: Size | None
) -> Cover:
    row, whole = _row_and_words(shape, rank)
    ends, near = (rank == 0, rank == shape.ranks - 1), NearInRow()
    middle, small, large = None, _between(near), _between(near)
    if size is None:
        count, middle = repeating(shape, row, rank, reach)
        size = shape.ranks, rank, count
        small = _between(place_in_row)
        large = small if middle is None else _between(middle.around)
    if layers is Layers.IN_ROW:
        real = _cover(layout, shape, size, whole, reach)
        return real(row, place_in_row, middle.around if middle else place_in_row, middle)
    near_layers = 0 if any(len(word) > 2 for word in whole) else 1  # two layers need no growth
    cover = _cover(layout, shape, size, whole, near_layers, bare=True)(row, small, large, middle)
    alone: tuple[Cover, ...] = ()
    if layers is Layers.ALONE or (is_interleaved(shape) and not any(map(_keeps_graph, whole))):
        alone = _alone(layout, shape, rank, reach, row, whole, layers is Layers.SHORT)
    if layers is Layers.ALONE:
        return replace(cover, chunks=alone)
    source = _source(layout, shape, reach, () if alone else row, whole, *ends)
    return replace(cover, source=source.between_steps() if alone else source, chunks=alone)


def _row_and_words(shape: Shape, rank: int) -> tuple[Row, tuple[Word, ...]]:
    stages = shape.placement.stages[rank]
    row = row_of(shape.request, shape.ranks, shape.chunks, shape.micro_batches, rank)
    return row, tuple(words_of(shape, stage) for stage in stages)


def _between(around: Surroundings) -> Surroundings:
    """Surroundings of blocks that handle messages; others do not depend on them."""
    return lambda row, action, part: (
        around(row, action, part) if part in (Part.GAP, Part.PRE) else ()
    )


def _alone(
    layout: Layout,
    shape: Shape,
    rank: int,
    reach: int,
    row: Row,
    whole: tuple[Word, ...],
    exact: bool,
) -> tuple[Cover, ...]:
    """Covers of the chunks of a rank, each as a stage of 1F1B."""
    count, found = len(shape.stages), []
    single = replace(shape, chunks=1, ranks=count, request=ScheduleRequest())
    for chunk, stage in enumerate(shape.placement.stages[rank]):
        own = tuple(place._replace(chunk=0) for place in row if place.chunk == chunk)
        ends = stage == 0, stage == count - 1
        word = (whole[chunk],)
        found.append(_source(replace(layout, vpp=1), single, reach, own, word, *ends, exact))
    return tuple(found)


def _source(
    layout: Layout,
    shape: Shape,
    reach: int,
    row: Row,
    whole: tuple[Word, ...],
    first: bool,
    last: bool,
    exact: bool = True,
) -> Cover:
    """The cover with layers that have all turns of a row; those of dense layers for an estimate."""
    words = whole if exact else [()] * len(whole)

    def seen(row: Row) -> set[tuple[str, int, Turn]]:
        turns = zip(row, turns_of(row), strict=True)
        return {(op, chunk, turn_of(op, turn, words[chunk])) for (op, chunk, *_), turn in turns}

    size = fewest(shape, seen(row), seen, first, last)
    if size is None:
        raise NotSpliceable("no short pipeline has all turns of the actions")
    ranks, rank, count = size
    row = row_of(request_of_ranks(shape, ranks), ranks, shape.chunks, count, rank)
    around = _between(place_in_row)
    return _cover(layout, shape, size, whole, reach)(row, around, around)


def turn_of(op: str, turn: Turn, word: Word) -> Turn:
    """What of a turn the layers of a chunk depend on.

    Those of experts keep the graph of the last forward, or what the last recomputation has left;
    dense ones do not depend on the action before.
    """
    if all(layer.kind == DENSE for layer in word):
        return turn._replace(after="", latest="")
    turn = turn._replace(last=turn.last and op != "F")
    if not _keeps_graph(word):
        return turn._replace(latest="")
    return turn if any(layer.group for layer in word) else turn._replace(after="")


def _keeps_graph(word: Word) -> bool:
    """Whether layers have the graph of a micro-batch after its forward, as those of experts."""
    return any(layer.kind != DENSE and not layer.group for layer in word)


def _cover(
    layout: Layout,
    shape: Shape,
    size: tuple[int, int, int],
    whole: tuple[Word, ...],
    reach: int,
    bare: bool = False,
) -> Callable[..., Cover]:
    """The cover of a rank whose chunks have these layers, but for its row.

    Args:
        layout: layout of the job.
        shape: its shape.
        size: ranks of the small pipeline, rank, micro-batches.
        whole: layers of the chunks of the large rank.
        reach: neighbours of a layer that matter.
        bare: whether layers are bare.
    """
    ranks, rank, count = size

    def point(words: Sequence[Word]) -> Point:
        return replace(_point(layout, shape, ranks, count, rank, words), bare=bare)

    if shape.request.pairs:
        beside = product(range(len(whole)), repeat=2)
        pairs = [(a, b) for a, b in beside if a != b or shape.placement.loops]
        found = shortened_alike(whole, reach, pairs)
    else:
        found = [shortened(word, reach) for word in whole]
    words = tuple(one.word for one in found)
    units = dict.fromkeys(unit for one in found for unit in one.units)
    longer = []
    for unit in units:
        more = tuple(one.longer.get(unit, word) for one, word in zip(found, words, strict=True))
        chunks = sum(unit in one.units for one in found)
        longer.append(Longer(unit, point(more), more, chunks))
    times = tuple(dict(one.units) for one in found)
    own = point(words)

    def cover(
        row: Row,
        around_small: Surroundings,
        around_large: Surroundings,
        middle: Middle | None = None,
    ) -> Cover:
        return Cover(
            *(own, words, times, own, tuple(longer), row, whole),
            *(around_small, around_large, reach, middle),
        )

    return cover


def _point(
    layout: Layout, shape: Shape, ranks: int, count: int, rank: int, words: Sequence[Word]
) -> Point:
    """A rank of a small job with so many ranks and micro-batches, whose chunks have these layers.

    Other stages, which nobody builds, have the rest of the layers of the large job: some tensors
    have an entry for every layer of the model.
    """
    own = shape.request.placement(ranks, shape.chunks).stages[rank] if ranks > 1 else (0,)
    words = [tuple(one for one in word if one.kind != PREDICTION) for word in words]
    some = words[0][:1] or (Layer(shape.kinds[0]),)  # a stage may have none
    stages = [some for _ in range(ranks * shape.chunks)]
    even = layout.placed and layout.stage_layers is None and len(set(map(len, words))) == 1
    if even:  # a V divides its layers by itself
        stages = [words[0]] * len(stages)
    for stage, word in zip(own, words, strict=True):
        stages[stage] = word
    others = [stage for stage in range(len(stages)) if stage not in own]
    rest = sum(map(len, shape.stages)) - sum(map(len, stages))
    if others and rest > 0 and not even:
        stages[others[0]] += some * rest
    split = ranks > 1 and not even
    small = replace(
        layout,
        pp=ranks,
        devices=layout.devices // layout.pp * ranks,
        global_batch_size=layout.mbs * layout.dp * count,
        stage_layers=tuple(map(len, stages)) if split else None,
    )
    layers = [one for stage in stages for one in stage]
    flags: dict[str, Any] = {"num_layers": len(layers), "noop_layers": None}
    if EXPERT in shape.layer_kinds:
        flags["moe_layer_freq"] = str([int(one.kind != DENSE) for one in layers]).replace(" ", "")
    if shape.recomputes_some:
        again = max(sum(one.group for one in word) for word in words)
        flags["recompute_num_layers"] = again
        if not again:
            flags |= {"recompute_granularity": None, "recompute_method": None}
            flags["recompute_num_layers"] = None
    return Point(small.overrides() | flags, small.devices, rank)
