"""What backward does again under a save policy, as actions between those of a program.

    level0   combine>  refetch>  shared_fc2  combine<  experts  refetch<  dispatch>  ...
    level1   refetch>  combine>  shared  shared_fc2  refetch<  recompute  combine<  experts  ...

The refetch is the dispatch of the layer's input, repeated; level1 also repeats the first linear
layer of routed and of shared experts. :mod:`mindspeed.moe.save` does it in the real layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mindspeed.moe.costs import Costs, Policy, StageCosts, expert_work
from mindspeed.moe.messages import exchange, slice_gather
from mindspeed.moe.program import Phase, Step
from mindspeed.moe.sizes import Load, Sizes
from mindspeed.moe.timeline import Action

Repeat = Callable[[list[Action]], list[Action]]
ARRIVALS = ("gather", "dispatch", "tokens")  # the last one before the experts


def repeated(policy: Policy, sizes: Sizes, load: Load, costs: Costs) -> Repeat | None:
    """What a policy adds to backward; None if it does not communicate again.

    Args:
        policy: what the experts keep.
        sizes: of the layer.
        load: rows of this rank.
        costs: of the stages of the program.
    """
    if policy not in ("level0", "level1") or "dispatch" not in costs:
        return None
    refetch = _refetch(sizes, load)
    first, _ = expert_work(sizes, load.rows)
    again = {"recompute": StageCosts(backward=first)}
    if "shared_fc1" in costs:
        again["shared_again"] = StageCosts(backward=costs["shared_fc1"].forward)

    def action(name: str, phase: Phase = Phase.COMPUTE) -> Action:
        return Action(Step(name, phase), 0, refetch if name == "refetch" else again[name])

    def level0(actions: list[Action]) -> list[Action]:
        found, waited = [], False
        for one in actions:
            if one.step.name in ARRIVALS and one.step.phase is Phase.START and not waited:
                found.append(action("refetch", Phase.FINISH))
                waited = True
            found.append(one)
            if one.step == Step("combine", Phase.START):
                found.append(action("refetch", Phase.START))
        return found

    def level1(actions: list[Action]) -> list[Action]:
        found: list[Action] = []
        for one in actions:
            if one.step == Step("combine", Phase.START):
                found += [action("refetch", Phase.START), one]
                found += [action("shared_again")] if "shared_again" in again else []
                continue
            if one.step == Step("combine", Phase.FINISH):
                found += [action("refetch", Phase.FINISH), action("recompute")]
            found.append(one)
        return found

    return level0 if policy == "level0" else level1


def _refetch(sizes: Sizes, load: Load) -> StageCosts:
    messages = []
    if sizes.ep > 1:
        messages.append(exchange("refetch.rows", sizes, load, sizes.row)[0])
    if sizes.etp > 1:
        messages.append(slice_gather("refetch.rows", sizes, load, sizes.row)[0])
    return StageCosts(reverses=tuple(replace(message, name="refetch.rows") for message in messages))
