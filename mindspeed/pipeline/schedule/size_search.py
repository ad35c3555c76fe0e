"""The search for micro-batch sizes with which a pipeline idles least.

Start from ramps: sizes that grow over the first micro-batches and shrink over the last ones, of
every length. Then move single samples from one micro-batch to another as long as that helps
(steepest descent). A plan of whole backwards runs the same actions in the same order whatever the
sizes are, so all neighbours of a candidate are priced at once. Weight gradients take other places
where sizes differ: the best few are then priced as the schedule would run them, beside equal sizes.
Deterministic; 0.2 s for p = 8, m = 24, some seconds for p = 16, m = 64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARDS,
    REDUCE,
)
from mindspeed.pipeline.schedule.costs import Costs, parse_costs
from mindspeed.pipeline.schedule.csv_file import read_plan
from mindspeed.pipeline.schedule.micro_batch_sizes import parse_sizes, step_shape
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan, memory_limit
from mindspeed.pipeline.schedule.simulate import simulate

Sizes = npt.NDArray[np.int64]  # [candidates, m]
_STARTS = 8  # candidates from which single samples are moved
_FLOORS = (0.2, 0.4, 0.6)  # smallest size of a ramp, as a part of the largest


def sizes_of_arguments(arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Samples of each micro-batch of a step; None without ``--optimized-pipeline``.

    Args:
        arguments: Megatron's, and our flags, by name.

    Raises:
        ConfigError: they cannot be determined.
    """
    if not arguments.get("optimized_pipeline"):
        return None
    shape = step_shape(arguments)
    if shape is None:
        raise ConfigError(
            "--optimized-pipeline needs --global-batch-size, --micro-batch-size and the "
            "data-parallel size"
        )
    if given := arguments.get("manual_mbs"):
        try:
            return parse_sizes(given, shape)
        except ValueError as error:
            raise ConfigError(f"--manual-mbs: {error}") from None
    chunks = arguments.get("virtual_pipeline_model_parallel_size") or 1
    request, limit = _request(arguments), None
    if (factor := arguments.get("pipeline_memory_limit")) is not None:
        limit = memory_limit(factor, shape.ranks, chunks) * shape.micro_batch_size
    return search_sizes(
        shape.ranks,
        chunks,
        shape.num_microbatches,
        shape.samples,
        request.costs,
        memory_limit=limit,
        request=request,
    )


def _request(arguments: Mapping[str, Any]) -> ScheduleRequest:
    """The schedule that will run."""
    kind = arguments.get("pipeline_schedule")
    if kind is None:
        others = {"use_nanopipe": "nanopipe", "fold_mode": "aiao"}
        kind = next((name for flag, name in others.items() if arguments.get(flag)), "1f1b")
    costs = parse_costs(arguments.get("pipeline_costs") or "1,1,1")
    if kind.endswith(".csv"):
        return ScheduleRequest(plan=read_plan(Path(kind)), costs=costs)
    group = arguments.get("microbatch_group_size_per_vp_stage")
    return ScheduleRequest(kind, group_size=None if kind == "aiao" else group, costs=costs)


@functools.lru_cache(maxsize=8)
def search_sizes(
    ranks: int,
    chunks: int,
    num_microbatches: int,
    samples: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    request: ScheduleRequest | None = None,
) -> tuple[int, ...]:
    """The best sizes found for a schedule.

    Args:
        ranks: p.
        chunks: v.
        num_microbatches: m.
        samples: their sum.
        costs: of one sample through all stages of a rank.
        memory_limit: most samples whose activations are alive on a rank.
        request: the schedule; 1F1B, or interleaved 1F1B, by default.

    Returns:
        m sizes; all as equal as possible if nothing is better within the limit.
    """
    request = request or ScheduleRequest()
    plan = build_plan(request, ranks, chunks, num_microbatches)
    prices = Prices(plan, costs or Costs(), memory_limit)
    found = {_rounded([1.0] * num_microbatches, samples): None}
    found |= dict.fromkeys(_ramps(ranks * chunks, num_microbatches, samples))
    candidates = np.array(list(found))
    best = [prices.best(candidates[:1])]
    for start in prices.order(candidates)[:_STARTS]:
        best.append(improved(candidates[start], prices))
    if prices.exact:
        _, sizes = min(best, key=lambda one: one[0])
        return tuple(map(int, sizes))
    equal, *others = dict.fromkeys(tuple(map(int, sizes)) for _, sizes in best)
    shape = ranks, chunks, num_microbatches
    return min((equal, *others), key=lambda sizes: _as_run(request, shape, sizes, memory_limit))


def _as_run(
    request: ScheduleRequest,
    shape: tuple[int, int, int],
    sizes: tuple[int, ...],
    memory_limit: float | None,
) -> tuple[float, ...]:
    """Price of sizes with the plan that they get: as :class:`Prices`, in micro-batches."""
    mean = sum(sizes) / len(sizes)
    limit = None if memory_limit is None else memory_limit / mean
    try:
        plan = build_plan(replace(request, sizes=sizes, memory_limit=limit), *shape)
    except ConfigError:  # its order needs more memory
        return (math.inf,) * 3
    found = simulate(plan, request.costs)
    return 0.0, round(found.makespan, 9), max(found.peak_memory)


