"""The effect of changes of a job: the changed job is predicted anew.

    for effect in effects(changes(layout, args), pricer, now, memory_limit):
        effect.change.what, effect.seconds, effect.peak_bytes

What a start would refuse has the reason instead. Predictions cost seconds, so changes that cannot
be among those that help most have none:

* those whose lower bound (:mod:`mindspeed.planner.search.bounds`) needs more memory than there is;
* for a job that fits, those that only save memory, which are never faster under the model, and
  those whose lower bound is slower than the best so far;
* for one that does not fit, those that never save memory.

The others are estimated from fewer runs; those that help most are predicted as exactly as the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mindspeed.errors import MindSpeedError
from mindspeed.planner.changes import MEMORY_ONLY, SPEED, Change
from mindspeed.planner.search.bounds import NEAR, Bound
from mindspeed.planner.search.result import GIB

INTERRUPTED = "interrupted"
LEAST = 0.001
"""Part of a step's time that a change has to save."""


class Priced(Protocol):
    """The part of a :class:`mindspeed.planner.composed.price.Prediction` that effects use."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest rank."""


class Pricer(Protocol):
    """Predicts changed jobs; raises a MindSpeedError for those that cannot start."""

    def estimate(self, change: Change) -> Priced:
        """Predict from fewer runs."""

    def price(self, change: Change) -> Priced:
        """Predict as exactly as the job."""


class Bounding(Protocol):
    """Bounds of changed jobs."""

    def __call__(self, change: Change) -> Bound:
        """Lower bound of the changed job."""

    def refine(self, change: Change) -> None:
        """Tighten its bound."""


class NoBounds:
    """Nothing is known before a prediction."""

    def __call__(self, change: Change) -> Bound:
        """0."""
        return Bound()

    def refine(self, change: Change) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Effect:
    """Predicted effect of a change.

    Attributes:
        change: that is made.
        seconds: of a step after it.
        peak_bytes: of the fullest rank after it.
        exact: figures are no estimates.
        refused: why a job with it cannot start, or cannot be counted; empty otherwise.
        skipped: why it cannot be among the most helpful, so that it was not predicted.
    """

    change: Change
    seconds: float = 0.0
    peak_bytes: float = 0.0
    exact: bool = False
    refused: str = ""
    skipped: str = ""

    @property
    def predicted(self) -> bool:
        """Whether it has figures."""
        return not (self.refused or self.skipped)


def effects(
    found: Sequence[Change],
    pricer: Pricer,
    now: Priced,
    limit: float,
    *,
    bounds: Bounding | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    count: int = 3,
) -> list[Effect]:
    """The effect of each change, predicted where it can be among those that help most.

    Those that help most, and for a job that none of them makes fit the nearest one, are exact;
    others are estimates. Ctrl-C ends it: changes that were not predicted by then say so, and those
    that help most may be estimates.

    Args:
        found: changes.
        pricer: predicts a changed job.
        now: the job as it is.
        limit: bytes of a rank.
        bounds: of changed jobs.
        progress: progress callback.
        count: how many of the most helpful are wanted.
    """
    run = _Effects(pricer, now, limit, bounds or NoBounds(), count)
    ordered = sorted(found, key=lambda one: _promise(run.bounds(one), run.fits))
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
        run.interrupt(found)
    progress(len(found), len(found))
    return [run.results[id(change)] for change in found]


@dataclass
class _Effects:
    """Effects so far.

    Attributes:
        results: by the identity of the change.
    """

    pricer: Pricer
    now: Priced
    limit: float
    bounds: Bounding
    count: int
    results: dict[int, Effect] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """The job as it is."""
        return self.now.peak_bytes <= self.limit

    def look_at(self, change: Change) -> None:
        """Estimate a change, unless it was, or cannot help."""
        known = self.results.get(id(change))
        if known is not None and not known.skipped:
            return
        reason = self._why_not(change)
        if not reason:
            self.bounds.refine(change)
            reason = self._why_not(change)
        if reason:
            self.results[id(change)] = Effect(change, skipped=reason)
            return
        self._predict(change, self.pricer.estimate, exact=False)
        one = self.results[id(change)]
        if one.predicted and abs(one.peak_bytes / self.limit - 1) <= NEAR:
            self.make_exact(change)  # an estimate does not tell whether it fits

    def _why_not(self, change: Change) -> str:
        bound = self.bounds(change)
        helpful = most_helpful(self.results.values(), self.now, self.limit, self.count)
        beaten = max(o.seconds for o in helpful) if len(helpful) == self.count else math.inf
        slowest = min(self.now.seconds, beaten) if self.fits else beaten
        reason = _why_not(change, bound, self.fits, self.limit)
        if not reason and bound.seconds >= slowest:
            reason = f"takes at least {bound.seconds:.4g} s"
        return reason

    def uncertain(self) -> Effect | None:
        """One of the most helpful whose figures are estimates."""
        found = most_helpful(self.results.values(), self.now, self.limit, self.count)
        if not found and not self.fits:
            close = nearest(self.results.values(), self.now)
            found = [] if close is None else [close]
        return next((one for one in found if not one.exact), None)

    def make_exact(self, change: Change) -> None:
        """Predict a change again."""
        self._predict(change, self.pricer.price, exact=True)

    def _predict(self, change: Change, price: Callable[[Change], Priced], exact: bool) -> None:
        try:
            found = price(change)
        except MindSpeedError as error:
            self.results[id(change)] = Effect(change, refused=str(error))
        else:
            self.results[id(change)] = Effect(change, found.seconds, found.peak_bytes, exact)

    def interrupt(self, found: Sequence[Change]) -> None:
        """Say of which changes nothing is known."""
        for change in found:
            self.results.setdefault(id(change), Effect(change, skipped=INTERRUPTED))


def _promise(bound: Bound, fits: bool) -> tuple[float, float]:
    both = bound.seconds, bound.nbytes
    return both if fits else both[::-1]


def _why_not(change: Change, bound: Bound, fits: bool, limit: float) -> str:
    """Why a change cannot help; empty if it may."""
    if fits and change.may == MEMORY_ONLY:
        return "only saves memory, and the job fits"
    if not fits and change.may == SPEED:
        return "saves no memory, and the job does not fit"
    if bound.nbytes > limit:
        return f"needs at least {bound.nbytes / GIB:.3f} GiB"
    return ""


def most_helpful(
    found: Iterable[Effect], now: Priced, limit: float, count: int = 3
) -> list[Effect]:
    """The changes with which the job fits that help most, the fastest first.

    A job that fits needs those that make it faster; for one that does not, each that makes it fit
    is a help.

    Args:
        found: effects.
        now: the job as it is.
        limit: bytes of a rank.
        count: how many.
    """
    fitting = [one for one in found if one.predicted and one.peak_bytes <= limit]
    if now.peak_bytes <= limit:
        least = now.seconds * (1 - LEAST)
        fitting = [one for one in fitting if one.seconds <= least]
    return sorted(fitting, key=lambda one: (one.seconds, one.peak_bytes))[:count]


def nearest(found: Iterable[Effect], now: Priced) -> Effect | None:
    """The change that needs least memory, for a job that no single change makes fit."""
    smaller = [one for one in found if one.predicted and one.peak_bytes < now.peak_bytes]
    return min(smaller, key=lambda one: (one.peak_bytes, one.seconds), default=None)
