"""Splice templates along the layers and the row of a rank, and sweep once for the peak.

found = splice(templates, row, words)
found.peak, found.net, found.flops          # bytes beyond those between steps; 0 in a whole step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed.planner.compose.templates import Key, NotSpliceable, Template, Templates
from mindspeed.planner.compose.words import Word, blocks_of
from mindspeed.planner.count.recording import Part, Place, Sent, add


@dataclass
class Spliced:
    """A step.

    Attributes:
        net: bytes left at its end; 0 in a step that repeats.
        peak: most bytes alive beyond those between steps.
        at_peak: changes of the bytes of each kind until then, where they are known.
        flops: FLOPs, recomputation included.
        recomputed: FLOPs of recomputation.
        sent: communications and waits.
        seconds: seconds of each action, and of the end under -1.
    """

    net: int = 0
    peak: int = 0
    at_peak: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    recomputed: int = 0
    sent: Sent = field(default_factory=dict)
    seconds: Counter[int] = field(default_factory=Counter)


def splice(templates: Templates, row: Sequence[Place], words: Sequence[Word]) -> Spliced:
    """Repeat templates over a step.

    Args:
        templates: templates of the rank.
        row: its actions.
        words: layers of its chunks.

    Raises:
        NotSpliceable: a block of the step was not recorded, or bytes are left at its end.
    """
    found, uses = Spliced(), Counter[Key]()
    best, order = -1, list[Key]()
    for index, (action, part, layer) in enumerate(blocks_of(row, words)):
        key = templates.key(row, words, action, part, layer)
        one = templates.found.get(key)
        if one is None:
            raise NotSpliceable(f"{key}: not in the small run")
        if found.net + one.top > found.peak or best < 0:
            found.peak, best = found.net + one.top, index
        found.net += one.net
        uses[key] += 1
        order.append(key)
        found.seconds[-1 if part is Part.END else action] += one.seconds  # type: ignore[assignment]
    for key, count in uses.items():
        one = templates.found[key]
        found.flops += one.flops * count
        found.recomputed += one.recomputed * count
        add(found.sent, one.sent or {}, count)
    found.at_peak = _kinds(templates, order[: best + 1])
    if found.net:
        raise NotSpliceable(f"{found.net:+d} bytes are left at the end of the step")
    return found


def _kinds(templates: Templates, keys: Sequence[Key]) -> Counter[str]:
    """Changes of each kind until the top of the last block."""
    total: Counter[str] = Counter()
    for key, count in Counter(keys[:-1]).items():
        one = templates.found[key]
        for kind, delta in zip(one.kinds, one.deltas, strict=True):
            total[kind] += delta * count
    total.update(_until_top(templates.found[keys[-1]]))
    return total


def _until_top(one: Template) -> Counter[str]:
    now, total = 0, Counter[str]()
    at_top: Counter[str] = Counter()
    for kind, delta in zip(one.kinds, one.deltas, strict=True):
        now += delta
        total[kind] += delta
        if now == one.top:
            at_top = Counter(total)
            if now:
                break
    return at_top
