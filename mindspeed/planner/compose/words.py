"""The layers of a chunk as a word, the blocks of an action in its order, and shorter words.

    word = (Layer("dense"),) * 32
    short = shortened(word)
    short.word, short.units             # three layers, and one layer that is repeated 29 times

A layer's blocks depend on its neighbours, as hidden states and their gradients live from one layer
to the next. A shorter word stands for a longer one if every layer of the longer one with its
neighbours is in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from mindspeed.planner.count.recording import AFTER, BEFORE, Part, Place, actions_of


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
    units: Counter[Word]
    longer: dict[Word, Word]


def window(word: Word, layer: int, reach: int) -> Window:
    """A layer with its neighbours; None beyond the ends."""
    near = range(layer - reach, layer + reach + 1)
    return tuple(word[i] if 0 <= i < len(word) else None for i in near)


def windows(word: Word, reach: int) -> set[Window]:
    """All layers of a word with their neighbours."""
    return {window(word, layer, reach) for layer in range(len(word))}


def shortened(word: Word, reach: int, most: int | None = None) -> Shortened:
    """The shortest word with the same windows that leaving out repetitions gives.

    Args:
        word: the word.
        reach: neighbours of a layer that matter.
        most: most units to leave out.
    """
    units: Counter[Word] = Counter()
    longer: dict[Word, Word] = {}
    while units.total() != most and (found := _repeated(word, reach)) is not None:
        start, size = found
        unit = word[start : start + size]
        before, word = word, word[:start] + word[start + size :]
        units[unit] += 1
        longer[unit] = before
    for unit, one in longer.items():  # others may have been left out since
        missing = [other for other in units if other != unit]
        for other in missing:
            one = _without(one, other, units[other], reach)
        longer[unit] = one
    return Shortened(word, units, longer)


def shortened_alike(
    words: Sequence[Word], reach: int, pairs: Collection[tuple[int, int]]
) -> list[Shortened]:
    """Words of chunks whose layers run beside those of the others, with as many left out of each.

    The first layer of one runs beside the last of another, so what is left out of one only would
    put other layers side by side. Chunks that repeat different units keep all of them.

    Args:
        words: layers of the chunks.
        reach: neighbours of a layer that matter.
        pairs: chunks of a forward and a backward that run at the same time.
    """
    found = [shortened(word, reach) for word in words]
    units = {unit for one in found for unit in one.units}
    most = min(one.units.total() for one in found) if len(units) == 1 else 0
    wanted = _beside(words, reach, pairs)
    for count in range(most, -1, -1):
        found = [shortened(word, reach, count) for word in words]
        if _beside([one.word for one in found], reach, pairs) == wanted:
            break
    return found


def _beside(words: Sequence[Word], reach: int, pairs: Collection[tuple[int, int]]) -> set[Any]:
    """All layers with their neighbours that a pair of two chunks runs side by side, or alone."""
    near = [[window(word, i, reach) for i in range(len(word))] for word in words]
    return {
        (ahead, behind, beside)
        for ahead, behind in pairs
        for beside in zip_longest(near[ahead], reversed(near[behind]))
    }


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


def parts_of_pair(ahead: Word, behind: Word) -> Iterator[Name]:
    """The blocks of a forward and a backward at the same time: layer i beside layer i from the end.

    Layers that one chunk has more than the other run alone, after the pairs.
    """
    yield Part.PRE, 0
    both, last = min(len(ahead), len(behind)), len(behind) - 1
    yield from ((Part.BOTH, layer) for layer in range(both))
    yield from ((Part.BACK, layer) for layer in range(last - both, -1, -1))
    yield from ((Part.LAYER, layer) for layer in range(both, len(ahead)))
    if ahead or behind:
        yield Part.POST, 0


def blocks_of(row: Sequence[Place], words: Sequence[Word]) -> Iterator[tuple[int, Part, int]]:
    """Action, part and layer of all blocks of a step."""
    yield from ((-1, part, 0) for part in BEFORE)
    for action, place, ahead in actions_of(row):
        word = words[place.chunk]
        parts = (
            parts_of(place.op, word) if ahead is None else parts_of_pair(words[ahead.chunk], word)
        )
        yield from ((action, part, layer) for part, layer in parts)
        if action < len(row) - 1:
            yield action, Part.GAP, 0
    yield from ((len(row) - 1, part, 0) for part in AFTER)
