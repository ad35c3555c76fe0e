"""What real expert layers hold where bare ones have a byte (:mod:`mindspeed.planner.count.bare`).

held = held_by(real, bare)      # from recordings of the same short pipeline
row = revealed(bare_row, held)  # as real layers would leave it between actions
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mindspeed.planner.compose.templates import NotSpliceable
from mindspeed.planner.count.bare import HELD
from mindspeed.planner.count.recording import Block, Part, Recording

Held = tuple[tuple[int, str], ...]
"""Bytes and kind of each storage that the graph of a layer holds."""


def held_by(real: Recording, bare: Recording) -> Held:
    """What a layer holds, from the first block between actions that frees it.

    Raises:
        NotSpliceable: layers keep something else between actions, too.
    """
    pairs = list(zip(_between(real), _between(bare), strict=True))
    first = next((pair for pair in pairs if HELD in pair[1].kinds), None)
    held: Held = ()
    if first is not None:
        one, other = first
        at, marks = other.kinds.index(HELD), other.kinds.count(HELD)
        end = at + 1 + (len(one.deltas) - len(other.deltas)) // marks
        held = tuple(zip(map(abs, one.deltas[at:end]), one.kinds[at:end], strict=True))
    for one, other in pairs:
        if one.deltas != _revealed(other, held).deltas:
            raise NotSpliceable(
                f"layers keep bytes between actions: {one.part.value} after action {one.action}"
            )
    return held


def revealed(bare: Recording, held: Held) -> Recording:
    """A recording of bare layers with what real ones hold."""
    return replace(
        bare,
        blocks=tuple(_revealed(one, held) for one in bare.blocks),
        static=_sums(bare.static, held),
        at_peak=_sums(bare.at_peak, held),
    )


def _between(recording: Recording) -> Sequence[Block]:
    """Blocks of messages, and of what is left by the step before."""
    parts = (Part.HEAD, Part.OPEN, Part.PRE, Part.GAP)
    return [one for one in recording.blocks if one.part in parts]


def _revealed(block: Block, held: Held) -> Block:
    if HELD not in block.kinds:
        return block
    deltas, kinds, places = list[int](), list[str](), list[int]()
    for delta, kind in zip(block.deltas, block.kinds, strict=True):
        places.append(len(deltas))
        for nbytes, of in held if kind == HELD else ((1, kind),):
            deltas.append(delta * nbytes)
            kinds.append(of)
    messages = [places[at] for at in block.messages]
    return replace(block, deltas=deltas, kinds=kinds, messages=messages)


def _sums(sums: Counter[str], held: Held) -> Counter[str]:
    found = Counter(sums)
    marks = found.pop(HELD, 0)
    for nbytes, kind in held:
        found[kind] += marks * nbytes
    return +found
