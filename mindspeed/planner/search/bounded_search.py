"""Branch and bound over the layouts of a space: finds what an exhaustive search would find.

Layouts with one key are priced from the same counts. Counting takes seconds, pricing milliseconds,
a bound microseconds. Keys are visited in the order of their fastest bound. A layout is skipped if

    bytes    the bound exceeds the memory limit
    seconds  the bound is slower than the k-th best and no tie of the best

Bounds have several stages. The first is a formula. Where it does not rule a key out, cheap runs
tighten it (:meth:`~mindspeed.planner.search.evaluator.JobEvaluator.refine`): first one that many
keys share, then its own. After each the key is queued again.

A layout that would be among the best is checked by a dry run first, so only layouts that can start
are proposed or displace others. :class:`Refusals` predicts what a dry run would refuse.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mindspeed.errors import MindSpeedError
from mindspeed.planner.cluster import GIB
from mindspeed.planner.layout import Layout
from mindspeed.planner.search.result import TOLERANCE, features, preference

if TYPE_CHECKING:
    from mindspeed.planner.search.evaluator import JobEvaluator

ENOUGH = 3
_SAME = ("devices", "global_batch_size")


class Refusals:
    """Refusals of dry runs, and predictions from them.

    A dry run says why it refuses a layout, but not which other layouts it would refuse. The guess
    is the narrowest condition that all layouts refused with the same message share, such as
    ``cp 4, cp_algorithm ulysses``. It is used once :data:`ENOUGH` layouts were refused, and as long
    as no layout that meets it was accepted. It is no proof; but most messages name the sizes that
    they are about.
    """

    def __init__(self) -> None:
        self._shared: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
        self._known: set[tuple[Any, ...]] = set()  # keys with enough layouts
        self._accepted: list[Mapping[str, Any]] = []

    def accept(self, layout: Layout) -> None:
        """Record a layout that can start."""
        self._accepted.append(_values(layout))

    def add(self, layout: Layout, message: str) -> None:
        """Record a layout that cannot start, with the message."""
        values = _values(layout)
        for key in [(message,), *((message, name, value) for name, value in values.items())]:
            count, shared = self._shared.get(key, (0, values))
            common = {name: value for name, value in shared.items() if values[name] == value}
            self._shared[key] = count + 1, common
            if count + 1 >= ENOUGH and common:
                self._known.add(key)
            else:
                self._known.discard(key)

    def predicted(self, layout: Layout) -> str | None:
        """The message with which a start would refuse the layout; None: unknown."""
        values = _values(layout) if self._known else {}
        for key in self._known:
            shared = self._shared[key][1]
            if _matches(values, shared) and not any(
                _matches(one, shared) for one in self._accepted
            ):
                return str(key[0])
        return None


def _values(layout: Layout) -> dict[str, Any]:
    found = {item.name: getattr(layout, item.name) for item in fields(layout)}
    return {name: value for name, value in found.items() if name not in _SAME}


def _matches(values: Mapping[str, Any], shared: Mapping[str, Any]) -> bool:
    return all(values[name] == value for name, value in shared.items())


Progress = Callable[[int, int], None]
Found = tuple[Layout, Any]

SLOWER = "cannot be faster than the best"


@dataclass
class Outcome:
    """State of a search.

    Attributes:
        best: the best layouts, ties first.
        priced: all priced layouts that fit and were not refused.
        removed: number of skipped layouts, by reason.
        measured: number of keys that were counted.
    """

    best: list[Found] = field(default_factory=list)
    priced: list[Found] = field(default_factory=list)
    refused: set[Layout] = field(default_factory=set)
    removed: Counter[str] = field(default_factory=Counter)
    measured: int = 0
    interrupted: bool = False

    def improve(self, layout: Layout, found: Any) -> None:
        """Replace the figures of a layout that was priced."""
        for ones in (self.best, self.priced):
            ones[:] = [(one, found if one == layout else known) for one, known in ones]

    def drop(self, layout: Layout, reason: str) -> None:
        """Remove a layout that was priced."""
        self.removed[reason] += 1
        self.best = [one for one in self.best if one[0] != layout]
        self.priced = [one for one in self.priced if one[0] != layout]


def search(
    layouts: Iterable[Layout],
    evaluator: JobEvaluator,
    memory_limit: float,
    *,
    top: int = 5,
    error: float = 0.0,
    progress: Progress = lambda done, of: None,
) -> Outcome:
    """Find the best layouts.

    Args:
        evaluator: bounds, checks, counts and prices them.
        memory_limit: bytes of a rank.
        error: relative distance from the limit within which priced bytes, which may be estimates,
            decide nothing: such layouts are priced exactly in the end, if they are fast enough.
    """
    run = _Search(evaluator, memory_limit, top, error)
    groups = run.groups(layouts)
    progress(0, len(groups))
    try:
        for done in run.taken(groups):
            progress(done, len(groups))
        run.settle()
        run.finish()
    except KeyboardInterrupt:
        run.outcome.interrupted = True
        run.finish(ask=False)
    progress(len(groups), len(groups))
    return run.outcome


_Group = list[tuple[float, Layout]]
"""Layouts with one key and their bounds of time, the fastest first."""


@dataclass
class _Search:
    _evaluator: JobEvaluator
    _limit: float
    _top: int
    _error: float
    _times: list[float] = field(default_factory=list)  # of accepted layouts, sorted
    _accepted: set[Layout] = field(default_factory=set)
    _refusals: Refusals = field(default_factory=Refusals)
    _waiting: set[Layout] = field(default_factory=set)
    _near: list[Found] = field(default_factory=list)  # as near the limit as estimates err
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def _need(self) -> str:
        return f"need more than {self._limit / GIB:.4g} GiB"

    def groups(self, layouts: Iterable[Layout]) -> list[_Group]:
        """Group layouts by key, without those whose weights alone do not fit."""
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
        """Take the groups in the order of their bounds; yields the number of groups done."""
        heap = [(_order(group[0]), number, group, False) for number, group in enumerate(groups)]
        heapq.heapify(heap)
        done = 0
        while heap:
            _, number, group, refined = heapq.heappop(heap)
            if not refined and group[0][0] <= self.threshold:
                group, refined = self._refined(group)
                if group:
                    heapq.heappush(heap, (_order(group[0]), number, group, refined))
                    continue
            self.take(group)
            done += 1
            yield done

    def _refined(self, group: _Group) -> tuple[_Group, bool]:
        """The group with tighter bounds, without those that cannot fit, and if it is the end."""
        last = False
        with suppress(MindSpeedError):  # the error is reported when its runs are counted
            last = not self._evaluator.refine(group[0][1])
        found: _Group = []
        for least, layout in group:
            bound = self._evaluator.bound(layout)
            if bound.nbytes > self._limit:
                self._skip(layout, self._need)
            else:
                found.append((max(least, bound.seconds), layout))
        return sorted(found, key=_order), last

    @property
    def threshold(self) -> float:
        """Seconds above which a layout is neither among the best nor a tie."""
        if len(self._times) < self._top:
            return float("inf")
        return max(self._times[self._top - 1], self._times[0] * (1 + TOLERANCE))

    def take(self, group: _Group) -> None:
        """Count the runs of a group once, and price its layouts, unless they are too slow."""
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
        if abs(found.peak_bytes / self._limit - 1) < self._error:
            self._near.append((layout, found))
        else:
            self._admit(layout, found)

    def settle(self) -> None:
        """Price those exactly that are near the limit, unless they are too slow."""
        for layout, estimate in sorted(self._near, key=lambda one: one[1].seconds):
            if estimate.seconds > self.threshold:
                self._skip(layout, SLOWER)
                continue
            try:
                self._admit(layout, self._evaluator.exact(layout))
            except MindSpeedError as error:
                self._skip(layout, f"cannot be priced: {_first_line(error)}")

    def _admit(self, layout: Layout, found: Any) -> None:
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
        """Whether the layout can start; cached."""
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
        """Order the priced layouts.

        Args:
            ask: check those that were not checked; else leave them out.
        """
        outcome = self.outcome
        if self._waiting:
            outcome.removed["not reached before the interruption"] += len(self._waiting)
        known = [found.seconds for one, found in outcome.priced if one in self._accepted]
        within = min(known, default=float("inf")) * (1 + TOLERANCE)

        def order(one: Found) -> tuple[Any, ...]:
            seconds = one[1].seconds
            return seconds if seconds > within else 0.0, *preference(*one)

        for one in sorted(outcome.priced, key=order):
            if len(outcome.best) == self._top:
                break
            if ask:
                self._waiting.add(one[0])
            if one[0] in self._accepted or (ask and self._accepts(one[0])):
                outcome.best.append(one)
        outcome.priced = [one for one in outcome.priced if one[0] not in outcome.refused]


def _order(one: tuple[float, Layout]) -> tuple[float, int, int, int, str]:
    """Order by bounds, then by what they ignore: small tensor and context groups cost less."""
    seconds, layout = one
    return seconds, layout.tp * layout.cp, features(layout), -layout.mbs, str(layout)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
