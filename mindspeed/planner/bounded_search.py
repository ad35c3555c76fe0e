"""The best layouts of a space, by lower bounds, signatures and prices: as an exhaustive search.

Layouts with one key are priced from the same counts, which cost seconds; a price costs
milliseconds, a bound microseconds. Keys are taken in the order of their fastest bound, and what
cannot come among the best is skipped:

    bytes    the bound needs more memory than there is
    seconds  the bound is slower than the k-th best, and no tie of the best

Bounds come in two stages. The first ones are formulas. Where they do not rule a key out, one cheap
run makes them tighter (:meth:`Evaluator.refine`), and the key waits again for its turn.

A layout is checked as a start would check it when it would come among the best, so that only
those that a start accepts are proposed, and only those hold others back. It is not asked about
layouts that share what those had that it refused (:mod:`.refusals`).
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from mindspeed.errors import MindSpeedError
from mindspeed.planner.bounds import Bound
from mindspeed.planner.layout import Layout
from mindspeed.planner.ranking import TOLERANCE, features, preference
from mindspeed.planner.refusals import Refusals
from mindspeed.planner.result import GIB

Progress = Callable[[int, int], None]
Found = tuple[Layout, Any]

SLOWER = "cannot be faster than the best"


class Evaluator(Protocol):
    """What a search asks about layouts."""

    def bound(self, layout: Layout) -> Bound:
        """What its prediction cannot be below."""

    def refine(self, layout: Layout) -> bool:
        """Count what makes the bounds of the layouts with its key tighter; False: nothing does."""

    def check(self, layout: Layout) -> None:
        """Raises the MindSpeedError with which a start refuses it."""

    def key(self, layout: Layout) -> Hashable:
        """Equal for layouts that are priced from the same counts."""

    def measure(self, layout: Layout) -> None:
        """Count what a layout is priced from.

        Raises:
            MindSpeedError: it cannot be counted.
        """

    def price(self, layout: Layout) -> Any:
        """The prediction of a layout with the key of one that was measured.

        Its bytes may be estimates where they are far from the memory there is.
        """

    def exact(self, layout: Layout) -> Any:
        """The prediction with bytes that are no estimates.

        Raises:
            MindSpeedError: they cannot be counted.
        """


@dataclass
class Outcome:
    """What a search has found so far.

    Attributes:
        best: the best, ties first.
        priced: all that were priced and fit, and were not refused.
        refused: those that a start refuses.
        removed: how many were skipped, by reason.
        measured: number of keys that were counted.
        interrupted: by Ctrl-C.
    """

    best: list[Found] = field(default_factory=list)
    priced: list[Found] = field(default_factory=list)
    refused: set[Layout] = field(default_factory=set)
    removed: Counter[str] = field(default_factory=Counter)
    measured: int = 0
    interrupted: bool = False

    def drop(self, layout: Layout, reason: str) -> None:
        """Take out one that was priced."""
        self.removed[reason] += 1
        self.priced = [one for one in self.priced if one[0] != layout]


def search(
    layouts: Iterable[Layout],
    evaluator: Evaluator,
    memory_limit: float,
    *,
    top: int = 5,
    tolerance: float = TOLERANCE,
    progress: Progress = lambda done, of: None,
) -> Outcome:
    """Find the best layouts.

    Args:
        layouts: the candidates.
        evaluator: bounds, checks, counts and prices.
        memory_limit: bytes of a rank.
        top: how many are wanted.
        tolerance: part of the fastest time within which others are a tie.
        progress: is told how many keys are done, and how many there are.
    """
    run = _Search(evaluator, memory_limit, top, tolerance)
    groups = run.groups(layouts)
    progress(0, len(groups))
    try:
        for done in run.taken(groups):
            progress(done, len(groups))
        run.finish()
    except KeyboardInterrupt:
        run.outcome.interrupted = True
        run.finish(ask=False)
    progress(len(groups), len(groups))
    return run.outcome


_Group = list[tuple[float, Layout]]
"""Layouts with one key and their bounds of time, the fastest first."""


class _Search:
    def __init__(
        self, evaluator: Evaluator, memory_limit: float, top: int, tolerance: float
    ) -> None:
        self._evaluator, self._limit = evaluator, memory_limit
        self._top, self._tolerance = top, tolerance
        self._times: list[float] = []  # of accepted layouts, sorted
        self._accepted: set[Layout] = set()
        self._refusals = Refusals()
        self._waiting: set[Layout] = set()
        self._need = f"need more than {memory_limit / GIB:.4g} GiB"
        self.outcome = Outcome()

    def groups(self, layouts: Iterable[Layout]) -> list[_Group]:
        """Layouts by their keys, without those whose weights alone do not fit."""
        found: dict[Hashable, _Group] = defaultdict(list)
        for layout in layouts:
            bound = self._evaluator.bound(layout)
            if bound.nbytes > self._limit:
                self.outcome.removed[f"{self._need} for weights and optimizer states alone"] += 1
            else:
                found[self._evaluator.key(layout)].append((bound.seconds, layout))
                self._waiting.add(layout)

        return [sorted(group, key=_order) for group in found.values()]

    def taken(self, groups: Iterable[_Group]) -> Iterator[int]:
        """Take the groups in the order of their bounds; yields how many are done."""
        heap = [(_order(group[0]), number, group, False) for number, group in enumerate(groups)]
        heapq.heapify(heap)
        done = 0
        while heap:
            _, number, group, refined = heapq.heappop(heap)
            if not refined and group[0][0] <= self.threshold:
                group = self._refined(group)
                if group:
                    heapq.heappush(heap, (_order(group[0]), number, group, True))
                    continue
            self.take(group)
            done += 1
            yield done

    def _refined(self, group: _Group) -> _Group:
        """The group with tighter bounds, without those that cannot fit any more."""
        try:
            if not self._evaluator.refine(group[0][1]):
                return group
        except MindSpeedError:
            return group  # what is in the way shows when its runs are counted
        found: _Group = []
        for least, layout in group:
            bound = self._evaluator.bound(layout)
            if bound.nbytes > self._limit:
                self._skip(layout, self._need)
            else:
                found.append((max(least, bound.seconds), layout))
        return sorted(found, key=_order)

    @property
    def threshold(self) -> float:
        """Seconds above which a layout is neither among the best nor a tie."""
        if len(self._times) < self._top:
            return float("inf")
        return max(self._times[self._top - 1], self._times[0] * (1 + self._tolerance))

    def take(self, group: _Group) -> None:
        """Count what the layouts of a group share, and price them, where they may matter."""
        measured, error = False, None
        for least, layout in group:
            if layout not in self._waiting:
                continue
            if least > self.threshold:
                self._skip(layout, SLOWER)
            elif error is not None:
                self._skip(layout, error)
            elif measured or self._accepts(layout):
                if not measured:
                    error, measured = self._measure(layout), True
                if error is None:
                    self._price(layout)
                else:
                    self._skip(layout, error)

    def _measure(self, layout: Layout) -> str | None:
        try:
            self._evaluator.measure(layout)
        except MindSpeedError as error:
            return f"cannot be counted: {_first_line(error)}"
        self.outcome.measured += 1
        return None

    def _price(self, layout: Layout) -> None:
        try:
            found = self._evaluator.price(layout)
        except MindSpeedError as error:
            self._skip(layout, f"cannot be priced: {_first_line(error)}")
            return
        if found.peak_bytes > self._limit:
            self._skip(layout, self._need)
            return
        better = len(self._times) < self._top or found.seconds < self._times[self._top - 1]
        if better and not self._accepts(layout):
            return
        self._waiting.discard(layout)
        self.outcome.priced.append((layout, found))
        if better:
            bisect.insort(self._times, found.seconds)

    def _accepts(self, layout: Layout) -> bool:
        """Whether a start accepts it; asked once."""
        if layout in self._accepted:
            return True
        if layout in self.outcome.refused:
            return False
        reason = self._refusals.predicted(layout)
        if reason is None:
            try:
                self._evaluator.check(layout)
            except MindSpeedError as error:
                reason = f"refused: {_first_line(error)}"
                self._refusals.add(layout, reason)
            else:
                self._refusals.accept(layout)
                self._accepted.add(layout)
                return True
        self._skip(layout, reason)
        self.outcome.refused.add(layout)
        return False

    def _skip(self, layout: Layout, reason: str) -> None:
        if layout in self._waiting:
            self._waiting.discard(layout)
            self.outcome.removed[reason] += 1

    def finish(self, ask: bool = True) -> None:
        """Order what was found.

        Args:
            ask: check those that were not checked; else they are left out.
        """
        outcome = self.outcome
        if self._waiting:
            outcome.removed["not reached before the interruption"] += len(self._waiting)
        known = [one for one in outcome.priced if one[0] in self._accepted]
        fastest = min((found.seconds for _, found in known), default=float("inf"))
        within = fastest * (1 + self._tolerance)
        ties = sorted(
            (one for one in outcome.priced if one[1].seconds <= within),
            key=lambda one: preference(*one),
        )
        others = sorted(
            (one for one in outcome.priced if one[1].seconds > within),
            key=lambda one: (one[1].seconds, *preference(*one)),
        )
        for one in [*ties, *others]:
            if len(outcome.best) == self._top:
                break
            if one[0] in self._accepted or (ask and self._late(one)):
                outcome.best.append(one)
        outcome.priced = [one for one in outcome.priced if one[0] not in outcome.refused]

    def _late(self, one: Found) -> bool:
        self._waiting.add(one[0])
        return self._accepts(one[0])


def _order(one: tuple[float, Layout]) -> tuple[float, int, int, int, str]:
    """Bounds first; they do not know that small tensor and context groups cost less."""
    seconds, layout = one
    return seconds, layout.tp * layout.cp, features(layout), -layout.mbs, str(layout)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
