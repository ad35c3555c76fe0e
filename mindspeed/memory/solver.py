"""The fastest choice of what layers keep, recompute and offload within a memory budget.

Every layer has candidate plans: bytes ``A`` kept until its backward, seconds ``T`` added to a
micro-batch, bytes ``W`` that its backward needs beyond what is held when it begins, host bytes
``H``. A layer is held for ``k`` micro-batches at once (:mod:`mindspeed.memory.in_flight`). When a
layer is in backward, later layers of its micro-batch are done, and what they kept is free:

    minimise    sum T + max(0, seconds_per_host_byte * sum H - hidden_seconds)
    such that   static + (k - 1) sum A + (A_1 + ... + A_i) + W_i <= budget      for every layer i
                k sum H <= host_budget

So early layers may keep more than late ones. Layers of several chunks on a stage, whose ``k``
differ, count as kept while any is in backward, an upper bound: ``sum k A + max W <= budget``.

Method: with caps on ``sum A`` and on ``A_1 + ... + A_i + W_i``, a dynamic programme over the layers
in their order, whose states are the undominated sums of bytes and seconds so far (Nemhauser and
Ullmann, "Discrete dynamic programming and capital allocation", 1969). Ranges of ``sum A`` are
solved with the largest sum allowed and the smallest charged for the other micro-batches, which no
choice of the range beats; a range whose answer does not fit is divided. The smallest
peak is found the same way over ranges of the second cap. Sums are exact, so a solution is always
feasible; it is optimal as long as there are at most ``MOST_STATES`` states and ``MOST_RUNS``
ranges. Beyond that, of states with nearly equal bytes only the fastest survives, and the one with
the fewest bytes: without a host budget, a device budget that can be met is.
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
MOST_HOST_CELLS = 32
MOST_RUNS = 64
CLOSE = 1 - 1e-6
_UNLIMITED = 2**62


@dataclass(frozen=True)
class PlanCandidate:
    """One plan of a layer, for one micro-batch.

    Attributes:
        plan: what is done; only passed through.
        kept: bytes kept on the device until the layer's backward.
        seconds: time added, apart from copies to the host.
        transient: bytes that the layer's backward needs beyond those held when it begins.
        host: bytes in host memory.
    """

    plan: Any
    kept: int
    seconds: float
    transient: int = 0
    host: int = 0


@dataclass(frozen=True)
class LayerCosts:
    """A layer: its candidate plans, the micro-batches for which it is held at once, its chunk."""

    candidates: tuple[PlanCandidate, ...]
    in_flight: int = 1
    chunk: int = 0


@dataclass(frozen=True)
class Budget:
    """Limits of a plan, and cost of copies to the host.

    Attributes:
        device: bytes of the device.
        static: bytes of the device that no plan changes: weights, gradients, optimizer.
        head: bytes that the loss needs beyond what all layers keep.
        front: bytes that are needed before the first layer, when it is through its backward.
        host: bytes of host memory; None: unlimited.
        seconds_per_host_byte: a host byte travels to the host and back.
        hidden_seconds: copies that the computation of a micro-batch hides.
    """

    device: int
    static: int = 0
    head: int = 0
    front: int = 0
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
        chosen: one for each layer.
        peak: bytes of the device, static ones included.
        host: bytes of host memory, of all micro-batches in flight.
        seconds: added to a micro-batch.
    """

    chosen: tuple[PlanCandidate, ...]
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


