"""What backward does again under a save policy, as actions between those of a program.

    level0   combine>  refetch>  shared_fc2  combine<  experts  refetch<  dispatch>  ...
    level1   refetch>  combine>  shared  shared_fc2  refetch<  recompute  combine<  experts  ...

The refetch is the dispatch of the layer's input, repeated; level1 also repeats the first linear
layer of routed and of shared experts. :mod:`mindspeed.moe.save` does it in the real layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

    found = _Repetition(again, refetches)
    return found.level0 if policy.fc1 else found.level1


@dataclass(frozen=True)
class _Repetition:
    """Actions that are put between those of a backward.

    Attributes:
        again: what is computed a second time, by name.
        refetches: the collectives of a dispatch, one after the other.
    """

    again: Mapping[str, StageCosts]
    refetches: Sequence[StageCosts]

    def level0(self, actions: list[ChunkStep]) -> list[ChunkStep]:
        found: list[ChunkStep] = []
        for one in actions:
            if one.step.name == "experts":
                found += [self._action("second"), self._action("activation")]
                found += [*self._arrival(), self._action("first")]
                continue
            found.append(one)
            if one.step == Step("combine", Phase.START):
                found.append(self._half(0, Phase.START))
        return found

    def level1(self, actions: list[ChunkStep]) -> list[ChunkStep]:
        found: list[ChunkStep] = []
        halves = any(one.step.name == "shared_fc1" for one in actions)
        shared = [self._action("shared_again")] if "shared_again" in self.again else []
        for one in actions:
            if one.step == Step("combine", Phase.START):
                found += [self._half(0, Phase.START), one, *(shared if halves else ())]
                continue
            if one.step.name == "shared":
                found += [one, *shared]
                continue
            if one.step == Step("combine", Phase.FINISH):
                found += [*self._arrival(), self._action("recompute")]
            found.append(one)
        return found

    def _arrival(self) -> list[ChunkStep]:
        """The end of the first collective, and the others."""
        found = [self._half(0, Phase.FINISH)]
        for number in range(1, len(self.refetches)):
            found += [self._half(number, Phase.START), self._half(number, Phase.FINISH)]
        return found

    def _action(self, name: str) -> ChunkStep:
        return ChunkStep(Step(name), 0, self.again[name])

    def _half(self, number: int, phase: Phase) -> ChunkStep:
        return ChunkStep(Step(f"refetch_{number}", phase), 0, self.refetches[number])


def _refetches(sizes: Sizes, load: Load) -> list[StageCosts]:
    """The collectives of a dispatch, one after the other."""
    messages = [exchange("refetch.rows", sizes, load, sizes.row)[0]]
    if sizes.etp > 1:
        messages.append(slice_gather("refetch.rows", sizes, load, sizes.row)[0])
    return [StageCosts(reverses=(message,)) for message in messages]
