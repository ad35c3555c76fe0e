"""Templates: what a block does to the bytes alive, by everything that it depends on.

    found = Templates.of(recording, words)      # repetitions are equal, or it is refused
    found = found.grown(second, words, times)   # with blocks that grow with the layers of a chunk

Blocks of layers depend on the layer and its neighbours, those around them on the actions around
theirs (:mod:`mindspeed.planner.compose.surroundings`).
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mindspeed.errors import PlanError
from mindspeed.planner.compose.surroundings import (
    Around,
    Surroundings,
    Turn,
    nothing_near,
    turns_of,
)
from mindspeed.planner.compose.words import Window, Word, blocks_of, window
from mindspeed.planner.count.recording import (
    AFTER,
    PER_LAYER,
    PER_STEP,
    Block,
    Part,
    Place,
    Recording,
    Sent,
    add,
    top_of,
)


class NotSpliceable(PlanError):
    """A job whose blocks do not repeat."""


class Key(NamedTuple):
    """Blocks with one key are equal.

    Attributes:
        part: which stretch it is.
        op: op of the action; empty for parts of the step.
        chunk: model chunk.
        turn: place of the action among those of its chunk.
        layers: the layer and its neighbours, for parts of layers; for two of a pair both.
        around: actions around this one, for other parts; for parts of real layers that a row of
            bare ones takes, the messages that layers of the action free.
        ahead: chunk and turn of the forward that runs at the same time.
    """

    part: Part
    op: str = ""
    chunk: int = 0
    turn: Turn | None = None
    layers: Window = ()
    around: Around = ()
    ahead: tuple[int, Turn] | None = None

    def __str__(self) -> str:
        """Format for a message: ``gap after B of chunk 0``."""
        layers = "-".join(f"{x.kind}" if x is not None else "|" for x in self.layers)
        where = f" of {self.op} of chunk {self.chunk}" if self.op else ""
        return " ".join(filter(None, (f"{self.part.value}{where}", layers, _text(self.around))))


def _text(around: Around) -> str:
    cells = [f"{one[0]}{one[1]}" if isinstance(one, tuple) else str(one or "|") for one in around]
    return f"({' '.join(cells)})" if cells else ""


@dataclass(frozen=True)
class Template:
    """What a block does.

    Attributes:
        deltas: changes of the bytes alive; empty where only their sums are known.
        kinds: kind of memory of each.
        net: their sum.
        top: the highest sum on the way, at least 0.
        flops: FLOPs, recomputation included.
        recomputed: FLOPs of recomputation.
        seconds: mean duration, without waits for data-parallel ranks; at the end of the step
            without any waits.
        sent: mean communications and waits.
        seen: number of repetitions.
        messages: indices of deltas that free a message.
    """

    deltas: tuple[int, ...]
    kinds: tuple[str, ...]
    net: int
    top: int
    flops: int
    recomputed: int
    seconds: float = 0.0
    sent: Sent | None = None
    seen: int = 1
    messages: tuple[int, ...] = ()


def freed_in(recording: Recording) -> dict[int, Around]:
    """Bytes and kinds of the messages that layers of the actions of a recording free."""
    freed: dict[int, Around] = {}
    for one in recording.blocks:
        if one.messages:
            own = tuple((one.deltas[at], one.kinds[at]) for at in one.messages)
            freed[one.action] = freed.get(one.action, ()) + own
    return freed


class Templates:
    """Templates of a rank by key.

    Attributes:
        found: the templates.
        surroundings: part of the keys of blocks that are not of layers.
        reach: neighbours of a layer on either side that matter.
        freed: part of the keys of blocks of layers.
    """

    def __init__(
        self,
        found: dict[Key, Template],
        surroundings: Surroundings,
        reach: int,
        freed: Surroundings = nothing_near,
    ) -> None:
        self.found, self.surroundings, self.reach = found, surroundings, reach
        self.freed = freed

    @classmethod
    def of(
        cls,
        recording: Recording,
        words: Sequence[Word],
        surroundings: Surroundings,
        reach: int,
        without: Sequence[Part] = (),
        freed: Surroundings = nothing_near,
    ) -> Templates:
        """Take the templates from a recording.

        Args:
            recording: the recording.
            words: layers of its chunks.
            surroundings: what else blocks depend on.
            reach: neighbours of a layer that matter.
            without: parts that are left out.
            freed: what else blocks of layers depend on.

        Raises:
            NotSpliceable: blocks are not those of the words, or repetitions differ.
        """
        expected = list(blocks_of(recording.row, words))
        there = [(one.action, one.part, one.layer) for one in recording.blocks]
        if there != expected:
            pairs = enumerate(zip(there, expected, strict=False))
            index = next((i for i, (a, b) in pairs if a != b), min(len(there), len(expected)))
            ran, wanted = (_block(found[index : index + 1]) for found in (there, expected))
            raise NotSpliceable(f"the step runs {ran} where its layers have {wanted}")
        found, groups = cls({}, surroundings, reach, freed), dict[Key, list[Block]]()
        for one, (_, key) in zip(recording.blocks, found.keys(recording.row, words), strict=True):
            if key.part not in without:
                groups.setdefault(key, []).append(one)
        for key, blocks in groups.items():
            found.found[key] = _template(key, blocks)
        return found

    def keys(self, row: Sequence[Place], words: Sequence[Word]) -> Iterator[tuple[int, Key]]:
        """Action and key of all blocks of a step."""
        turns = turns_of(row)
        near = [[window(word, i, self.reach) for i in range(len(word))] for word in words]
        for action, part, layer in blocks_of(row, words):
            if part in PER_STEP:
                yield action, Key(part)
                continue
            op, chunk, _, paired = row[action]
            ahead = (row[action - 1].chunk, turns[action - 1]) if paired else None
            if part in PER_LAYER:
                around = self.freed(row, action, part)
                forward = chunk if ahead is None or part is Part.BACK else ahead[0]
                layers = near[forward][layer]
                if part is Part.BOTH:
                    layers += near[chunk][-1 - layer]
            else:
                layers, around = (), self.surroundings(row, action, part)
            yield action, Key(part, op, chunk, turns[action], layers, around, ahead)

    def check_repeats(self, start: int, period: int) -> None:
        """Compare a part of the row with the one before it.

        Raises:
            NotSpliceable: they differ.
        """
        for key, one in self.found.items():
            at = key.around[0] if key.around else -1
            if isinstance(at, int) and start <= at < start + period:
                other = self.found.get(key._replace(around=(at - period,)))
                if other is not None and other.deltas != one.deltas:
                    raise NotSpliceable(f"{key}: differs from {period} actions before")

    def grown(self, longer: Sequence[Growth]) -> Templates:
        """Templates of a rank whose chunks repeat units of layers more often.

        Raises:
            NotSpliceable: a block is there with one size only, or does not grow by repetition.
        """
        for growth in longer:
            if missing := growth.shorter.found.keys() ^ growth.longer.found.keys():
                raise NotSpliceable(f"{next(iter(missing))}: in one of two sizes only")
        found = {}
        for key, one in self.found.items():
            others = [(*growth.pair(key, one), growth.of(key)) for growth in longer]
            affine = _affine(key, one, others)
            if key.part in PER_STEP:
                found[key] = affine
            else:
                found[key] = _repeated(key, one, others, affine)
        return Templates(found, self.surroundings, self.reach, self.freed)

    def replace_steps(self, blocks: Iterable[Block]) -> None:
        """Set what parts of the step do to the bytes alive."""
        for one in blocks:
            self.found[Key(one.part)] = replace(
                self.found[Key(one.part)],
                deltas=tuple(one.deltas),
                kinds=tuple(one.kinds),
                net=one.net,
                top=one.top,
            )


Changes = Template | Block


@dataclass(frozen=True)
class Growth:
    """Templates of a rank and of one with a unit of layers once more.

    Attributes:
        shorter: those of the rank.
        longer: those of the other one.
        times: how often each chunk of the large rank repeats the unit more than the small one.
        chunks: chunks that have the unit once more.
    """

    shorter: Templates
    longer: Templates
    times: tuple[int, ...]
    chunks: int

    @property
    def mean(self) -> float:
        """How often figures of the whole rank grow."""
        return sum(self.times) / self.chunks

    def of(self, key: Key) -> float:
        """How often a block grows."""
        return self.mean if key.part in PER_STEP else self.times[key.chunk]

    def pair(self, key: Key, one: Template) -> tuple[Template, Template]:
        """A template of the rank that does what ``one`` does, and the longer one.

        Raises:
            NotSpliceable: none does, and others of its kind at its turn grow.
        """
        found = self.shorter.found.get(key)
        if found is not None and (key.part in PER_STEP or found.deltas == one.deltas):
            return found, self.longer.found[key]
        kind = key.part, key.op, key.chunk
        near = [x for x in self.shorter.found if (x.part, x.op, x.chunk) == kind]
        pairs = [(self.shorter.found[other], self.longer.found[other]) for other in near]
        for shorter, longer in pairs:
            if shorter.deltas == one.deltas:
                return shorter, longer
        at_its_turn = [
            pair for other, pair in zip(near, pairs, strict=True) if other.turn == key.turn
        ]
        if all(shorter.deltas == longer.deltas for shorter, longer in at_its_turn or pairs):
            return one, one
        raise NotSpliceable(f"{key}: how it grows with the layers was not recorded")


Others = Sequence[tuple[Template, Template, float]]
"""Templates of chunks and of longer ones, and how often what these have more is repeated."""


def _affine(key: Key, one: Template, others: Others) -> Template:
    """Sums that grow with the layers; for both ends of a step, whose work is per parameter.

    Seconds of a block that does the same in a longer chunk do not grow. Where they differ, the
    device waited for the host, longest in the shorter chunk.
    """

    def line(name: str) -> float:
        first = getattr(one, name)
        grows = ((getattr(y, name) - getattr(x, name)) * times for x, y, times in others)
        return float(first + sum(grows))

    sent: Sent = {}
    add(sent, one.sent or {})
    for shorter, longer, times in others:
        add(sent, longer.sent or {}, times)
        add(sent, shorter.sent or {}, -times)
    growing = key.part in PER_STEP or any(
        (x.deltas, x.flops) != (y.deltas, y.flops) for x, y, _ in others
    )
    if growing or not others:
        seconds = line("seconds")
    else:
        seconds = min(longer.seconds for _, longer, _ in others)
    deltas, kinds = summed(one, others) if key.part in PER_STEP else (one.deltas, one.kinds)
    return Template(
        deltas,
        kinds,
        round(line("net")),
        round(line("top")),
        round(line("flops")),
        round(line("recomputed")),
        seconds,
        sent,
        messages=one.messages,
    )


def summed(
    one: Changes, others: Iterable[tuple[Changes, Changes, float]]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Changes of each kind until the top, frees first, and after it, with what others grow by."""
    total: list[Counter[str]] = [Counter(part) for part in until_top(one)]
    for shorter, longer, times in others:
        for part, base, more in zip(total, until_top(shorter), until_top(longer), strict=True):
            for kind in base.keys() | more.keys():
                part[kind] += round((more[kind] - base[kind]) * times)
    pairs = [pair for part in total for pair in sorted(part.items(), key=lambda pair: pair[1])]
    return tuple(delta for _, delta in pairs), tuple(kind for kind, _ in pairs)