@dataclass(frozen=True)
class _Stage:
    """Rule by which bytes of layers add up.

    Attributes:
        weights: of the kept bytes of each layer in their sum.
        others: how often the sum counts for micro-batches that are not in backward.
        placed: 1 where a layer in backward needs what is kept up to it, 0 where all counts.
        head: of the budget.
        front: of the budget.
    """

    weights: tuple[int, ...]
    others: int
    placed: int
    head: int
    front: int

    @classmethod
    def of(cls, layers: Sequence[LayerCosts], budget: Budget) -> _Stage:
        counts, ends = [layer.in_flight for layer in layers], (budget.head, budget.front)
        if len({(layer.in_flight, layer.chunk) for layer in layers}) == 1:
            return cls((1,) * len(counts), counts[0] - 1, 1, *ends)
        return cls(tuple(counts), 1, 0, *ends)

    def least_kept(self, layers: Sequence[LayerCosts]) -> int:
        """The smallest sum of kept bytes."""
        return self.kept([min(one.candidates, key=lambda x: x.kept) for one in layers])

    def kept(self, chosen: Sequence[PlanCandidate]) -> int:
        """The sum of kept bytes."""
        return sum(k * one.kept for k, one in zip(self.weights, chosen, strict=True))

    def most(self, chosen: Sequence[PlanCandidate]) -> int:
        """The most that is needed for a micro-batch in backward."""
        sums = [0, *itertools.accumulate(one.kept * self.placed for one in chosen)]
        needs = (kept + one.transient for kept, one in zip(sums[1:], chosen, strict=True))
        return max(self.front, sums[-1] + self.head, *needs)

    def most_kept(self, most: int) -> int:
        """The largest sum of kept bytes with which no more than ``most`` is needed at the ends."""
        if self.front > most:
            return -1
        return most - self.head if self.placed or self.head > most else _UNLIMITED

    def need(self, chosen: Sequence[PlanCandidate]) -> int:
        """Bytes at the peak of a step, without static ones."""
        return self.others * self.kept(chosen) + self.most(chosen)


def peak(layers: Sequence[LayerCosts], chosen: Sequence[PlanCandidate], budget: Budget) -> int:
    """Bytes of the device at the peak of a step."""
    return budget.static + _Stage.of(layers, budget).need(chosen)


