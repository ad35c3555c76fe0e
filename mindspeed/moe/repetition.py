"""What backward does again under a save policy, as actions between those of a program.

    level0   combine>  refetch>  shared_fc2  combine<  experts  refetch<  dispatch>  ...
    level1   refetch>  combine>  shared  shared_fc2  refetch<  recompute  combine<  experts  ...

The refetch is the dispatch of the layer's input, repeated; level1 also repeats the first linear
layer of routed and of shared experts. :mod:`mindspeed.moe.save` does it in the real layer.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspeed.moe.costs import BACKWARD, Costs, StageCosts, exchange, expert_work, slice_gather
from mindspeed.moe.program import Phase, Step
from mindspeed.moe.save.policy import SavePolicy
from mindspeed.moe.simulate import ChunkStep
from mindspeed.moe.sizes import Load, Sizes

Repeat = Callable[[list[ChunkStep]], list[ChunkStep]]


def repeated(policy: SavePolicy, sizes: Sizes, load: Load, costs: Costs) -> Repeat | None:
    """Insert what a policy repeats in backward; None if it does not communicate again.

    Args:
        policy: what the experts keep.
        load: rows of this rank.
        costs: of the stages of the program.
    """
    if policy.rows or "dispatch" not in costs:
        return None
    refetches = _refetches(sizes, load)
    first, second = expert_work(sizes, load.rows)
    passes = 1 if "anchor" in costs else 2  # gradients of inputs, and of weights
    again = {
        "recompute": StageCosts(backward=first),
        # The second linear layer goes backward before the rows are asked for.
        "second": StageCosts(backward=second * passes, logged="experts"),
        "activation": StageCosts(logged="recompute"),  # without a matrix product
        "first": StageCosts(backward=first * passes, silent=(BACKWARD,)),
    }
    if "shared_fc1" in costs and not policy.shared:
        again["shared_again"] = StageCosts(
            backward=costs["shared_fc1"].forward, logged="recompute_shared"
        )

    def action(name: str) -> ChunkStep:
        return ChunkStep(Step(name), 0, again[name])

    def half(number: int, phase: Phase) -> ChunkStep:
        return ChunkStep(Step(f"refetch_{number}", phase), 0, refetches[number])

    start = half(0, Phase.START)
    arrival = [half(0, Phase.FINISH)]
    for number in range(1, len(refetches)):
        arrival += [half(number, Phase.START), half(number, Phase.FINISH)]

    def level0(actions: list[ChunkStep]) -> list[ChunkStep]:
        found: list[ChunkStep] = []
        for one in actions:
            if one.step.name == "experts":
                found += [action("second"), action("activation"), *arrival, action("first")]
                continue
            found.append(one)
            if one.step == Step("combine", Phase.START):
                found.append(start)
        return found

    def level1(actions: list[ChunkStep]) -> list[ChunkStep]:
        found: list[ChunkStep] = []
        halves = any(one.step.name == "shared_fc1" for one in actions)
        for one in actions:
            if one.step == Step("combine", Phase.START):
                found += [start, one]
                found += [action("shared_again")] if halves and "shared_again" in again else []
                continue
            if one.step.name == "shared" and "shared_again" in again:
                found += [one, action("shared_again")]
                continue
            if one.step == Step("combine", Phase.FINISH):
                found += [*arrival, action("recompute")]
            found.append(one)
        return found

    return level0 if policy.fc1 else level1


def _refetches(sizes: Sizes, load: Load) -> list[StageCosts]:
    """The collectives of a dispatch, one after the other."""
    messages = [exchange("refetch.rows", sizes, load, sizes.row)[0]]
    if sizes.etp > 1:
        messages.append(slice_gather("refetch.rows", sizes, load, sizes.row)[0])
    return [StageCosts(reverses=(message,)) for message in messages]
