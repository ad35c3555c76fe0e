"""The layers of a chunk as a word, the blocks of an action in its order, and shorter words.

    word = (Layer("dense"),) * 32
    short = shortened(word)
    short.word, short.units             # three layers, and one layer that is repeated 29 times

A layer's blocks depend on its neighbours, as hidden states and their gradients live from one layer
to the next. A shorter word stands for a longer one if every layer of the longer one with its
neighbours is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed.planner.count.recording import AFTER, BEFORE, Part, Place


class Layer(NamedTuple):
    """What distinguishes a layer from others of its chunk.

    Attributes:
        kind: as in :mod:`mindspeed.planner.shape`.
        place: place in the group that is recomputed together.
        group: layers of this group; 0 if the layer keeps its activations.
    """

    kind: str
    place: int = 0
    group: int = 0


Word = tuple[Layer, ...]
Window = tuple[Layer | None, ...]
Name = tuple[Part, int]
"""Part of an action, and the layer."""


@dataclass(frozen=True)
class Shortened:
    """A word and what was left out of it.

    Attributes:
        word: the shorter word.
        units: how often each unit was left out.
        longer: the shorter word with each unit once more.
    """

    word: Word
    units: dict[Word, int]
    longer: dict[Word, Word]


def window(word: Word, layer: int, reach: int) -> Window:
    """A layer with its neighbours; None beyond the ends."""
    near = range(layer - reach, layer + reach + 1)
    return tuple(word[i] if 0 <= i < len(word) else None for i in near)


def windows(word: Word, reach: int) -> set[Window]:
    """All layers of a word with their neighbours."""
    return {window(word, layer, reach) for layer in range(len(word))}


def shortened(word: Word, reach: int) -> Shortened:
    """The shortest word with the same windows that leaving out repetitions gives."""
    units: dict[Word, int] = {}
    longer: dict[Word, Word] = {}
    while (found := _repeated(word, reach)) is not None:
        start, size = found
        unit = word[start : start + size]
        before, word = word, word[:start] + word[start + size :]
        units[unit] = units.get(unit, 0) + 1
        longer[unit] = before
    for unit, one in longer.items():  # others may have been left out since
        missing = [other for other in units if other != unit]
        for other in missing:
            one = _without(one, other, units[other], reach)
        longer[unit] = one
    return Shortened(word, units, longer)


def _repeated(word: Word, reach: int) -> tuple[int, int] | None:
    """Start and length of the shortest unit that can be left out."""
    wanted = windows(word, reach)
    for size in range(1, len(word) // 2 + 1):
        for start in range(len(word) - 2 * size + 1):
            middle, end = start + size, start + 2 * size
            shorter = word[:start] + word[middle:]
            if word[start:middle] == word[middle:end] and windows(shorter, reach) == wanted:
                return start, size
    return None


def _without(word: Word, unit: Word, times: int, reach: int) -> Word:
    """The word without so many repetitions of a unit, if it still has them."""
    size = len(unit)
    for _ in range(times):
        wanted = windows(word, reach)
        for start in range(len(word) - 2 * size + 1):
            end = start + size
            repeated = word[start:end] == unit == word[end : end + size]
            if repeated and windows(word[:start] + word[end:], reach) == wanted:
                word = word[:start] + word[end:]
                break
    return word


def parts_of(op: str, word: Word) -> Iterator[Name]:
    """The blocks of an action in their order; without layers nothing is after the last one."""
    if op in ("F", "Fc"):
        yield Part.PRE, 0
        yield from ((Part.LAYER, layer) for layer in range(len(word)))
        if word:
            yield Part.POST, 0
        return
    if op not in ("B", "I"):
        yield Part.BACK_PRE, 0
        return
    yield Part.BACK_POST, 0
    layer = len(word) - 1
    while layer >= 0:
        first = layer - word[layer].place if word[layer].group else layer
        if word[layer].group:
            yield from ((Part.AGAIN, one) for one in range(first, layer + 1))
        yield from ((Part.BACK, one) for one in range(layer, first - 1, -1))
        layer = first - 1
    if word:
        yield Part.BACK_PRE, 0


def blocks_of(row: Sequence[Place], words: Sequence[Word]) -> Iterator[tuple[int, Part, int]]:
    """Action, part and layer of all blocks of a step."""
    yield from ((-1, part, 0) for part in BEFORE)
    for action, place in enumerate(row):
        for part, layer in parts_of(place.op, words[place.chunk]):
            yield action, part, layer
        if action < len(row) - 1:
            yield action, Part.GAP, 0
    yield from ((len(row) - 1, part, 0) for part in AFTER)
