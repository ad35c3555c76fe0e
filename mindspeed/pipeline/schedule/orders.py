"""Base orders: which forwards and backwards a rank runs, in closed form.

Every function returns one row per rank of whole forwards and backwards; :mod:`fill` may split the
backwards later. p ranks with v stages each, m micro-batches.

``flush`` is the family of Megatron's schedules: 1F1B, interleaved 1F1B with groups of any size, and
everything between its minimal (k = 1) and its latency-tolerant (k = 2) warm-up.

Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters" (2021);
``schedules.get_schedule_table`` of Megatron-LM.
"""

from __future__ import annotations

import math
from itertools import pairwise

from mindspeed.pipeline.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
)
from mindspeed.pipeline.schedule.placement import Placement

Rows = tuple[tuple[Action, ...], ...]


def flush(
    p: int, v: int, m: int, g: int | None = None, k: float | None = None, more: int = 0
) -> Rows:
    """Groups of g micro-batches pass all chunks, then one forward and one backward in turn.

    Rank r starts with k (p - 1 - r) + (v - 1) g forwards.

    Args:
        p: ranks.
        v: stages of each rank; stage s is on rank s mod p.
        m: micro-batches.
        g: group size, p by default; m is breadth-first. Where m / g leaves a rest below p, the
            groups are as even as possible instead.
        k: 1 needs least memory, 2 hides latency; any number between. Default: 1 for v = 1, else 2,
            as Megatron has it.
        more: further forwards before the first backward; with k = 2 and one of them, forwards and
            backwards can be pairs (:mod:`.pairs`).
    """
    groups = groups_of(m, p if g is None else g, p)
    forwards = [(chunk, i) for group in groups for chunk in range(v) for i in group]
    backwards = [(chunk, i) for group in groups for chunk in reversed(range(v)) for i in group]
    rows = []
    for rank, warmup in enumerate(warmups(p, v, m, g, k, more)):
        forward = [Action(FORWARD, chunk * p + rank, i) for chunk, i in forwards]
        backward = [Action(BACKWARD, chunk * p + rank, i) for chunk, i in backwards]
        rows.append(_alternate(forward, backward, warmup))
    return tuple(rows)


def warmups(
    p: int, v: int, m: int, g: int | None = None, k: float | None = None, more: int = 0
) -> tuple[int, ...]:
    """Forwards of each rank before the first backward of :func:`flush`; ``v m``: all of them."""
    k = k if k is not None else (1.0 if v == 1 else 2.0)
    widest = max(map(len, groups_of(m, p if g is None else g, p)))
    first = (v - 1) * widest + more
    return tuple(min(round(k * (p - 1 - rank)) + first, v * m) for rank in range(p))


def breadth(p: int, v: int, m: int) -> Rows:
    """All forwards of chunk 0, then of chunk 1, and so on; then all backwards, last chunk first.

    All in, all out: a chunk's gradients are complete long before the end. Source: Lamy-Poirier,
    "Breadth-first pipeline parallelism" (2023); Fold3D (TPDS 2023).
    """
    stages = [[chunk * p + rank for chunk in range(v)] for rank in range(p)]
    return tuple(
        tuple(Action(FORWARD, stage, i) for stage in own for i in range(m))
        + tuple(Action(BACKWARD, stage, i) for stage in reversed(own) for i in range(m))
        for own in stages
    )


def vee(p: int, m: int) -> Rows:
    """The V-shape: chunk 0 goes down the ranks, chunk 1 comes up again.

    Rank r: 2 (p - r) - 1 forwards of chunk 0; r times one of chunk 1 and one of chunk 0; p - r
    times forward and backward of chunk 1; then one of each (F0 B0 F1 B1) as long as there are
    forwards; then r times a backward of each; then p - r of chunk 0. With fewer than 2p - 1
    micro-batches the surplus is left out.

    Source: Qi et al., "Pipeline parallelism with controllable memory" (2024).
    """
    full = max(m, 2 * p - 1)
    rows = []
    for rank in range(p):
        up, down = _Chunk(2 * p - 1 - rank), _Chunk(rank)
        row = [down.forward() for _ in range(2 * (p - rank) - 1)]
        for _ in range(rank):
            row += (up.forward(), down.forward())
        for _ in range(p - rank):
            row += (up.forward(), up.backward())
        while up.forwards < full:
            row += [down.forward()] if down.forwards < full else []
            row += (down.backward(), up.forward(), up.backward())
        for _ in range(rank):
            row += (down.backward(), up.backward())
        row += [down.backward() for _ in range(p - rank)]
        rows.append(tuple(action for action in row if (action.microbatch or 0) < m))
    return tuple(rows)


