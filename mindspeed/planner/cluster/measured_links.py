"""Fit latency and bandwidth of each level to times of collectives on this job's ranks.

A group of p ranks that crosses a single level takes (:mod:`mindspeed.planner.cluster.collectives`)

    start + steps * latency + bytes that a rank sends / bandwidth

with p - 1 steps of an all-gather or reduce-scatter and one of an all-to-all or a send. One fit over
all levels finds the start, which they share, and the latency and bandwidth of each. It minimises
relative errors, so that small messages are as important as large ones. All-reduces, whose algorithm
is unknown, are not fitted but validate the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from mindspeed.planner.cluster.collectives import Level, seconds
from mindspeed.planner.cluster.measured_device import Stopwatch

SIZES = 5
FITTED = ("all_gather", "reduce_scatter", "all_to_all", "send")
SMALLEST = 1 << 12


@dataclass(frozen=True)
class Sample:
    """A collective that was timed.

    Attributes:
        level: index of the level that its group crosses.
        payload: bytes as in :mod:`mindspeed.instruments.ledger`.
        seconds: median duration.
        spread: interquartile range relative to the median.
    """

    level: int
    op: str
    size: int
    payload: int
    seconds: float
    spread: float = 0.0

    def coefficients(self) -> tuple[int, float]:
        """Number of steps, and bytes that a rank sends."""
        others = self.size - 1
        if self.op == "all_gather":
            return others, float(others * self.payload)
        if self.op == "reduce_scatter":
            return others, others / self.size * self.payload
        if self.op == "all_to_all":
            return 1, others / self.size * self.payload
        return 1, float(self.payload)


@dataclass(frozen=True)
class Fit:
    """Fitted parameters of the links.

    Attributes:
        start: fixed seconds of every call.
        levels: ``(latency, bytes per second)`` by index of the level.
        error: median relative error of the samples.
    """

    start: float
    levels: dict[int, tuple[float, float]]
    error: float


def groups_of(world: int, node: int) -> list[list[list[int]]]:
    """Ranks of the groups of each level: all ranks of a node, then one rank of every node.

    Args:
        node: ranks of a node, a divisor of ``world``.
    """
    inside = [list(range(first, first + node)) for first in range(0, world, node)]
    across = [list(range(local, world, node)) for local in range(node)]
    return [inside, across]


def measure_links(
    groups: Sequence[Sequence[Sequence[int]]],
    where: torch.device,
    watch: Stopwatch,
    largest: int,
) -> list[Sample]:
    """Time all collectives at five sizes over every level. Collective: all ranks call it.

    Args:
        groups: groups of :func:`groups_of`; levels whose groups have one rank are skipped.
        watch: stopwatch that agrees on the number of runs.
    """
    found = []
    for level, of_level in enumerate(groups):
        if len(of_level[0]) < 2:
            continue
        made = [dist.new_group(list(ranks)) for ranks in of_level]  # by all ranks, in one order
        mine = next(i for i, ranks in enumerate(of_level) if dist.get_rank() in ranks)
        ranks, group = list(of_level[mine]), made[mine]
        for step in range(SIZES):
            nbytes = int(SMALLEST * (max(largest, SMALLEST) / SMALLEST) ** (step / (SIZES - 1)))
            nbytes = max(len(ranks), nbytes // len(ranks)) * len(ranks)
            for op in (*FITTED, "all_reduce"):
                payload = nbytes // len(ranks) if op == "all_gather" else nbytes
                dist.barrier()
                timing = watch.time(_call(op, nbytes, ranks, group, where))
                found.append(Sample(level, op, len(ranks), payload, timing.seconds, timing.spread))
        for one in made:
            dist.destroy_process_group(one) if one is not dist.GroupMember.NON_GROUP_MEMBER else 0
    return found


def _call(
    op: str, nbytes: int, ranks: Sequence[int], group: dist.ProcessGroup, where: torch.device
) -> Callable[[], object]:
    full = torch.ones(nbytes, dtype=torch.uint8, device=where)
    other = torch.empty_like(full)
    part = full[: nbytes // len(ranks)].clone()
    position = list(ranks).index(dist.get_rank())
    following, previous = ranks[(position + 1) % len(ranks)], ranks[position - 1]

    def send() -> None:
        operations = [
            dist.P2POp(dist.isend, full, following, group),
            dist.P2POp(dist.irecv, other, previous, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(other, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=group),
        "all_reduce": lambda: dist.all_reduce(full, op=dist.ReduceOp.MAX, group=group),
        "send": send,
    }
    return calls[op]


def fit(samples: Sequence[Sample]) -> Fit:
    """Fit nonnegative start, latencies and bandwidths to samples, by least squares."""
    fitted = [sample for sample in samples if sample.op in FITTED]
    levels = sorted({sample.level for sample in fitted})
    rows, wanted = [], []
    for sample in fitted:
        steps, nbytes = sample.coefficients()
        row = [1.0] + [0.0] * (2 * len(levels))
        column = 1 + 2 * levels.index(sample.level)
        row[column], row[column + 1] = float(steps), nbytes
        rows.append([value / sample.seconds for value in row])
        wanted.append(1.0)
    matrix = torch.tensor(rows, dtype=torch.float64)
    free = list(range(matrix.shape[1]))
    if all(sample.coefficients()[0] == 1 for sample in fitted):
        free.remove(0)  # with one step in every call, start and latency are the same
    solution = _not_negative(matrix, torch.tensor(wanted, dtype=torch.float64), free)
    found = {}
    for index, level in enumerate(levels):
        latency, inverse = solution[1 + 2 * index], solution[2 + 2 * index]
        fastest = max(s.coefficients()[1] / s.seconds for s in fitted if s.level == level)
        found[level] = latency, 1 / inverse if inverse > 0 else fastest
    errors = (matrix @ torch.tensor(solution, dtype=torch.float64) - 1).abs()
    return Fit(solution[0], found, float(errors.median()))


def _not_negative(matrix: torch.Tensor, wanted: torch.Tensor, free: list[int]) -> list[float]:
    """Least squares that drops columns with negative solutions, the most negative first."""
    scale = matrix.norm(dim=0).clamp_min(1e-300)
    while True:
        columns = matrix[:, free] / scale[free]
        solved = torch.linalg.lstsq(columns, wanted.unsqueeze(1)).solution.squeeze(1)
        if len(free) == 1 or float(solved.min()) >= 0:
            break
        free = [column for column in free if column != free[int(solved.argmin())]]
    result = [0.0] * matrix.shape[1]
    for column, value in zip(free, solved, strict=True):
        result[column] = max(0.0, float(value / scale[column]))
    return result


def all_reduce_error(samples: Sequence[Sample], found: Fit) -> float:
    """Median relative error of all-reduces, which were not fitted."""
    errors = []
    for sample in samples:
        if sample.op == "all_reduce":
            latency, rate = found.levels[sample.level]
            link = Level("measured", None, rate / 1e9, latency * 1e6)
            modelled = found.start + seconds(
                "all_reduce", sample.payload, range(sample.size), (link,)
            )
            errors.append(abs(modelled / sample.seconds - 1))
    return median(errors)