def solve(layers: Sequence[LayerCosts], budget: Budget) -> Solution:
    """The fastest plans within ``budget``.

    Raises:
        NothingFits: no choice fits; has the one with the smallest peak.
    """
    smallest = smallest_peak(layers, budget)
    if smallest is None or smallest.peak > budget.device:
        raise NothingFits(budget, smallest)
    stage, free = _Stage.of(layers, budget), budget.device - budget.static
    columns, best = _columns(layers, stage), None
    # Lower bound of seconds, smallest and largest sum of kept bytes.
    ranges = [(0.0, stage.least_kept(layers), free // max(1, stage.others + stage.placed))]
    for _ in range(MOST_RUNS):
        if not ranges or (best is not None and ranges[0][0] >= best.seconds * CLOSE):
            break
        _, first, last = heapq.heappop(ranges)
        # No choice with its sum in the range is faster than the fastest that may have the largest
        # sum and is charged the smallest for other micro-batches.
        states = _states(layers, columns, stage, free - stage.others * first, last, budget.host)
        if states is None:
            continue
        exposed = states[-1].seconds + budget.exposed_seconds(states[-1].moved)
        fastest = int(np.lexsort((states[-1].kept, states[-1].moved, exposed))[0])
        bound, kept = float(exposed[fastest]), int(states[-1].kept[fastest])
        if best is not None and bound >= best.seconds * CLOSE:
            continue
        solution = _solution(layers, _choices(states, fastest), budget)
        if solution.peak <= budget.device:
            best = solution
        else:
            middle = max(kept, (first + last + 1) // 2)
            heapq.heappush(ranges, (bound, first, middle - 1))
            heapq.heappush(ranges, (bound, middle, last))
    return best or smallest


def smallest_peak(layers: Sequence[LayerCosts], budget: Budget) -> Solution | None:
    """The solution with the fewest device bytes; None if the host has too little for any."""
    stage = _Stage.of(layers, budget)
    columns = _columns(layers, stage)

    def fewest_kept(most: int) -> tuple[int, int, list[int]] | None:
        """Kept bytes, the most that a layer needs in backward, and the choice."""
        choices = _fewest_kept(layers, columns, stage, most, budget.host)
        if choices is None:
            return None
        chosen = [layer.candidates[i] for layer, i in zip(layers, choices, strict=True)]
        return stage.kept(chosen), stage.most(chosen), choices

    found = fewest_kept(_UNLIMITED)
    if found is None:
        return None
    kept, most, best = found
    smallest = stage.others * kept + most
    # Lower bound of the peak, smallest and largest need in backward, fewest kept bytes with it.
    ranges = [(stage.others * kept, min(most, 0), most - 1, kept)]
    while ranges and ranges[0][0] < smallest:
        _, low, high, least = heapq.heappop(ranges)
        middle = (low + high) // 2
        if middle < high:
            upper = stage.others * least + middle + 1
            heapq.heappush(ranges, (upper, middle + 1, high, least))
        if (found := fewest_kept(middle)) is None:
            continue
        kept, most, choices = found
        if stage.others * kept + most < smallest:
            smallest, best = stage.others * kept + most, choices
        if most > low:
            heapq.heappush(ranges, (stage.others * kept + low, low, most - 1, kept))
    return _solution(layers, best, budget)


def _costs(one: PlanCandidate) -> tuple[float, ...]:
    return (one.kept, one.seconds, one.transient, one.host)


@dataclass(frozen=True)
class _States:
    """Undominated sums over the first layers; arrays of one entry per state."""

    kept: np.ndarray  # device bytes, as :class:`_Stage` weighs them
    host: np.ndarray  # host bytes of all micro-batches in flight
    moved: np.ndarray  # host bytes of one micro-batch
    seconds: np.ndarray
    before: np.ndarray  # index of the state of the layers before
    choice: np.ndarray  # index of the candidate of the last layer

    def take(self, which: np.ndarray) -> _States:
        return _States(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class _Columns:
    """The undominated candidates of a layer, one entry each, those that keep least first."""

    kept: np.ndarray  # weighted
    need: np.ndarray  # in backward, of this layer alone
    host: np.ndarray
    seconds: np.ndarray
    index: np.ndarray  # among all candidates

    @classmethod
    def of(cls, layer: LayerCosts, weight: int, placed: int) -> _Columns:
        def costs(one: PlanCandidate) -> tuple[float, ...]:
            need = one.transient + placed * one.kept
            return one.kept * weight, need, one.host, one.seconds

        front: list[tuple[float, ...]] = []
        for index, one in sorted(enumerate(layer.candidates), key=lambda x: (costs(x[1]), x[0])):
            mine = costs(one)
            if not any(all(a <= b for a, b in zip(x, mine, strict=False)) for x in front):
                front.append((*mine, index))
        columns = list(zip(*front, strict=True))
        kept, need, host, places = (np.array(columns[i], dtype=np.int64) for i in (0, 1, 2, 4))
        return cls(kept, need, host, np.array(columns[3], dtype=np.float64), places)

    def take(self, which: np.ndarray) -> _Columns:
        return _Columns(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def _columns(layers: Sequence[LayerCosts], stage: _Stage) -> list[_Columns]:
    known: dict[LayerCosts, _Columns] = {}
    for layer, weight in zip(layers, stage.weights, strict=True):
        if layer not in known:
            known[layer] = _Columns.of(layer, weight, stage.placed)
    return [known[layer] for layer in layers]


def _states(
    layers: Sequence[LayerCosts],
    columns: Sequence[_Columns],
    stage: _Stage,
    most: int,
    kept: int,
    host: int | None,
) -> list[_States] | None:
    """The states after no layer, one layer, ..., all layers; None if nothing fits."""
    host, kept = _UNLIMITED if host is None else host, min(kept, stage.most_kept(most))
    allowed = [one.take(np.flatnonzero(one.need <= most)) for one in columns]
    if kept < 0 or not all(len(one.kept) for one in allowed):
        return None
    counts = [layer.in_flight for layer in layers]
    least = [int(one.kept.min()) for one in allowed]
    least_host = [k * int(one.host.min()) for k, one in zip(counts, allowed, strict=True)]
    zero = np.zeros(1, dtype=np.int64)
    states = [_States(zero, zero, zero, np.zeros(1), zero, zero)]
    for index, some in enumerate(allowed):
        before = states[-1]
        grown = _grow(before, some, counts[index])
        need = np.add.outer(stage.placed * before.kept, some.need).ravel()
        rest, rest_host = sum(least[index + 1 :]), sum(least_host[index + 1 :])
        fits = np.flatnonzero(
            (need <= most) & (grown.kept <= kept - rest) & (grown.host <= host - rest_host)
        )
        if not len(fits):
            return None
        states.append(_thinned(_undominated_states(grown.take(fits))))
    return states


def _fewest_kept(
    layers: Sequence[LayerCosts],
    columns: Sequence[_Columns],
    stage: _Stage,
    most: int,
    host: int | None,
) -> list[int] | None:
    """Choice with the fewest kept bytes whose layers need at most ``most`` in backward.

    What an earlier layer keeps only leaves less to later ones, so without a limit of host memory
    each layer takes the first candidate that fits.
    """
    if host is not None and any(one.host.any() for one in columns):
        timeless = [replace(one, seconds=np.zeros(len(one.kept))) for one in columns]
        states = _states(layers, timeless, stage, most, _UNLIMITED, host)
        return None if states is None else _choices(states, int(np.argmin(states[-1].kept)))
    kept, found = 0, list[int]()
    for one in columns:
        fits = one.need <= most - stage.placed * kept
        if not fits.any():
            return None
        first = int(np.argmax(fits))
        kept += int(one.kept[first])
        found.append(int(one.index[first]))
    return found if kept <= stage.most_kept(most) else None


def _grow(states: _States, some: _Columns, in_flight: int) -> _States:
    """Every state with every one of ``some`` candidates of the next layer."""
    return _States(
        kept=np.add.outer(states.kept, some.kept).ravel(),
        host=np.add.outer(states.host, some.host * in_flight).ravel(),
        moved=np.add.outer(states.moved, some.host).ravel(),
        seconds=np.add.outer(states.seconds, some.seconds).ravel(),
        before=np.repeat(np.arange(len(states.kept)), len(some.kept)),
        choice=np.tile(some.index, len(states.kept)),
    )


def _undominated_states(states: _States) -> _States:
    """Keep, per number of host bytes, states faster than all with fewer device bytes."""
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
    """About ``MOST_STATES`` at most: the fastest for each cell of device and host bytes."""
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
    """The choice, with equal plans of equal layers side by side where that needs no more."""
    found = [layer.candidates[i] for layer, i in zip(layers, choices, strict=True)]
    orders = (_sorted(layers, found, False), _sorted(layers, found, True), found)
    stage = _Stage.of(layers, budget)
    chosen = min(orders, key=stage.need)
    exposed = budget.exposed_seconds(sum(one.host for one in chosen))
    return Solution(
        chosen=tuple(chosen),
        peak=budget.static + stage.need(chosen),
        host=sum(layer.in_flight * one.host for layer, one in zip(layers, chosen, strict=True)),
        seconds=sum(one.seconds for one in chosen) + float(exposed),
    )


def _sorted(
    layers: Sequence[LayerCosts], found: Sequence[PlanCandidate], most_first: bool
) -> list[PlanCandidate]:
    """The choice with the plans of equal layers in the order of their costs."""
    chosen, places = list(found), dict[LayerCosts, list[int]]()
    for place, layer in enumerate(layers):
        places.setdefault(layer, []).append(place)
    for equal in places.values():
        ordered = sorted((found[place] for place in equal), key=_costs, reverse=most_first)
        for place, one in zip(equal, ordered, strict=True):
            chosen[place] = one
    return chosen