def until_top(one: Changes) -> tuple[Counter[str], Counter[str]]:
    """Changes of each kind until the top, and after it."""
    now, parts = 0, (Counter[str](), Counter[str]())
    above = one.top > 0
    for kind, delta in zip(one.kinds, one.deltas, strict=True):
        parts[not above][kind] += delta
        now += delta
        above = above and now < one.top
    return parts


def _repeated(key: Key, one: Template, others: Others, affine: Template) -> Template:
    """A block of the whole chunk: what a longer chunk has more is repeated.

    Raises:
        NotSpliceable: it is no insertion, and no bytes that grow.
    """
    insertions: dict[int, list[tuple[int, str]]] = {}
    changes = [0] * len(one.deltas)
    for _, other, times in others:
        if other.deltas == one.deltas:
            continue
        matcher = difflib.SequenceMatcher(None, one.deltas, other.deltas, autojunk=False)
        for tag, i, j, k, n in matcher.get_opcodes():
            if tag == "insert":
                more = list(zip(other.deltas[k:n], other.kinds[k:n], strict=True))
                insertions.setdefault(i, []).extend(more * round(times))
            elif tag == "replace" and n - k == j - i:
                for at in range(i, j):
                    changes[at] += (other.deltas[k + at - i] - one.deltas[at]) * round(times)
            elif tag != "equal":
                raise NotSpliceable(
                    f"{key}: {_short(one.deltas[i:j])} bytes become {_short(other.deltas[k:n])} "
                    "in longer chunks"
                )
    if any(len(other.messages) != len(one.messages) for _, other, _ in others):
        raise NotSpliceable(f"{key}: frees more messages in longer chunks")
    deltas: list[int] = []
    kinds: list[str] = []
    places: list[int] = []
    for at in range(len(one.deltas) + 1):
        for delta, kind in insertions.get(at, ()):
            deltas.append(delta)
            kinds.append(kind)
        if at < len(one.deltas):
            places.append(len(deltas))
            deltas.append(one.deltas[at] + changes[at])
            kinds.append(one.kinds[at])
    messages = tuple(places[at] for at in one.messages)
    return replace(_with_deltas(affine, deltas, kinds), messages=messages)


