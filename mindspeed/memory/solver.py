"""The fastest choice of what layers keep, recompute and offload within a memory budget.

Every layer has candidate plans: bytes ``A`` kept until its backward, seconds ``T`` added to a
micro-batch, bytes ``W`` that exist only while this layer is in backward, host bytes ``H``. A layer
of a stage is held for ``k`` micro-batches at once (:mod:`mindspeed.memory.in_flight`).

    minimise    sum T + max(0, seconds_per_host_byte * sum H - hidden_seconds)
    such that   static + sum k A + max W <= budget,    sum k H <= host_budget

Method: for a cap on ``W``, a dynamic programme over the layers, whose states are the undominated
sums of bytes and seconds so far (Nemhauser and Ullmann, "Discrete dynamic programming and capital
allocation", 1969). Ranges of caps are solved with the largest of them allowed and the smallest
charged, which no choice of the range beats; a range whose answer does not fit is halved. Sums are
exact, so a solution is always feasible; it is optimal for any number of distinct transients as long
as there are at most ``MOST_STATES`` states and ``MOST_CANDIDATES`` undominated candidates a layer.
Beyond that, of states with nearly equal bytes only the fastest survives, and the one with the
fewest bytes: without a host budget, a device budget that can be met is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindspeed.errors import ConfigError

MOST_STATES = 4096
MOST_CANDIDATES = 64
MOST_HOST_CELLS = 32
_UNLIMITED = 2**62


@dataclass(frozen=True)
class Candidate:
    """One plan of a layer, for one micro-batch.

    Attributes:
        plan: what is done; only passed through.
        kept: bytes kept on the device until the layer's backward.
        seconds: time added, apart from copies to the host.
        transient: bytes that a re-run rebuilds, held while the layer is in backward.
        host: bytes in host memory.
    """

    plan: Any
    kept: int
    seconds: float
    transient: int = 0
    host: int = 0


@dataclass(frozen=True)
class LayerCosts:
    """A layer: its candidate plans, and the micro-batches for which it is held at once."""

    candidates: tuple[Candidate, ...]
    in_flight: int = 1


@dataclass(frozen=True)
class Budget:
    """What a plan may use, and what copies to the host cost.

    Attributes:
        device: bytes of the device.
        static: bytes of the device that no plan changes: weights, gradients, optimizer.
        host: bytes of host memory; None: unlimited.
        seconds_per_host_byte: a host byte travels to the host and back.
        hidden_seconds: copies that the computation of a micro-batch hides.
    """

    device: int
    static: int = 0
    host: int | None = None
    seconds_per_host_byte: float = 0.0
    hidden_seconds: float = 0.0

    def exposed_seconds(self, host: Any) -> Any:
        """Time by which copies of ``host`` bytes prolong a micro-batch."""
        return np.maximum(0.0, host * self.seconds_per_host_byte - self.hidden_seconds)


@dataclass(frozen=True)
class Solution:
    """The candidate of every layer.

    Attributes:
        chosen: one for each layer; of equal layers those that keep least come first.
        peak: bytes of the device, static ones included.
        host: bytes of host memory, of all micro-batches in flight.
        seconds: added to a micro-batch.
    """

    chosen: tuple[Candidate, ...]
    peak: int
    host: int
    seconds: float

    def runs(self) -> list[tuple[int, Any]]:
        """Run lengths ``[(layers, plan), ...]`` of the chosen plans."""
        return [
            (len(list(group)), plan)
            for plan, group in itertools.groupby(self.chosen, key=lambda one: one.plan)
        ]


class NothingFits(ConfigError):
    """No choice of plans fits into the budget.

    Attributes:
        smallest: the choice with the smallest peak; None if the host budget excludes every one.
    """

    def __init__(self, budget: Budget, smallest: Solution | None) -> None:
        self.smallest = smallest
        if smallest is None:
            text = f"no plan fits into {_mib(budget.host or 0)} of host memory"
        else:
            plans = ", ".join(f"{layers} x {plan}" for layers, plan in smallest.runs())
            text = (
                f"no plan fits into {_mib(budget.device)}: the smallest predicted peak is "
                f"{_mib(smallest.peak)}, {_mib(budget.static)} of it without activations; "
                f"it is reached with {plans}"
            )
        super().__init__(text)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def solve(layers: Sequence[LayerCosts], budget: Budget) -> Solution:
    """The fastest plans within ``budget``.

    Raises:
        NothingFits: no choice fits; has the one with the smallest peak.
    """
    caps = _caps(layers)
    ranges = [(0.0, 0, len(caps))]  # lower bound of seconds, first and last cap (excluded)
    best: tuple[float, list[int]] | None = None
    while ranges:
        bound, first, end = heapq.heappop(ranges)
        if best is not None and bound >= best[0]:
            break
        # No choice with its largest transient in the range is faster than the fastest that may
        # have the largest of them and is charged the smallest.
        free = budget.device - budget.static - caps[first]
        states = _states(layers, caps[end - 1], free, budget.host)
        if states is None:
            continue
        seconds = states[-1].seconds + budget.exposed_seconds(states[-1].moved)
        fastest = int(np.lexsort((states[-1].kept, states[-1].moved, seconds))[0])
        bound = float(seconds[fastest])
        if best is not None and bound >= best[0]:
            continue
        choices = _choices(states, fastest)
        if _solution(layers, choices, budget).peak <= budget.device:
            best = bound, choices
        elif end - first > 1:
            middle = (first + end) // 2
            heapq.heappush(ranges, (bound, first, middle))
            heapq.heappush(ranges, (bound, middle, end))
    if best is None:
        raise NothingFits(budget, smallest_peak(layers, budget))
    return _solution(layers, best[1], budget)


def smallest_peak(layers: Sequence[LayerCosts], budget: Budget) -> Solution | None:
    """The solution with the fewest device bytes; None if the host has too little for any."""
    ordered = [_in_order_of_seconds(layer) for layer in layers]
    timeless = [
        replace(one, candidates=tuple(replace(plan, seconds=0.0) for plan in one.candidates))
        for one in ordered
    ]
    found: Solution | None = None
    for cap in _caps(layers):
        if found is not None and budget.static + cap >= found.peak:
            break  # the transient alone is as large, and so are all that follow
        states = _states(timeless, cap, _UNLIMITED, budget.host)
        if states is not None:
            solution = _solution(ordered, _choices(states, int(np.argmin(states[-1].kept))), budget)
            if found is None or solution.peak < found.peak:
                found = solution
    return found


def _in_order_of_seconds(layer: LayerCosts) -> LayerCosts:
    """Of plans with equal bytes the fastest comes first, and is chosen."""
    return replace(layer, candidates=tuple(sorted(layer.candidates, key=lambda one: one.seconds)))


def undominated(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in every cost, at most ``MOST_CANDIDATES``, fewest bytes first."""
    front: list[Candidate] = []
    for one in sorted(candidates, key=_costs):
        if not any(all(np.less_equal(_costs(other), _costs(one))) for other in front):
            front.append(one)
    if len(front) <= MOST_CANDIDATES:
        return tuple(front)
    fastest = min(front, key=lambda one: (one.seconds, one.kept))
    every = np.linspace(0, len(front) - 1, MOST_CANDIDATES - 1).astype(int)
    return tuple(sorted({front[i] for i in every} | {fastest}, key=_costs))


