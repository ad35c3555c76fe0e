"""What blocks between the layers of an action depend on: the actions around it.

    messages_near(row, action, part)    # in 1F1B: ops and chunks around
    NearInRow()(row, action, part)      # in an interleaved schedule
    place_in_row(row, action, part)     # in any other: its index

Messages that actions leave or need lie in these blocks. In 1F1B they depend on two actions before
and one after, in the interleaved schedule on two on either side and on when it is; other schedules
keep messages for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mindspeed.planner.count.recording import Part, Place

Around = tuple[Any, ...]
"""Op and chunk of actions around one, its index in the row, or bytes of messages."""


class Turn(NamedTuple):
    """Place of an action among those of its chunk.

    Attributes:
        first: whether it is the first of its op, which frees what the step before has left.
        last: whether it is the last of its op, which may begin a reduction.
        after: op before it in the same chunk: forward frees what the last forward or recomputation
            of its layers has left.
        latest: op that ran last on the micro-batch that ran forward last, a backward itself
            included: layers of experts keep the graph of this micro-batch.
    """

    first: bool = False
    last: bool = False
    after: str = ""
    latest: str = ""


def turns_of(row: Sequence[Place]) -> list[Turn]:
    """The turns of all actions of a row."""
    names = [place[:2] for place in row]
    last = {name: index for index, name in enumerate(names)}
    seen, before, turns = set[tuple[str, int]](), dict[int, str](), list[Turn]()
    latest: dict[int, tuple[str, int]] = {}  # chunk -> op and micro-batch
    for index, (op, chunk, micro_batch, _) in enumerate(row):
        forward = op in ("F", "Fc")
        if not forward and latest.get(chunk, ("", -1))[1] == micro_batch:
            latest[chunk] = op, micro_batch
        turns.append(
            Turn(
                first=names[index] not in seen,
                last=last[names[index]] == index,
                after=before.get(chunk, ""),
                latest=latest[chunk][0] if chunk in latest else "",
            )
        )
        seen.add(names[index])
        before[chunk] = op
        if forward:
            latest[chunk] = op, micro_batch
    return turns


Surroundings = Callable[[Sequence[Place], int, Part], Around]


def messages_near(row: Sequence[Place], action: int, part: Part) -> Around:
    """Surroundings in 1F1B: who has sent what lives now, and who receives next."""
    before, after = {Part.GAP: (2, 1), Part.PRE: (1, 0)}.get(part, (0, 0))
    near = [i for i in range(action - before, action + after + 1) if i != action]
    return tuple(row[i][:2] if 0 <= i < len(row) else None for i in near)


class NearInRow:
    """Surroundings in an interleaved schedule: who has sent what lives now, and who receives next.

    Until Megatron's schedule is settled it keeps what it has received last before its first
    backward (:func:`settled`), and two actions do not free it for that.
    """

    REACH = 2

    def __init__(self) -> None:
        self._row: Sequence[Place] = ()
        self._near: list[Around] = []

    def __call__(self, row: Sequence[Place], action: int, part: Part) -> Around:
        """Actions around one, which are first or last of their kind, and when it is."""
        if row is not self._row:
            self._row, self._near = row, list(self._of(row))
        return self._near[action]

    def _of(self, row: Sequence[Place]) -> Iterator[Around]:
        reach, start, kept, turns = self.REACH, settled(row), _not_freeing(row), turns_of(row)
        names = [*[None] * reach, *(place[:2] for place in row), *[None] * reach]
        ends = [None, *(turn[:2] for turn in turns), None]
        for at, turn in enumerate(turns):
            when = max(-reach, min(reach, at - start)), at in kept
            yield (*names[at : at + 2 * reach + 1], *ends[at : at + 3], turn, *when)


def seen_near(row: Sequence[Place]) -> set[Around]:
    """What actions of an interleaved row depend on, apart from layers."""
    near = NearInRow()
    return {near(row, action, Part.GAP) for action in range(len(row))}


def settled(row: Sequence[Place]) -> int:
    """Actions after which those before the first backward have no effect any more.

    Megatron's schedule keeps what it received last before that until the end of the step: the
    input of the next forward, and the gradient that its backward makes.
    """
    warm_up = next((i for i, place in enumerate(row) if place.op != "F"), len(row))
    of = next((place for place in row[warm_up:] if place.op == "F"), None)
    if of is None:
        return warm_up
    return 1 + next(i for i, x in enumerate(row) if x.op in "BI" and x[1:3] == of[1:3])


def _not_freeing(row: Sequence[Place]) -> tuple[int, int]:
    """The backward of the last forward before the first backward, and what its chunk runs next."""
    warm_up = next((i for i, place in enumerate(row) if place.op != "F"), len(row))
    of = row[warm_up - 1]
    done = next(i for i, x in enumerate(row) if x.op in "BI" and x[1:3] == of[1:3])
    after = (i for i in range(done + 1, len(row)) if row[i].chunk == of.chunk)
    return done, next(after, len(row))


def place_in_row(row: Sequence[Place], action: int, part: Part) -> Around:
    """Surroundings in any other schedule: the whole row."""
    return (action,)


def nothing_near(row: Sequence[Place], action: int, part: Part) -> Around:
    """Surroundings of parts of layers that do not depend on any."""
    return ()