def improved(sizes: Sequence[int] | Sizes, prices: Prices) -> tuple[tuple[float, ...], Sizes]:
    """Move single samples between micro-batches as long as the price falls.

    Returns:
        Price and sizes from which no single move is better.
    """
    current = np.asarray(sizes)
    price, _ = prices.best(current[None])
    while len(neighbours := _neighbours(current)):
        cheaper, sizes = prices.best(neighbours)
        if cheaper >= price:
            break
        price, current = cheaper, sizes
    return price, current


def _neighbours(sizes: Sizes) -> Sizes:
    """All sizes after one sample has moved; every size stays at least 1."""
    givers, takers = np.nonzero(~np.eye(len(sizes), dtype=bool))
    kept = sizes[givers] > 1
    givers, takers = givers[kept], takers[kept]
    moved = np.repeat(sizes[None], len(givers), axis=0)
    each = np.arange(len(givers))
    moved[each, givers] -= 1
    moved[each, takers] += 1
    return moved


def _ramps(stages: int, m: int, samples: int) -> Iterator[tuple[int, ...]]:
    longest = min(2 * stages, m // 2)
    for head in range(longest + 1):
        for tail in range(longest + 1):
            for floor in _FLOORS:
                shape = [1.0] * m
                for i in range(head):
                    shape[i] = floor + (1 - floor) * i / head
                for i in range(tail):
                    shape[m - 1 - i] = floor + (1 - floor) * i / tail
                yield _rounded(shape, samples)


def _rounded(shape: Sequence[float], samples: int) -> tuple[int, ...]:
    """Whole sizes of at least 1 in the proportions of ``shape`` (largest remainders)."""
    exact = [part * samples / sum(shape) for part in shape]
    sizes = [max(1, int(size)) for size in exact]
    remainders = sorted(range(len(sizes)), key=lambda i: int(exact[i]) - exact[i])
    for index in range(samples - sum(sizes)):
        sizes[remainders[index % len(sizes)]] += 1
    while sum(sizes) > samples:
        sizes[sizes.index(max(sizes))] -= 1
    return tuple(sizes)


class Prices:
    """Prices of many sizes with one plan: (samples over the memory limit, T, peak samples).

    Attributes:
        exact: other sizes get the same plan.

    Args:
        costs: of one sample.
        memory_limit: in samples; None has no limit.
    """

    def __init__(self, plan: Plan, costs: Costs, memory_limit: float | None = None) -> None:
        timeline = simulate(plan, costs).timeline
        started = [
            (one.start, one.end, r, one.action)
            for r, row in enumerate(timeline)
            for one in row
            if one.action.op != REDUCE
        ]
        self._order = [(rank, action) for _, _, rank, action in sorted(started)]
        self._plan, self._costs, self._limit = plan, costs, memory_limit
        self.exact = all(action.op in "FB" for _, action in self._order)

    def order(self, sizes: Sizes) -> list[int]:
        """Candidates by their price, the cheapest first."""
        rows = self(sizes)
        return sorted(range(len(sizes)), key=lambda index: tuple(rows[index]))

    def best(self, sizes: Sizes) -> tuple[tuple[float, ...], Sizes]:
        """The cheapest candidate, the first of several: its price and sizes."""
        rows = self(sizes)
        index = int(np.lexsort(rows.T[::-1])[0])
        return tuple(rows[index].tolist()), sizes[index]

    def __call__(self, sizes: Sizes) -> npt.NDArray[np.float64]:
        """Prices ``[candidates, 3]``."""
        placement, count = self._plan.placement, len(sizes)
        clock = np.zeros((placement.ranks, count))
        alive, peak = np.zeros_like(clock), np.zeros_like(clock)
        ends: dict[tuple[bool, int, int], npt.NDArray[np.float64]] = {}
        for rank, action in self._order:
            op, stage, i = action
            assert i is not None
            size = sizes[:, i].astype(np.float64)
            forward = op in FORWARDS
            before = stage - 1 if forward else stage + 1
            source = None if op == BACKWARD_WEIGHT else ends.get((forward, before, i))
            start = clock[rank]
            if source is not None:
                other = placement.rank(before) != rank
                start = np.maximum(start, source + other * self._costs.latency)
            clock[rank] = end = start + self._costs.seconds(self._plan, action) * size
            if op != BACKWARD_WEIGHT:
                ends[forward, stage, i] = end
            share = self._costs.share(self._plan, stage) * size
            alive[rank] += share if forward else 0.0 if op == BACKWARD_INPUT else -share
            np.maximum(peak[rank], alive[rank], out=peak[rank])
        worst = peak.max(0)
        over = np.zeros(count) if self._limit is None else np.maximum(0, worst - self._limit)
        return np.stack([over, clock.max(0), worst], axis=1)