def _with_deltas(one: Template, deltas: Sequence[int], kinds: Sequence[str]) -> Template:
    return replace(
        one, deltas=tuple(deltas), kinds=tuple(kinds), net=sum(deltas), top=top_of(deltas)
    )


def freeing(one: Template, messages: Around, example: Template | None) -> Template:
    """A block of layers that frees these messages instead of those that it frees.

    Args:
        one: the block.
        messages: changes of the bytes alive by the messages, and their kinds.
        example: a block of the same layer in another action, which frees some.

    Raises:
        NotSpliceable: it frees messages at several places, or where it would is not known.
    """
    if not one.messages and (not messages or example is None):
        return one
    at = one.messages or (example.messages if example is not None else ())
    start, end = at[0], at[0] + len(one.messages)
    known = one.messages or (example is not None and one.deltas[:start] == example.deltas[:start])
    if not known or at != tuple(range(start, start + len(at))):
        raise NotSpliceable("where layers free these messages was not recorded")
    deltas = [*one.deltas[:start], *(delta for delta, _ in messages), *one.deltas[end:]]
    kinds = [*one.kinds[:start], *(kind for _, kind in messages), *one.kinds[end:]]
    found = _with_deltas(one, deltas, kinds)
    return replace(found, messages=tuple(range(start, start + len(messages))))


