"""How far predicted seconds may be off: what published runs took beside what is predicted for them.

    spread = interval_of(job_kind(args), "h100")
    spread.low * seconds, spread.high * seconds

``published_ratios.csv`` has measured over predicted seconds of published runs of Megatron jobs;
``python benchmarks/planner.py`` writes it. A layout of a model counts once. A run that differs from
a job in its device, in its precision or in having experts counts half for each of these. The job
itself counts as a run that may lie anywhere, so that an interval is wider where few runs are like
it; it is from the 4th to the 96th percentile of these weighted ratios. It contains more than 90 %
of the published runs, also of those with experts alone, and if all runs of their model are left
out (``tests/planner/test_interval.py``).

Source: Tibshirani, Barber, Candes, Ramdas, "Conformal Prediction Under Covariate Shift" (2019).
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from mindspeed.job import MixtureOfExperts, Precision

RATIOS = Path(__file__).parent / "published_ratios.csv"
_OUTSIDE = 0.04
_WEIGHT_OF_A_DIFFERENCE = 0.5


@dataclass(frozen=True)
class JobKind:
    """What distinguishes jobs whose predictions are off differently.

    Attributes:
        precision: ``bf16``, ``fp8``, ``mxfp8`` or ``nvfp4``.
    """

    experts: bool
    precision: str


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        stack: the software that ran.
        device: name of its cluster.
        kind: of its job.
        layout: number of devices and sizes of parallelism.
        ratio: measured over predicted seconds of a step.
    """

    stack: str
    model: str
    device: str
    kind: JobKind
    layout: str
    ratio: float


@dataclass(frozen=True)
class PredictionFactors:
    """Factors of predicted seconds.

    Attributes:
        low: of the shortest likely step.
        high: of the longest.
        runs: number of published runs behind them.
        alike: number of those on the same device, of the same kind.
    """

    low: float
    high: float
    runs: int
    alike: int

    @property
    def sentence(self) -> str:
        """What the interval says, for people."""
        return (
            "likely: more than 90 % of the published runs of Megatron jobs took "
            f"{self.text(1)} times what was predicted"
        )

    def seconds(self, shortest: float, longest: float) -> tuple[float, float]:
        """The interval around predicted seconds.

        Args:
            shortest: seconds of a step.
            longest: if experts get tokens as unevenly as they may.
        """
        return self.low * shortest, self.high * max(shortest, longest)

    def text(self, shortest: float, longest: float = 0.0) -> str:
        """:meth:`seconds` to two digits."""
        low, high = self.seconds(shortest, longest)
        return f"{_two_digits(low)} to {_two_digits(high)}"


def _two_digits(value: float) -> str:
    digits = max(0, 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{digits}f}"


def job_kind(args: argparse.Namespace) -> JobKind:
    """The kind of a job, from its final values."""
    return JobKind(MixtureOfExperts.of(args).count > 0, Precision.of(args).low or "bf16")


@functools.cache
def published_runs() -> tuple[Run, ...]:
    """The runs of the file."""
    with RATIOS.open(encoding="utf-8", newline="") as file:
        return tuple(
            Run(
                row["stack"],
                row["model"],
                row["device"],
                JobKind(row["experts"] == "1", row["precision"]),
                row["layout"],
                float(row["ratio"]),
            )
            for row in csv.DictReader(file)
        )


def interval_of(
    kind: JobKind, device: str, without: Callable[[Run], bool] = lambda run: False
) -> PredictionFactors:
    """The factors between which the seconds of a job are likely to be.

    Args:
        kind: of the job.
        device: name of its cluster.
        without: runs that do not count.
    """
    runs = [run for run in published_runs() if not without(run)]
    times = Counter(_place(run) for run in runs)
    weighted = [(run.ratio, _likeness(run, kind, device) / times[_place(run)]) for run in runs]
    alike = sum(run.device == device and run.kind == kind for run in runs)
    total = sum(weight for _, weight in weighted)
    part = max(0.0, (_OUTSIDE * (total + 1) - 1) / total)  # the job counts 1, beyond both ends
    low, high = percentile(weighted, part), percentile(weighted, 1 - part)
    return PredictionFactors(low, high, len(runs), alike)


def _place(run: Run) -> tuple[str, str, JobKind, str]:
    return run.model, run.device, run.kind, run.layout


def _likeness(run: Run, kind: JobKind, device: str) -> float:
    differences = (
        (run.device != device)
        + (run.kind.experts != kind.experts)
        + (run.kind.precision != kind.precision)
    )
    return _WEIGHT_OF_A_DIFFERENCE**differences


def percentile(weighted: Iterable[tuple[float, float]], part: float) -> float:
    """The smallest value with at least ``part`` of all weights up to it.

    Args:
        weighted: values and their weights; at least one.
        part: from 0 to 1.
    """
    ordered = sorted(weighted)
    upto = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(upto, part * upto[-1])][0]
