"""Splice templates along the layers and the row of a rank, and sweep once for the peak.

found = splice(templates, row, words)
found.peak, found.flops                     # most bytes beyond those between steps
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mindspeed.planner.compose.templates import Key, NotSpliceable, Template, Templates, until_top
from mindspeed.planner.compose.words import Word
from mindspeed.planner.count.recording import (
    AFTER,
    EXPERT_PRODUCTS,
    PER_STEP,
    Part,
    Place,
    Sent,
    actions_of,
    add,
)


@dataclass
class Spliced:
    """A step.

    Attributes:
        net: bytes that micro-batches beyond those of the small run keep until its end.
        peak: most bytes alive beyond those between steps.
        after: bytes alive beyond those between steps when each action ends.
        tops: most bytes alive beyond those between steps in each action.
        closing_top: most bytes alive beyond those between steps after the last action.
        at_peak: changes of the bytes of each kind until then, where they are known.
        flops: FLOPs, recomputation included.
        recomputed: FLOPs of recomputation.
        sent: communications and waits until the last action ends.
        closing: those after it.
        seconds: seconds of an action by its op and chunk, where it runs alone.
        exchanges: those of them in which it waits for rows of experts.
        closing_seconds: seconds of computation before the first action and after the last one.
        row: its actions.
        kinds_after: finds the changes of the bytes of each kind when each action ends; ``other``
            where kinds are not known.
    """

    net: int = 0
    peak: int = 0
    after: list[int] = field(default_factory=list)
    tops: list[int] = field(default_factory=list)
    closing_top: int = 0
    at_peak: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    recomputed: int = 0
    sent: Sent = field(default_factory=dict)
    closing: Sent = field(default_factory=dict)
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    exchanges: dict[tuple[str, int], float] = field(default_factory=dict)
    closing_seconds: float = 0.0
    row: Sequence[Place] = ()
    kinds_after: Callable[[], list[Counter[str]]] = list


def splice(
    templates: Templates, row: Sequence[Place], words: Sequence[Word], recorded: int
) -> Spliced:
    """Repeat templates over a step.

    A micro-batch may keep bytes until the end of the step, such as its loss for the log; each of
    those that the small run had not then leaves as many.

    Args:
        templates: templates of the rank.
        row: its actions.
        words: layers of its chunks.
        recorded: micro-batches of the small run.

    Raises:
        NotSpliceable: a block of the step was not recorded, or bytes are left at its end.
    """
    found, uses = Spliced(row=row), Counter[Key]()
    found.kinds_after = partial(_kinds_after, templates, row, words)
    best, order = -1, list[Key]()
    found.tops = [0] * len(row)
    for index, (action, key) in enumerate(templates.keys(row, words)):
        one = templates.found.get(key)
        if one is None:
            raise NotSpliceable(f"{key}: not in the small run")
        if found.net + one.top > found.peak or best < 0:
            found.peak, best = found.net + one.top, index
        if key.part in (Part.GAP, Part.END):
            found.after += [found.net] * (1 + row[action].paired)
        if key.part in AFTER:
            found.closing_top = max(found.closing_top, found.net + one.top)
        elif key.part not in PER_STEP:
            top = max(found.tops[action], found.net + one.top)
            found.tops[action - row[action].paired : action + 1] = [top] * (1 + row[action].paired)
        found.net += one.net
        uses[key] += 1
        order.append(key)
    for key, count in uses.items():
        one = templates.found[key]
        found.flops += one.flops * count
        found.recomputed += one.recomputed * count
        add(found.closing if key.part in AFTER else found.sent, one.sent or {}, count)
        if key.part is not Part.GAP and key.part not in PER_STEP and key.ahead is None:
            name = key.op, key.chunk
            found.seconds[name] = found.seconds.get(name, 0.0) + one.seconds * count
            found.exchanges[name] = found.exchanges.get(name, 0.0) + _exchanges(one) * count
    alone = Counter(place[:2] for _, place, ahead in actions_of(row) if ahead is None)
    for name, count in alone.items():
        found.seconds[name] /= count
        found.exchanges[name] /= count
    found.closing_seconds = sum(templates.found[Key(part)].seconds for part in PER_STEP)
    found.at_peak = _kinds(templates, order[: best + 1])
    more = micro_batches(row) - recorded
    if found.net and (more <= 0 or found.net < 0 or found.net % more):
        raise NotSpliceable(f"{found.net:+d} bytes are left at the end of the step")
    return found


def _exchanges(one: Template) -> float:
    """Seconds of a block in which it waits for rows of experts."""
    sent = (one.sent or {}).items()
    return sum(x.waited for name, x in sent if name.routed and name != EXPERT_PRODUCTS)


def micro_batches(row: Sequence[Place]) -> int:
    """Micro-batches of a step."""
    return 1 + max(place.micro_batch for place in row)


def _kinds(templates: Templates, keys: Sequence[Key]) -> Counter[str]:
    """Changes of each kind until the top of the last block."""
    total: Counter[str] = Counter()
    for key, count in Counter(keys[:-1]).items():
        for kind, net in _net(templates.found[key]).items():
            total[kind] += net * count
    total.update(until_top(templates.found[keys[-1]])[0])
    return total


def _net(one: Template) -> Counter[str]:
    """Change of each kind over a block, where kinds are known."""
    found = Counter[str]()
    for kind, delta in zip(one.kinds, one.deltas, strict=True):
        found[kind] += delta
    return found


def _kinds_after(
    templates: Templates, row: Sequence[Place], words: Sequence[Word]
) -> list[Counter[str]]:
    """Changes of each kind until the end of each action."""
    net: dict[Key, Counter[str]] = {}
    alive, found = Counter[str](), list[Counter[str]]()
    for action, key in templates.keys(row, words):
        one = templates.found[key]
        if key not in net:
            net[key] = _net(one)
            net[key]["other"] += one.net - sum(one.deltas)
        if key.part in (Part.GAP, Part.END):
            ended = Counter({kind: n for kind, n in alive.items() if n})
            found += [ended] * (1 + row[action].paired)
        alive.update(net[key])
    return found
