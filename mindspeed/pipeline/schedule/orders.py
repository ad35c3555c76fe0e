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

from mindspeed.pipeline.schedule.actions import BACKWARD, FORWARD, Action
from mindspeed.pipeline.schedule.placement import Placement

Rows = tuple[tuple[Action, ...], ...]


def flush(p: int, v: int, m: int, g: int | None = None, k: float | None = None) -> Rows:
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
    """
    k = k if k is not None else (1.0 if v == 1 else 2.0)
    groups = _groups(m, p if g is None else g, p)
    forwards = [(chunk, i) for group in groups for chunk in range(v) for i in group]
    backwards = [(chunk, i) for group in groups for chunk in reversed(range(v)) for i in group]
    total, widest = v * m, max(map(len, groups))
    rows = []
    for rank in range(p):
        warmup = min(math.floor(k * (p - 1 - rank) + 0.5) + (v - 1) * widest, total)
        forward = [Action(FORWARD, chunk * p + rank, i) for chunk, i in forwards]
        backward = [Action(BACKWARD, chunk * p + rank, i) for chunk, i in backwards]
        rows.append(_alternate(forward, backward, warmup))
    return tuple(rows)


def forward_only(placement: Placement, m: int) -> Rows:
    """The forwards of :func:`flush`; on a V-shape all of the way down first."""
    p = placement.ranks
    looped = placement == Placement.loop(p, placement.chunks)
    groups = _groups(m, p, p) if looped else [range(m)]
    return tuple(
        tuple(Action(FORWARD, stage, i) for group in groups for stage in stages for i in group)
        for stages in placement.stages
    )


def _groups(m: int, g: int, p: int) -> list[range]:
    """Micro-batches in groups of g; the last may be smaller, but has at least p."""
    if m % g == 0 or m % g >= p:
        return [range(start, min(start + g, m)) for start in range(0, m, g)]
    count = max(m // g, 1)
    ends = [math.ceil(m * number / count) for number in range(count + 1)]
    return [range(start, end) for start, end in zip(ends, ends[1:], strict=False)]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """Some forwards, then forward and backward in turn, then the rest of the backwards."""
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    return (*row, *backwards[len(forwards) - warmup :])