def dualpipev(p: int, m: int, split: bool = True, split_cooldown: bool = True) -> Rows:
    """The order that DeepSeek published as DualPipeV, for m >= 2p; V-shape.

    ``split`` puts the weight gradients where the publication has them; else all backwards are
    whole. F and B that the publication runs at the same time follow each other.

    Source: https://github.com/deepseek-ai/DualPipe (2025), and "Cut-in-half" of Qi et al.
    """
    both = split, split and split_cooldown
    return tuple(_dualpipev_row(p, m, rank, *both) for rank in range(p))


def _dualpipev_row(
    p: int, m: int, rank: int, split_warmup: bool, split_cooldown: bool
) -> tuple[Action, ...]:
    down, up = _Chunk(rank), _Chunk(2 * p - 1 - rank)
    row: list[Action] = []
    pending: list[Action] = []  # weight gradients, first in, first out

    def backward(chunk: _Chunk, split: bool = False) -> None:
        action = chunk.backward()
        if split:
            row.append(action._replace(op=BACKWARD_INPUT))
            pending.append(action._replace(op=BACKWARD_WEIGHT))
        else:
            row.append(action)

    def weight_gradient() -> None:
        if pending:
            row.append(pending.pop(0))

    rest = p - 1 - rank
    row += [down.forward() for _ in range(2 * rest)]
    for _ in range(rank + 1):
        row += (down.forward(), up.forward())
    for _ in range(rest):
        backward(up, split_warmup)
        weight_gradient()
        row.append(up.forward())
    for _ in range(m - 2 * p + rank + 1):
        row.append(down.forward())
        backward(up)
        row.append(up.forward())
        backward(down)
    for _ in range(rest):
        backward(up)
        row.append(up.forward())
        backward(down)
    for number in range(2 * (rank + 1)):  # the second half splits
        backward(down if number % 2 else up, split_cooldown and number > rank)
    for _ in range(rest):
        weight_gradient()
        backward(down, split_cooldown)
    while pending:
        weight_gradient()
    return tuple(row)


def forward_only(placement: Placement, m: int) -> Rows:
    """The forwards of :func:`flush`; outside of a loop all of a chunk before the next."""
    p = placement.ranks
    groups = groups_of(m, p, p) if placement.loops else (range(m),)
    return tuple(
        tuple(Action(FORWARD, stage, i) for group in groups for stage in stages for i in group)
        for stages in placement.stages
    )


def groups_of(m: int, g: int, p: int) -> tuple[range, ...]:
    """Micro-batches in groups of g; the last may be smaller, but has at least p."""
    if m % g == 0 or m % g >= p:
        return tuple(range(start, min(start + g, m)) for start in range(0, m, g))
    count = max(m // g, 1)
    ends = [math.ceil(m * number / count) for number in range(count + 1)]
    return tuple(range(start, end) for start, end in pairwise(ends))


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """Some forwards, then forward and backward in turn, then the rest of the backwards."""
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    return (*row, *backwards[len(forwards) - warmup :])


class _Chunk:
    """Counts the micro-batches of a stage."""

    def __init__(self, stage: int) -> None:
        self.stage, self.forwards, self.backwards = stage, 0, 0

    def forward(self) -> Action:
        self.forwards += 1
        return Action(FORWARD, self.stage, self.forwards - 1)

    def backward(self) -> Action:
        self.backwards += 1
        return Action(BACKWARD, self.stage, self.backwards - 1)