def _template(key: Key, blocks: Sequence[Block]) -> Template:
    """The template of blocks with one key.

    Raises:
        NotSpliceable: they differ.
    """
    first, sent = blocks[0], Sent()
    for one in blocks:
        if (one.deltas, one.flops) != (first.deltas, first.flops):
            raise NotSpliceable(
                f"{key}: {_difference(first, one)} in actions {first.action} and {one.action}"
            )
        own = {name: sums for name, sums in one.sent.items() if not name.shared}
        add(sent, own, 1 / len(blocks))
    return Template(
        tuple(first.deltas),
        tuple(first.kinds),
        first.net,
        first.top,
        first.flops,
        first.recomputed,
        sum(own_seconds(one) for one in blocks) / len(blocks),
        sent,
        len(blocks),
        tuple(first.messages),
    )


def _block(found: Sequence[tuple[int, Part, int]]) -> str:
    if not found:
        return "nothing more"
    action, part, layer = found[0]
    return f"{part.value} {layer} in action {action}"


def own_seconds(block: Block) -> float:
    """Seconds without waits for data-parallel ranks; after the last action without any waits."""
    waits = [s.waited for name, s in block.sent.items() if name.shared or block.part in AFTER]
    return block.seconds - sum(waits)


def _difference(one: Block, other: Block) -> str:
    if one.deltas == other.deltas:
        return f"{one.flops} and {other.flops} FLOPs"
    pairs = enumerate(zip(one.deltas, other.deltas, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one.deltas), len(other.deltas)))
    return f"{_short(one.deltas[at:])} and {_short(other.deltas[at:])} bytes at event {at}"


def _short(values: Sequence[int]) -> str:
    return " ".join(f"{value:+d}" for value in values[:4]) or "no"
