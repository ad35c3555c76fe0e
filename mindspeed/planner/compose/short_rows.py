"""Short rows of a schedule that have all that a long row has.

    ranks, rank, count = fewest(shape, seen_near(row), seen_near, first, last)
    count, middle = repeating(shape, row, rank, reach)

In 1F1B and in the interleaved schedule they are those of a rank in a pipeline with fewer ranks and
micro-batches; in other schedules those of the same rank, with as many micro-batches as repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mindspeed.errors import MindSpeedError
from mindspeed.pipeline.schedule.schedules import ScheduleRequest
from mindspeed.planner.compose.surroundings import Around, Turn, messages_near, settled, turns_of
from mindspeed.planner.count.recording import Part, Place, Row, row_of
from mindspeed.planner.shape import Shape

MOST_RANKS, MOST_BATCHES = 10, 24
"""Largest 1F1B pipeline that is tried to cover another."""
INTERLEAVED_RANKS = 13
"""Largest interleaved pipeline that is tried to cover another, in five groups of micro-batches."""


@dataclass(frozen=True)
class Middle:
    """A part of a row that a longer row repeats.

    Attributes:
        places: for each action of the longer row its place in the shorter one.
        start: first action of the part.
        period: its actions.
    """

    places: list[int]
    start: int
    period: int

    def around(self, row: Sequence[Place], action: int, part: Part) -> Around:
        """Surroundings of an action of the longer row."""
        return (self.places[action],)


def is_interleaved(shape: Shape) -> bool:
    """Whether ranks have several chunks, whose actions are those of 1F1B in another order."""
    alike = shape.request.kind in ("1f1b", "interleaved") and not shape.request.pairs
    return shape.chunks > 1 and alike


Size = tuple[int, int, int]
"""Ranks of a small pipeline, rank and micro-batches."""


def seen_in_1f1b(row: Row) -> set[tuple[Place, Turn, Around]]:
    """What blocks of a row depend on, apart from layers."""
    return {
        (place._replace(micro_batch=0), turn, messages_near(row, action, part))
        for part in (Part.PRE, Part.GAP)
        for action, (place, turn) in enumerate(zip(row, turns_of(row), strict=True))
        if part is Part.PRE or action < len(row) - 1
    }


def fewest(
    shape: Shape,
    wanted: set[Any],
    seen: Callable[[Row], set[Any]],
    first: bool,
    last: bool,
    interleaved: bool = False,
) -> tuple[int, int, int] | None:
    """Ranks, rank and micro-batches of the shortest row that has all of ``wanted``.

    Args:
        shape: shape of the job.
        wanted: what a row has to have.
        seen: what a row has.
        first: whether the rank is the first of the pipeline.
        last: whether it is the last.
        interleaved: try the pipelines in which several chunks have all surroundings.
    """
    most = min(shape.ranks, INTERLEAVED_RANKS if interleaved else MOST_RANKS)
    least = min(shape.ranks, 4 if interleaved else 2)
    counts = range(1, MOST_BATCHES + 1)
    if interleaved:
        counts = range(3 * least, min(5 * most + 1, shape.micro_batches))
    for count in counts:
        for ranks, small in _candidates(range(least, most + 1), first, last):
            request = request_of_ranks(shape, ranks)
            if is_interleaved(shape) and count % (request.group_size or ranks):
                continue  # Megatron runs whole groups
            if has_all(shape, (ranks, small, count), wanted, seen):
                return ranks, small, count
    return None


def has_all(shape: Shape, size: Size, wanted: set[Any], seen: Callable[[Row], set[Any]]) -> bool:
    """Whether a row of a small pipeline has all of ``wanted``; see :func:`fewest`."""
    ranks, rank, count = size
    shown = _shown(seen, request_of_ranks(shape, ranks), ranks, shape.chunks, count, rank)
    return shown is not None and wanted <= shown


@lru_cache(maxsize=4096)
def _shown(
    seen: Callable[[Row], set[Any]], request: ScheduleRequest, *size: int
) -> set[Any] | None:
    """What a row of a small pipeline has; None: the schedule needs more micro-batches.

    Args:
        seen: what a row has.
        request: the schedule.
        size: ranks, chunks, micro-batches, rank.
    """
    try:
        return seen(row_of(request, *size))
    except MindSpeedError:
        return None


def request_of_ranks(shape: Shape, ranks: int) -> ScheduleRequest:
    """The request of the schedule on so many ranks, of which Megatron makes groups by default."""
    request = shape.request
    return replace(request, group_size=ranks) if request.group_size == shape.ranks else request


def _candidates(sizes: range, first: bool, last: bool) -> Iterator[tuple[int, int]]:
    """Small pipelines and the ranks in them that have the same ends of the model."""
    if first and last:
        yield 1, 0
        return
    for ranks in sizes:
        if first:
            yield ranks, 0
        elif last:
            yield ranks, ranks - 1
        else:
            yield from ((ranks, small) for small in range(1, ranks - 1))


def repeating(shape: Shape, row: Row, rank: int, reach: int) -> tuple[int, Middle | None]:
    """Micro-batches of a step that is long enough, and what ``row`` repeats more often.

    The further what matters reaches, the longer is the step, and the further from its end is what
    repeats.
    """
    ranks, chunks, count = shape.ranks, shape.chunks, shape.micro_batches
    group = (shape.request.group_size or ranks) if chunks > 1 else 1
    enough = 2 * ranks // chunks + (1 + 2 * reach) * group
    for short in range(enough + (count - enough) % group, count, group):
        try:
            small, more = (
                row_of(shape.request, ranks, chunks, n, rank) for n in (short, short + group)
            )
        except MindSpeedError:
            continue
        if (middle := _middle(small, row, len(more) - len(small), reach)) is not None:
            return short, middle
    return count, None


def _middle(small: Row, row: Row, period: int, reach: int) -> Middle | None:
    """What a row repeats more often than a shorter one."""
    more = len(row) - len(small)
    one, other = (
        list(zip((one._replace(micro_batch=0) for one in r), turns_of(r), strict=True))
        for r in (small, row)
    )
    equal = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    if more % period:
        return None
    first = 2 * period + settled(small)
    steady = [
        ahead
        for ahead in range(first, equal + 1)
        if one[ahead - 2 * period : ahead - period] == one[ahead - period : ahead]
    ]
    late = max(0, 4 - reach) * len(steady) // 4  # what the end needs comes before it
    for ahead in (*steady[late:], *reversed(steady[:late])):
        start = ahead - period
        places = [
            i if i < ahead else i - more if i >= ahead + more else start + (i - start) % period
            for i in range(len(row))
        ]
        if all(other[i] == one[at] for i, at in enumerate(places)):
            return Middle(places, start, period)
    return None
