"""The timeline of a pipeline schedule as text.

    0 F0 F1 F2 F3 .. .. .. B0 ..
    1 .. F0 F1 F2 F3 .. B0

One line per rank, time to the right, a name where an action starts: op and micro-batch, in the
second model chunk with a prime. Dots are idle time.
"""

from __future__ import annotations

from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.simulate import Simulation

_NARROWEST = 40


def timeline(simulation: Simulation, width: int) -> str:
    """Draw a simulation.

    Args:
        simulation: what ran.
        width: columns of the terminal; a schedule that needs more is drawn with more, so that no
            name is cut.
    """
    placement = simulation.plan.placement
    label = len(str(placement.ranks - 1)) + 1
    named = [
        [(one, _name(simulation, one.action)) for one in row if one.end > one.start]
        for row in simulation.timeline
    ]
    tightest = max(
        ((len(name) + 1) / (one.end - one.start) for row in named for one, name in row),
        default=1.0,
    )
    scale = max(tightest, (max(width, _NARROWEST) - label) / max(simulation.makespan, 1e-9))
    lines = []
    for rank, row in enumerate(named):
        line = f"{rank}".ljust(label)
        for one, name in row:
            start, end = (label + round(time * scale) for time in (one.start, one.end))
            line = line.ljust(start, ".") + name.ljust(end - start, "-")[:-1] + " "
        lines.append(line.rstrip())
    return "\n".join(lines)


def _name(simulation: Simulation, action: Action) -> str:
    chunk = simulation.plan.placement.chunk(action.stage)
    return f"{action.op}{action.microbatch}" + ("'" * chunk if chunk < 3 else f"'{chunk}")