def _costs(one: Candidate) -> tuple[float, ...]:
    return (one.kept, one.seconds, one.transient, one.host)


@dataclass(frozen=True)
class _States:
    """Undominated sums over the first layers; arrays of one entry per state."""

    kept: np.ndarray  # device bytes of all micro-batches in flight
    host: np.ndarray  # host bytes of all micro-batches in flight
    moved: np.ndarray  # host bytes of one micro-batch
    seconds: np.ndarray
    before: np.ndarray  # index of the state of the layers before
    choice: np.ndarray  # index of the candidate of the last layer

    def take(self, which: np.ndarray) -> _States:
        return _States(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def _caps(layers: Sequence[LayerCosts]) -> list[int]:
    """All values that the largest transient may have, in order."""
    return sorted({one.transient for layer in layers for one in layer.candidates}) or [0]


def _states(
    layers: Sequence[LayerCosts], cap: int, device: int, host: int | None
) -> list[_States] | None:
    """The states after no layer, one layer, ..., all layers; None if nothing fits."""
    host = _UNLIMITED if host is None else host
    allowed = [[one for one in layer.candidates if one.transient <= cap] for layer in layers]
    if device < 0 or not all(allowed):
        return None
    counts = [layer.in_flight for layer in layers]
    least = [k * min(one.kept for one in some) for k, some in zip(counts, allowed, strict=True)]
    least_host = [
        k * min(one.host for one in some) for k, some in zip(counts, allowed, strict=True)
    ]
    zero = np.zeros(1, dtype=np.int64)
    states = [_States(zero, zero, zero, np.zeros(1), zero, zero)]
    for index, (layer, some) in enumerate(zip(layers, allowed, strict=True)):
        grown = _grow(states[-1], layer, some)
        rest, rest_host = sum(least[index + 1 :]), sum(least_host[index + 1 :])
        fits = np.flatnonzero((grown.kept <= device - rest) & (grown.host <= host - rest_host))
        if not len(fits):
            return None
        states.append(_thinned(_undominated_states(grown.take(fits))))
    return states


def _grow(states: _States, layer: LayerCosts, some: Sequence[Candidate]) -> _States:
    """Every state with every one of ``some`` candidates of the next layer."""
    kept = np.array([one.kept for one in some], dtype=np.int64) * layer.in_flight
    host = np.array([one.host for one in some], dtype=np.int64)
    indices = np.array([layer.candidates.index(one) for one in some])
    return _States(
        kept=np.add.outer(states.kept, kept).ravel(),
        host=np.add.outer(states.host, host * layer.in_flight).ravel(),
        moved=np.add.outer(states.moved, host).ravel(),
        seconds=np.add.outer(states.seconds, [one.seconds for one in some]).ravel(),
        before=np.repeat(np.arange(len(states.kept)), len(some)),
        choice=np.tile(indices, len(states.kept)),
    )


def _undominated_states(states: _States) -> _States:
    """Of states with equal host bytes those that are faster than all with fewer device bytes."""
    order = np.lexsort((states.seconds, states.kept, states.moved, states.host))
    states = states.take(order)
    starts = (np.diff(states.host, prepend=-1) != 0) | (np.diff(states.moved, prepend=-1) != 0)
    keep = np.empty(len(order), dtype=bool)
    edges = [*np.flatnonzero(starts), len(order)]
    for start, end in itertools.pairwise(edges):
        best = np.minimum.accumulate(states.seconds[start:end])
        keep[start], keep[start + 1 : end] = True, best[1:] < best[:-1]
    return states.take(np.flatnonzero(keep))


def _thinned(states: _States) -> _States:
    """At most about ``MOST_STATES``: the fastest for each cell of device and host bytes."""
    if len(states.kept) <= MOST_STATES:
        return states
    host_cells = min(MOST_HOST_CELLS, len(np.unique(states.host)))
    cell = _cells(states.host, host_cells) * MOST_STATES + _cells(
        states.kept, MOST_STATES // host_cells
    )
    fastest = np.lexsort((states.seconds, cell))
    first = np.flatnonzero(np.diff(cell[fastest], prepend=-1))
    return states.take(np.union1d(fastest[first], [np.argmin(states.kept), np.argmin(states.host)]))


def _cells(values: np.ndarray, count: int) -> np.ndarray:
    """The index of each value's cell among ``count`` of equal width."""
    low, high = int(values.min()), int(values.max())
    return (values - low) * count // (high - low + 1)


def _choices(states: Sequence[_States], index: int) -> list[int]:
    """The candidates that led to state ``index`` of the last layer."""
    found = []
    for layer in reversed(states[1:]):
        found.append(int(layer.choice[index]))
        index = int(layer.before[index])
    return found[::-1]


def _solution(layers: Sequence[LayerCosts], choices: Sequence[int], budget: Budget) -> Solution:
    """Of equal layers, which may exchange their plans, those that keep least come first."""
    chosen = [layer.candidates[i] for layer, i in zip(layers, choices, strict=True)]
    places: dict[LayerCosts, list[int]] = {}
    for place, layer in enumerate(layers):
        places.setdefault(layer, []).append(place)
    for equal in places.values():
        ordered = sorted((chosen[place] for place in equal), key=_costs)
        for place, one in zip(equal, ordered, strict=True):
            chosen[place] = one
    counts = [layer.in_flight for layer in layers]
    kept = sum(k * one.kept for k, one in zip(counts, chosen, strict=True))
    exposed = budget.exposed_seconds(sum(one.host for one in chosen))
    return Solution(
        chosen=tuple(chosen),
        peak=budget.static + kept + max((one.transient for one in chosen), default=0),
        host=sum(k * one.host for k, one in zip(counts, chosen, strict=True)),
        seconds=sum(one.seconds for one in chosen) + float(exposed),
    )
