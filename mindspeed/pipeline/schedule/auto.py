"""The fastest of the known schedules that fits in memory, by simulation.

Candidates in a loop of stages: ``flush`` with several warm-ups k and with groups of every size, of
long steps with some of all sizes and then those near the fastest; with whole backwards and with
weight gradients in idle times. On a V-shape: ``vee``, DualPipeV and every
building block (:mod:`front`). An order of another kind may be faster.

One rank of a job searches, the others take what it finds (:func:`shared`). The rank that comes
first claims the search in the store of the job. It leaves the rows there that it finds, or its
error, which all ranks raise then. Flags are read before the process groups exist, so there must be
a store by then: torchrun and our launcher open one. Without one, or where nobody answers, each rank
searches, and all find the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.job_store import store_of_ranks
from mindspeed.parsing import decode_json
from mindspeed.pipeline.schedule import orders
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.front import PricedPlan, filled, least, priced, v_orders, within
from mindspeed.pipeline.schedule.orders import Rows
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.weave import WeavingJob

_LONGEST_SEARCH = timedelta(minutes=10)
_NO_ANSWER = (dist.DistError, RuntimeError)


def shared(asked: object, search: Callable[[], Rows]) -> Rows:
    """What ``search()`` returns or raises, on one rank of the job.

    Args:
        asked: all that the result depends on, with a ``repr`` that says it.
        search: the same on every rank.

    Raises:
        ConfigError: there is no result; with the message of the rank that searched.
        RuntimeError: that rank failed otherwise.
    """
    note = _Note.of(asked)
    if note is None:
        return search()
    if note.is_mine:
        try:
            rows = search()
        except Exception as error:
            note.write({"error": str(error), "config": isinstance(error, ConfigError)})
            raise
        note.write({"rows": [" ".join(map(str, row)) for row in rows]})
        return rows
    found = note.read()
    if found is None:
        return search()
    if "error" in found:
        raise (ConfigError if found["config"] else RuntimeError)(found["error"])
    return tuple(tuple(map(Action.parse, row.split())) for row in found["rows"])


@dataclass(frozen=True)
class _Note:
    """What one rank leaves for the others.

    Attributes:
        key: in the store.
        is_mine: this rank came first, and writes it.
    """

    store: dist.Store
    key: str
    is_mine: bool

    @classmethod
    def of(cls, asked: object) -> _Note | None:
        """None: this rank is alone, or cannot reach the others."""
        key = f"mindspeed/schedule/{hashlib.sha256(repr(asked).encode()).hexdigest()}"
        try:
            store = store_of_ranks()
            if store is None:
                return None
            return cls(store, key, store.add(f"{key}/claims", 1) == 1)
        except _NO_ANSWER:
            return None

    def write(self, found: dict[str, Any]) -> None:
        """Leave it; rows of a large job are some megabytes, of which a store takes eight."""
        text = zlib.compress(json.dumps(found).encode())
        with contextlib.suppress(*_NO_ANSWER):
            self.store.set(self.key, text)  # type: ignore[arg-type]  # it takes bytes, too

    def read(self) -> dict[str, Any] | None:
        """Wait for it; None if it does not come."""
        try:
            self.store.wait([self.key], _LONGEST_SEARCH)
            text = zlib.decompress(self.store.get(self.key))
        except _NO_ANSWER:
            return None
        found: dict[str, Any] = decode_json(text)
        return found


WARMUPS = (1.0, 1.25, 1.5, 1.75, 2.0)
_ROUNDING = 1e-9
_SIZES = 24  # of groups that are tried at first, where there are more
_NEAR = 8  # that are then tried near the fastest
_BEST = 3  # sizes of which all warm-ups are tried


def fastest(
    placement: Placement,
    num_microbatches: int,
    costs: Costs,
    *,
    memory_limit: float | None = None,
    sizes: tuple[float, ...] | None = None,
    split: bool = True,
) -> Plan:
    """The plan with the shortest simulated step.

    Args:
        memory_limit: most activations of a rank, in A.
        sizes: of the micro-batches, where they differ.

    Raises:
        ConfigError: no candidate fits; names the least memory of all.
    """
    job = WeavingJob(num_microbatches, costs, sizes, whole=not split)
    return _searched(placement, job, memory_limit)


@lru_cache(maxsize=8)  # checks of flags and the first step ask for the same
def _searched(placement: Placement, job: WeavingJob, memory_limit: float | None) -> Plan:
    def search() -> orders.Rows:
        found = _Search(placement, job, memory_limit)
        if placement.loops:
            found.loops()
        else:
            found.vees()
        if not found.found:
            raise ConfigError(found.nothing(placement.loops))
        return min(found.found, key=PricedPlan.rank).plan.rows

    rows = shared((placement, job, memory_limit), search)
    return Plan(placement, rows, job.num_microbatches, job.sizes, "auto")


@lru_cache(maxsize=8)
def v_is_faster(ranks: int, num_microbatches: int, costs: Costs, memory_limit: float) -> bool:
    """Whether the fastest schedule on a V beats that of a loop with a stage on each rank.

    Args:
        memory_limit: most activations of a rank, in A.
    """
    times = []
    for placement in (Placement.v_shape(ranks), Placement.loop(ranks)):
        try:
            plan = fastest(placement, num_microbatches, costs, memory_limit=memory_limit)
        except ConfigError:
            times.append(float("inf"))
        else:
            times.append(priced(plan, costs).time)
    return times[0] < times[1] - _ROUNDING


class _Search:
    """Prices of all candidates.

    Attributes:
        found: those that fit.
        least: memory of the smallest one, in A.
    """

    def __init__(self, placement: Placement, job: WeavingJob, limit: float | None) -> None:
        self.placement, self.job, self.limit = placement, job, limit
        self.found: list[PricedPlan] = []
        self.least = float("inf")
        self._seen: set[orders.Rows] = set()

    def loops(self) -> None:
        """Groups of all sizes, larger ones later: they need more memory."""
        p, v, m = self.placement.ranks, self.placement.chunks, self.job.num_microbatches
        sizes = [p] if v == 1 else _sizes_of_groups(p, m)
        tried = _thinned(sizes, _SIZES)
        times: dict[int, float] = {}
        if self._try(tried, times) or len(sizes) == 1:
            return
        best = tried.index(min(tried, key=times.__getitem__))
        between = (tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)])
        near = [size for size in sizes if between[0] < size < between[1] and size not in times]
        if self._try(_thinned(near, _NEAR), times):
            return
        for size in sorted(times, key=times.__getitem__)[:_BEST]:
            self._group(size, WARMUPS)

    def _try(self, sizes: Sequence[int], times: dict[int, float]) -> bool:
        """Price groups of some sizes; whether a candidate is as fast as any could be."""
        few = WARMUPS if self.placement.chunks == 1 else (WARMUPS[0], WARMUPS[-1])
        for size in sizes:
            times[size] = self._group(size, few)
            if self._at_bound():
                return True
        return False

    def vees(self) -> None:
        """Orders with a name, and what a search over building blocks finds."""
        ranks = self.placement.ranks
        for name, rows in v_orders(ranks, self.job.num_microbatches, not self.job.whole):
            self._rows(rows, name)
        if self.found and self._at_bound():
            return
        limit = self.limit if self.limit is not None else float(ranks)
        if (block := within(ranks, self.job, limit)) is not None:
            self.found.append(block)
        self.least = min(self.least, least(ranks, self.job)[0])

    def nothing(self, looped: bool) -> str:
        """Why no candidate fits, and what would."""
        ranks, m = self.placement.ranks, self.job.num_microbatches
        needed, walk = least(ranks, self.job)
        text = (
            f"no pipeline schedule of {m} micro-batches on {ranks} ranks fits in {self.limit:g} A "
            "of activations (--pipeline-memory-limit); the smallest one needs "
        )
        if not looped:
            return f"{text}{self.least:g} A (building block: {walk})"
        text += f"{self.least:g} A"
        if needed > (self.limit or 0.0) + _ROUNDING:
            return text
        return f"{text}; one on a V-shape fits: --pipeline-schedule v-auto"

    def _group(self, size: int, warmups: Sequence[float]) -> float:
        """Price groups of ``size``; the shortest time of those that fit."""
        p, v, m = self.placement.ranks, self.placement.chunks, self.job.num_microbatches
        known = len(self.found)
        for warmup in warmups:
            self._rows(orders.flush(p, v, m, size, warmup))
        return min((one.time for one in self.found[known:]), default=float("inf"))

    def _rows(self, rows: orders.Rows, name: str = "auto") -> None:
        if rows in self._seen:
            return
        self._seen.add(rows)
        job = self.job
        plan = Plan(self.placement, rows, job.num_microbatches, job.sizes, name)
        whole = priced(plan, job.costs, name)
        self.least = min(self.least, whole.peak)
        if self.limit is not None and whole.peak > self.limit + _ROUNDING:
            return
        self.found.append(whole)
        if not job.whole and not whole.simulation.counts["I"]:
            caps = sorted({whole.peak, self.limit or whole.peak})
            split = [filled(plan, job.costs, cap, name) for cap in caps]
            self.found += [one for one in split if one.peak <= (self.limit or one.peak) + 1e-6]

    def _at_bound(self) -> bool:
        """Whether a candidate is as fast as any could be."""
        if not self.found:
            return False
        bound = _bound(self.found[0].plan, self.job.costs)
        return min(one.time for one in self.found) <= bound + _ROUNDING


def _bound(plan: Plan, costs: Costs) -> float:
    """Lower bound of a placement: each rank waits for its first input, then never again."""
    smallest = min(range(plan.num_microbatches), key=plan.size)
    last = plan.placement.ranks - 1
    start = sum(
        costs.seconds(plan, Action("F", stage, smallest)) + costs.latency for stage in range(last)
    )
    return start + sum(costs.seconds(plan, action) for action in plan.rows[last])


def _sizes_of_groups(p: int, m: int) -> list[int]:
    """Sizes that divide the micro-batches differently: larger groups hide more of the reduction and
    of the latency, for more memory."""
    seen: dict[tuple[range, ...], int] = {}
    for size in range(min(p, m), m + 1):
        seen.setdefault(orders.groups_of(m, size, p), size)
    return list(seen.values())


def _thinned(sizes: Sequence[int], most: int) -> list[int]:
    """Some of the sizes, with the first and the last one."""
    if len(sizes) <= most:
        return list(sizes)
    step = (len(sizes) - 1) / (most - 1)
    return [sizes[round(number * step)] for number in range(most)]
