"""The timeline of a layer's program as text.

    compute  route permute ........ experts ............ unpermute | ...
    ep                     dispatch-          combine--

One line for computation and one for each group of ranks; dots are waiting, the bar is the start of
backward.
"""

from __future__ import annotations

from mindspeed.moe.costs import FORWARD
from mindspeed.moe.timeline import COMPUTE, Interval, Timeline

_NARROWEST = 60


def timeline(line: Timeline, width: int) -> str:
    """Draw a timeline.

    Args:
        line: what ran.
        width: columns of the terminal; names that do not fit are cut.
    """
    streams = list(dict.fromkeys([COMPUTE, *(one.stream for one in line.intervals)]))
    label = max(map(len, streams)) + 2
    scale = (max(width, _NARROWEST) - label - 1) / max(line.total, 1e-12)
    middle = round(line.ends[FORWARD] * scale)
    return "\n".join(
        f"{stream:<{label}}"
        + _lane([i for i in line.intervals if i.stream == stream], scale, middle)
        for stream in streams
    )


def _lane(intervals: list[Interval], scale: float, middle: int) -> str:
    cells: list[str] = []

    def fill(upto: int) -> None:
        cells.extend("|" if len(cells) + i == middle else " " for i in range(upto - len(cells)))

    for one in sorted(intervals, key=lambda one: one.start):
        start, end = round(one.start * scale), round(one.end * scale)
        fill(start)
        room = end - len(cells)
        if room <= 0:
            continue
        name = one.name.partition(".")[0]
        text = "." * room if one.kind == "wait" else name[: room - 1].ljust(room - 1, "-") + " "
        cells.extend(text)
    fill(middle + 1)
    return "".join(cells).rstrip()
