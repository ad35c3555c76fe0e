"""Templates: what a block does to the bytes alive, by everything that it depends on.

    found = Templates.of(recording, words)      # repetitions are equal, or it is refused
    found = found.grown(second, words, times)   # with blocks that grow with the layers of a chunk

Blocks of layers depend on the layer and its neighbours, those around them also on the actions
before and after theirs, by the messages that these leave or need: in 1F1B on two before and one
after. Other schedules keep messages for longer; there a block depends on its place in the row.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed.errors import PlanError
from mindspeed.planner.compose.words import Window, Word, blocks_of, window
from mindspeed.planner.count.recording import (
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

Around = tuple[tuple[str, int] | int | None, ...]
"""Op and chunk of actions around one, or its index in the row."""


class NotSpliceable(PlanError):
    """A job whose blocks do not repeat."""


@dataclass(frozen=True)
class Key:
    """Blocks with one key are equal.

    Attributes:
        part: which stretch it is.
        op: op of the action; empty for parts of the step.
        chunk: model chunk.
        layers: the layer and its neighbours, for parts of layers.
        around: actions around this one, for other parts.
    """

    part: Part
    op: str = ""
    chunk: int = 0
    layers: Window = ()
    around: Around = ()

    def __str__(self) -> str:
        """Format for a message: ``gap after B of chunk 0``."""
        layers = "-".join(f"{x.kind}" if x is not None else "|" for x in self.layers)
        where = f" of {self.op} of chunk {self.chunk}" if self.op else ""
        return " ".join(filter(None, (f"{self.part.value}{where}", layers, _text(self.around))))


def _text(around: Around) -> str:
    cells = [f"{one[0]}{one[1]}" if isinstance(one, tuple) else str(one or "|") for one in around]
    return f"({' '.join(cells)})" if cells else ""


Surroundings = Callable[[Sequence[Place], int, Part], Around]


def messages_near(row: Sequence[Place], action: int, part: Part) -> Around:
    """Surroundings in 1F1B: who has sent what lives now, and who receives next."""
    before, after = {Part.GAP: (2, 1), Part.PRE: (1, 0)}.get(part, (0, 0))
    near = [i for i in range(action - before, action + after + 1) if i != action]
    return tuple(row[i][:2] if 0 <= i < len(row) else None for i in near)


def place_in_row(row: Sequence[Place], action: int, part: Part) -> Around:
    """Surroundings in any other schedule: the whole row."""
    return (action,)


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
        seconds: mean duration.
        sent: mean communications and waits.
        seen: number of repetitions.
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


class Templates:
    """Templates of a rank by key.

    Attributes:
        found: the templates.
        surroundings: part of the keys of blocks that are not of layers.
    """

    def __init__(self, found: dict[Key, Template], surroundings: Surroundings) -> None:
        self.found, self.surroundings = found, surroundings

    @classmethod
    def of(
        cls, recording: Recording, words: Sequence[Word], surroundings: Surroundings
    ) -> Templates:
        """Take the templates from a recording.

        Args:
            recording: the recording.
            words: layers of its chunks.
            surroundings: what else blocks depend on.

        Raises:
            NotSpliceable: blocks are not those of the words, or repetitions differ.
        """
        expected = list(blocks_of(recording.row, words))
        there = [(one.action, one.part, one.layer) for one in recording.blocks]
        if there != expected:
            index = next(
                (i for i, (a, b) in enumerate(zip(there, expected, strict=False)) if a != b),
                min(len(there), len(expected)),
            )
            ran, wanted = (x[index : index + 1] or ["nothing"] for x in (there, expected))
            raise NotSpliceable(f"the step runs {ran[0]} where its layers are {wanted[0]}")
        found, groups = cls({}, surroundings), dict[Key, list[Block]]()
        for one in recording.blocks:
            key = found.key(recording.row, words, one.action, one.part, one.layer)
            groups.setdefault(key, []).append(one)
        for key, blocks in groups.items():
            found.found[key] = _template(key, blocks)
        return found

    def key(
        self, row: Sequence[Place], words: Sequence[Word], action: int, part: Part, layer: int
    ) -> Key:
        """Key of a block of a row."""
        if part in PER_STEP:
            return Key(part)
        op, chunk, _ = row[action]
        if part in PER_LAYER:
            return Key(part, op, chunk, window(words[chunk], layer))
        return Key(part, op, chunk, around=self.surroundings(row, action, part))

    def grown(self, second: Templates, times: float, chunks: int) -> Templates:
        """Templates of a rank whose chunks repeat a unit ``times`` more often.

        Args:
            second: templates of a rank with the unit once more in ``chunks`` of its chunks.
            times: how often the unit is repeated more than here, in all chunks together.
            chunks: number of chunks that repeat it.

        Raises:
            NotSpliceable: a block is there with one size only, or does not grow by repetition.
        """
        if missing := self.found.keys() ^ second.found.keys():
            raise NotSpliceable(f"{next(iter(missing))}: in one of two sizes only")
        found = {}
        for key, one in self.found.items():
            other = second.found[key]
            if key.part in PER_STEP:
                found[key] = _affine(one, other, times / chunks)
            elif one.deltas == other.deltas:
                found[key] = replace(one, flops=_line(one.flops, other.flops, times / chunks))
            else:
                found[key] = _aligned(key, one, other, round(times / chunks))
        return Templates(found, self.surroundings)


def _line(one: float, other: float, times: float) -> int:
    return round(one + (other - one) * times)


def _affine(one: Template, other: Template, times: float) -> Template:
    """What comes per parameter, at both ends of a step: its sums grow with the layers."""
    sent: Sent = {}
    add(sent, one.sent or {}, 1 - times)
    add(sent, other.sent or {}, times)
    return Template(
        (),
        (),
        _line(one.net, other.net, times),
        _line(one.top, other.top, times),
        _line(one.flops, other.flops, times),
        _line(one.recomputed, other.recomputed, times),
        one.seconds + (other.seconds - one.seconds) * times,
        sent,
    )


def _aligned(key: Key, one: Template, other: Template, times: int) -> Template:
    """A block of the whole chunk: what the second has more is repeated."""
    deltas: list[int] = []
    kinds: list[str] = []

    def put(values: Sequence[int], of: Sequence[str]) -> None:
        deltas.extend(values)
        kinds.extend(of)

    matcher = difflib.SequenceMatcher(None, one.deltas, other.deltas, autojunk=False)
    for tag, i, j, k, n in matcher.get_opcodes():
        if tag == "equal":
            put(one.deltas[i:j], one.kinds[i:j])
        elif tag == "insert":
            put(other.deltas[k:n] * times, other.kinds[k:n] * times)
        elif tag == "replace" and n - k == j - i:
            pairs = zip(one.deltas[i:j], other.deltas[k:n], strict=True)
            put([a + (b - a) * times for a, b in pairs], one.kinds[i:j])
        else:
            raise NotSpliceable(
                f"{key}: {_short(one.deltas[i:j])} bytes become {_short(other.deltas[k:n])} with "
                "one layer more"
            )
    affine = _affine(one, other, times)
    return replace(
        affine, deltas=tuple(deltas), kinds=tuple(kinds), net=sum(deltas), top=top_of(deltas)
    )


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
        add(sent, one.sent, 1 / len(blocks))
    return Template(
        tuple(first.deltas),
        tuple(first.kinds),
        first.net,
        first.top,
        first.flops,
        first.recomputed,
        sum(one.seconds for one in blocks) / len(blocks),
        sent,
        len(blocks),
    )


def _difference(one: Block, other: Block) -> str:
    if one.deltas == other.deltas:
        return f"{one.flops} and {other.flops} FLOPs"
    pairs = enumerate(zip(one.deltas, other.deltas, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one.deltas), len(other.deltas)))
    return f"{_short(one.deltas[at:])} and {_short(other.deltas[at:])} bytes at event {at}"


def _short(values: Sequence[int]) -> str:
    return " ".join(f"{value:+d}" for value in values[:4]) or "no"


def sums(parts: Mapping[Key, Template]) -> int:
    """Bytes that all templates together change, each as often as it was seen."""
    return sum(one.net * one.seen for one in parts.values())
