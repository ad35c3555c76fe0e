"""Approaches a device budget from below by what steps really needed.

    profiled steps      the plan that keeps least; every candidate plan of a layer is tried
    then                solve for 80 % of the way from there to the budget
    next three steps    compare the peak with the prediction, solve for 90, 95 and 100 %

The peak of a step is reached while a layer is in backward, or elsewhere, such as at the loss:

    peak = sum k A + max(static + max W, elsewhere)

Every measured peak bounds both unknowns from above; the smallest bounds are used, and both rise
where a peak is larger than they predict. The plan that keeps least recomputes whole layers, so its
peak alone does not tell whether less transient memory would help: where nothing fits by the bounds,
the plan with the smallest peak for ``elsewhere = 0`` is tried before a budget is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed.memory.solver import (
    Budget,
    Candidate,
    LayerCosts,
    NothingFits,
    Solution,
    smallest_peak,
    solve,
)

SHARES = (0.8, 0.9, 0.95, 1.0)


@dataclass
class Adaptation:
    """The plans of one rank, one after another.

    Attributes:
        layers: costs of the layers of the rank.
        budget: what may be used; ``static`` is what was measured.
        in_force: the candidate of each layer in the steps to come.
        elsewhere: largest need apart from kept activations where no layer is in backward.
        solved: how often a plan was chosen.
    """

    layers: Sequence[LayerCosts]
    budget: Budget
    in_force: Sequence[Candidate]
    elsewhere: int | None = None
    solved: int = 0

    @property
    def finished(self) -> bool:
        """No more corrections."""
        return self.solved == len(SHARES)

    def next(self, peak: int) -> Solution:
        """The next plan, after a step that needed ``peak`` bytes.

        Raises:
            NothingFits: no plan fits into the budget with what was measured.
        """
        self._observe(peak)
        least = smallest_peak(self._solvable(), self.budget)
        device = self.budget.device
        if least is not None and least.peak < device:
            device = least.peak + int(SHARES[self.solved] * (device - least.peak))
        self.solved += 1
        try:
            return self._solve(replace(self.budget, device=device))
        except NothingFits:
            untried = self._smallest_if_backward_decides()
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

    def _smallest_if_backward_decides(self) -> Solution | None:
        """The plan with the smallest peak if every peak is reached while a layer is in backward.

        Adopted for the next step, whose peak tells whether it is; None if it does not fit either,
        was tried just now, or no step would follow to correct it.
        """
        smallest = smallest_peak(self.layers, self.budget)
        if smallest is None or smallest.peak > self.budget.device or self.finished:
            return None
        if [one.plan for one in smallest.chosen] == [one.plan for one in self.in_force]:
            return None
        self.in_force = smallest.chosen
        return smallest

    def _observe(self, peak: int) -> None:
        counts = [layer.in_flight for layer in self.layers]
        kept = sum(k * one.kept for k, one in zip(counts, self.in_force, strict=True))
        transient = max((one.transient for one in self.in_force), default=0)
        static, elsewhere = peak - kept - transient, peak - kept
        if self.elsewhere is not None:
            before = self.budget.static
            missing = peak - kept - max(before + transient, self.elsewhere)
            if missing > 0:
                static, elsewhere = before + missing, self.elsewhere + missing
            else:
                static, elsewhere = min(before, static), min(self.elsewhere, elsewhere)
        self.budget, self.elsewhere = replace(self.budget, static=static), elsewhere

    def _solvable(self) -> list[LayerCosts]:
        """The layers with a transient of at least what is needed elsewhere."""
        least = (self.elsewhere or 0) - self.budget.static
        return [
            replace(
                layer,
                candidates=tuple(
                    replace(one, transient=max(least, one.transient)) for one in layer.candidates
                ),
            )
            for layer in self.layers
        ]

    def _solve(self, budget: Budget) -> Solution:
        solution = solve(self._solvable(), budget)
        by_plan = [{one.plan: one for one in layer.candidates} for layer in self.layers]
        chosen = zip(by_plan, solution.chosen, strict=True)
        self.in_force = [candidates[one.plan] for candidates, one in chosen]
        return solution
