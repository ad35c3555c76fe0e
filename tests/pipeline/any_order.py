"""An order of actions for stages at any places."""

from __future__ import annotations

from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan


def greedy(placement: Placement, num_microbatches: int) -> Plan:
    """Every rank runs the latest stage whose input is there, backwards first."""
    last = placement.num_stages - 1
    rows: list[list[Action]] = [[] for _ in placement.stages]
    done: set[Action] = set()
    while len(done) < 2 * placement.num_stages * num_microbatches:
        now = set(done)
        for rank, stages in enumerate(placement.stages):
            for action in _ordered(stages, num_microbatches):
                op, stage, i = action
                if op == "B":
                    before = Action("F", last, i) if stage == last else Action("B", stage + 1, i)
                else:
                    before = None if stage == 0 else Action("F", stage - 1, i)
                if action not in done and (before is None or before in now):
                    rows[rank].append(action)
                    done.add(action)
                    break
    return Plan(placement, tuple(map(tuple, rows)), num_microbatches, name="greedy")


def _ordered(stages: tuple[int, ...], m: int) -> list[Action]:
    backward = [Action("B", stage, i) for i in range(m) for stage in stages]
    forward = [Action("F", stage, i) for stage in reversed(stages) for i in range(m)]
    return [*backward, *forward]
