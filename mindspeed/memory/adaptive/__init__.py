"""Approaches a device budget from below by what steps really needed.

    profiled steps      the plan that keeps least; every candidate plan of a layer is tried
    then                solve for 80 % of the way from there to the budget
    next three steps    compare the peak with the prediction, solve for 90, 95 and 100 %

The peak of a step is predicted from what was measured of its sections
(:mod:`mindspeed.memory.adaptive.profile`), and every measured peak corrects the static bytes. The
smallest static bytes are a bound, and so is the least that a backward needs which was not measured:
a budget is refused if even with them the smallest peak is larger, or if the plan that has it was in
force and needed more. Otherwise that plan is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed.memory.runtime import MIN_BYTES
from mindspeed.memory.solver import (
    Budget,
    LayerCosts,
    NothingFits,
    PlanCandidate,
    Solution,
    peak,
    smallest_peak,
    solve,
)


@dataclass(frozen=True)
class BudgetSettings:
    """Budgets, and what may be done to stay within them.

    Attributes:
        flag: names the budget in messages.
        device_bytes: the budget of a device.
        host_bytes: of host memory.
        profiled_steps: steps in which candidate plans are tried.
        min_bytes: smaller tensors are not copied to the host.
        offload: attention and MLP may wait in host memory.
        rescue: layers may, and out-of-memory in a profiled step moves all of them there.
    """

    flag: str
    device_bytes: int
    host_bytes: int
    profiled_steps: int
    min_bytes: int = MIN_BYTES
    offload: bool = False
    rescue: bool = False


SHARES = (0.8, 0.9, 0.95, 1.0)


@dataclass
class Adaptation:
    """The plans of one rank, one after another.

    Attributes:
        layers: costs of the layers of the rank, in the order of their forward.
        budget: what may be used; ``static`` is what was measured.
        in_force: the candidate of each layer in the steps to come.
        bounds: the layers with the least that backwards need; default: all of them were measured.
        least_static: the smallest static bytes with which a measured peak was that predicted.
        solved: how often a plan was chosen.
    """

    layers: Sequence[LayerCosts]
    budget: Budget
    in_force: Sequence[PlanCandidate]
    bounds: Sequence[LayerCosts] = ()
    least_static: int | None = None
    solved: int = 0

    @property
    def finished(self) -> bool:
        """Whether no more corrections follow."""
        return self.solved == len(SHARES)

    def next(self, needed: int) -> Solution:
        """The next plan, after a step that needed so many bytes.

        Raises:
            NothingFits: no plan fits into the budget with what was measured.
        """
        self._observe(needed)
        least = smallest_peak(self.layers, self.budget)
        device = self.budget.device
        if least is not None and least.peak < device:
            device = least.peak + int(SHARES[self.solved] * (device - least.peak))
        self.solved += 1
        try:
            return self._solve(replace(self.budget, device=device))
        except NothingFits:
            untried = self._smallest_by_the_bound()
            if untried is None:
                raise
            return untried

    def after_out_of_memory(self) -> Solution:
        """A plan for 95 % of the budget, which proved too large.

        Raises:
            NothingFits: there is none.
        """
        self.budget = replace(self.budget, device=int(0.95 * self.budget.device))
        return self._solve(self.budget)

    def _smallest_by_the_bound(self) -> Solution | None:
        """The plan with the smallest peak, if it may fit by the smallest static bytes.

        Adopted for the next step, whose peak tells whether it does; None if it was in force just
        now, or no step would follow to correct it.

        Raises:
            NothingFits: it does not fit.
        """
        assert self.least_static is not None
        bound = replace(self.budget, static=self.least_static)
        smallest = smallest_peak(self.bounds or self.layers, bound)
        if smallest is None or self.finished:
            return None
        if smallest.peak > bound.device:
            raise NothingFits(bound, smallest)
        plans = [one.plan for one in smallest.chosen]
        if plans == [one.plan for one in self.in_force]:
            return None
        by_plan = [{one.plan: one for one in layer.candidates} for layer in self.layers]
        self.in_force = [known[plan] for known, plan in zip(by_plan, plans, strict=True)]
        return smallest

    def _observe(self, needed: int) -> None:
        predicted = peak(self.layers, self.in_force, self.budget)
        static = self.budget.static + needed - predicted
        before = self.budget.static if self.least_static is None else self.least_static
        self.least_static = min(before, static)
        self.budget = replace(self.budget, static=static)

    def _solve(self, budget: Budget) -> Solution:
        solution = solve(self.layers, budget)
        self.in_force = solution.chosen
        return solution
