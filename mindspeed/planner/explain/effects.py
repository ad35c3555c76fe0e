"""Predicted effects of changes of a job.

    for effect in effects(changes(layout, args), predictor, now, memory_limit):
        effect.change.what, effect.seconds, effect.peak_bytes

A change with which the job cannot start has the reason instead. Predictions cost seconds, so
changes that cannot be among those that help most are skipped:

* changes whose lower bound (:mod:`mindspeed.planner.search.bounds`) exceeds the memory limit;
* for a job that fits, changes that only save memory, which are never faster under the model, and
  changes whose lower bound is slower than the best so far;
* for a job that does not fit, changes that never save memory.

The others are estimated from fewer runs; those that help most are predicted as exactly as the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed.errors import MindSpeedError
from mindspeed.planner.cluster import GIB
from mindspeed.planner.explain.changes import MEMORY_ONLY, SPEED, Change
from mindspeed.planner.search.bounds import NEAR, Bound

if TYPE_CHECKING:
    from mindspeed.planner.explain.predictor import Predictor
    from mindspeed.planner.time.prediction import Prediction

INTERRUPTED = "interrupted"
COUNT = 3
"""The most helpful changes that are looked for."""
LEAST = 0.001
"""Fraction of a step's time that a change has to save."""


@dataclass(frozen=True)
class Effect:
    """Predicted effect of a change.

    Attributes:
        refused: reason why the changed job cannot start, or cannot be counted; empty otherwise.
        skipped: reason why the change cannot be among the most helpful; empty otherwise.
    """

    change: Change
    seconds: float = 0.0
    peak_bytes: float = 0.0
    exact: bool = False
    refused: str = ""
    skipped: str = ""

    @property
    def predicted(self) -> bool:
        """Whether the effect has figures."""
        return not (self.refused or self.skipped)


def effects(
    found: Sequence[Change],
    predictor: Predictor,
    now: Prediction,
    limit: float,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Effect]:
    """Predict the effect of each change that can be among those that help most.

    Those that help most are exact, and so is the nearest one if none makes the job fit; others are
    estimates. Ctrl-C ends it: changes that were not predicted by then say so, and those that help
    most may be estimates.

    Args:
        limit: bytes of a rank.
    """
    run = _Effects(predictor, now, limit)
    ordered = sorted(found, key=run.promise)
    try:
        while True:
            for change in ordered:
                if id(change) not in run.results:
                    progress(len(run.results), len(found))
                run.look_at(change)
            uncertain = run.uncertain()
            if uncertain is None:
                break
            run.make_exact(uncertain.change)
    except KeyboardInterrupt:
        pass
    progress(len(found), len(found))
    return [run.results.get(id(one), Effect(one, skipped=INTERRUPTED)) for one in found]


@dataclass
class _Effects:
    """Effects so far.

    Attributes:
        results: effects, by the identity of the change.
    """

    predictor: Predictor
    now: Prediction
    limit: float
    results: dict[int, Effect] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the unchanged job fits."""
        return self.now.peak_bytes <= self.limit

    def bound(self, change: Change) -> Bound:
        """Bound a change; overlaps hide at most the waits for other replicas."""
        found = self.predictor.bound(change)
        if not change.flags:
            return found
        rest = self.now.seconds - self.now.exposed.get("data parallel", 0.0)
        return Bound(max(found.seconds, rest), found.nbytes)

    def promise(self, change: Change) -> tuple[float, float]:
        """Sort key of changes: what the job lacks comes first."""
        bound = self.bound(change)
        both = bound.seconds, bound.nbytes
        return both if self.fits else both[::-1]

    def look_at(self, change: Change) -> None:
        """Estimate a change, unless it was estimated before or cannot help."""
        known = self.results.get(id(change))
        if known is not None and not known.skipped:
            return
        reason = self._why_not(change)
        if not reason:
            self.predictor.refine(change)
            reason = self._why_not(change)
        if reason:
            self.results[id(change)] = Effect(change, skipped=reason)
            return
        self._predict(change, self.predictor.estimate, exact=False)
        one = self.results[id(change)]
        if one.predicted and abs(one.peak_bytes / self.limit - 1) <= NEAR:
            self.make_exact(change)  # an estimate does not decide whether it fits

    def _why_not(self, change: Change) -> str:
        """The reason why a change cannot help; empty if it may."""
        fits = self.fits
        if fits and change.may == MEMORY_ONLY:
            return "only saves memory, and the job fits"
        if not fits and change.may == SPEED:
            return "saves no memory, and the job does not fit"
        bound = self.bound(change)
        if bound.nbytes > self.limit:
            return f"needs at least {bound.nbytes / GIB:.3f} GiB"
        helpful = most_helpful(self.results.values(), self.now, self.limit)
        beaten = max(o.seconds for o in helpful) if len(helpful) == COUNT else math.inf
        slowest = min(self.now.seconds, beaten) if fits else beaten
        return f"takes at least {bound.seconds:.4g} s" if bound.seconds >= slowest else ""

    def uncertain(self) -> Effect | None:
        """One of the most helpful whose figures are estimates."""
        found = most_helpful(self.results.values(), self.now, self.limit)
        if not found and not self.fits:
            close = nearest(self.results.values(), self.now)
            found = [] if close is None else [close]
        return next((one for one in found if not one.exact), None)

    def make_exact(self, change: Change) -> None:
        """Predict a change without estimates."""
        self._predict(change, self.predictor.price, exact=True)

    def _predict(self, change: Change, price: Callable[[Change], Prediction], exact: bool) -> None:
        try:
            found = price(change)
        except MindSpeedError as error:
            self.results[id(change)] = Effect(change, refused=str(error))
        else:
            self.results[id(change)] = Effect(change, found.seconds, found.peak_bytes, exact)


def most_helpful(found: Iterable[Effect], now: Prediction, limit: float) -> list[Effect]:
    """The :data:`COUNT` changes with which the job fits that help most, the fastest first.

    If the unchanged job fits, changes have to make it faster; otherwise each that makes it fit
    helps.
    """
    fitting = [one for one in found if one.predicted and one.peak_bytes <= limit]
    if now.peak_bytes <= limit:
        least = now.seconds * (1 - LEAST)
        fitting = [one for one in fitting if one.seconds <= least]
    return sorted(fitting, key=lambda one: (one.seconds, one.peak_bytes))[:COUNT]


def nearest(found: Iterable[Effect], now: Prediction) -> Effect | None:
    """The change that needs least memory, for a job that no single change makes fit."""
    smaller = [one for one in found if one.predicted and one.peak_bytes < now.peak_bytes]
    return min(smaller, key=lambda one: (one.peak_bytes, one.seconds), default=None)
