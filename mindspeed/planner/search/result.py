"""Results of a search: candidates, ties, Pareto front of time and memory, removed combinations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed.errors import PlanError
from mindspeed.planner.cluster import GIB
from mindspeed.planner.layout import Layout

if TYPE_CHECKING:
    from mindspeed.planner.interval import PredictionFactors
    from mindspeed.planner.time.prediction import Prediction

TOLERANCE = 0.05
"""Relative difference of times within which two predictions are a tie: the error of the model."""
ESTIMATED = 0.03
"""Largest relative error of estimated bytes."""


def preference(layout: Layout, found: Prediction) -> tuple[float, float, int, str]:
    """Sort key of ties: memory, exposed communication, number of features."""
    return found.peak_bytes, sum(found.exposed.values()), features(layout), str(layout)


def features(layout: Layout) -> int:
    """Number of features that a layout uses besides the sizes of parallelism."""
    recompute = layout.recompute is not None and str(layout.recompute) != "none"
    named = (layout.schedule, layout.cp_algorithm, layout.expert_program, layout.stage_layers)
    return (
        len(layout.memory or ())
        + recompute
        + (layout.vpp > 1)
        + sum(value is not None for value in (*named, layout.precision))
    )


def front_of(found: Iterable[tuple[Layout, Any]]) -> list[tuple[Layout, Any]]:
    """Pareto front of time and memory, the fastest first."""
    ordered = sorted(found, key=lambda one: (one[1].seconds, *preference(*one)))
    front: list[tuple[Layout, Any]] = []
    for one in ordered:
        if not front or one[1].peak_bytes < front[-1][1].peak_bytes:
            front.append(one)
    return front


@dataclass(frozen=True)
class Candidate:
    """A layout that fits and can start.

    Attributes:
        layout: the layout.
        prediction: its predicted memory and time.
        flags: the command line to copy, without the program.
        estimated: whether its bytes are an estimate.
    """

    layout: Layout
    prediction: Any
    flags: tuple[str, ...] = ()
    estimated: bool = False

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return float(self.prediction.peak_bytes)

    def to_json(self) -> dict[str, Any]:
        """The candidate as JSON."""
        found = self.prediction
        figures = {"seconds": found.seconds, "peak_bytes": self.peak_bytes}
        for name in ("uneven_seconds", "bubble", "mfu", "tokens_per_second_per_device", "limit"):
            if hasattr(found, name):
                figures[name] = getattr(found, name)
        return {
            "layout": self.layout.to_json(),
            **figures,
            "exposed": dict(found.exposed),
            "estimated": self.estimated,
            "flags": list(self.flags),
        }


@dataclass(frozen=True)
class Help:
    """A change that reduces the deficit of a candidate.

    Attributes:
        what: a feature or a change of the layout.
        fits: whether that is within the limit.
    """

    what: str
    layout: Layout
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Closest:
    """The candidate that needs least memory, where none fits.

    Attributes:
        layout: the layout.
        prediction: its predicted memory and time.
        deficit: bytes that it needs beyond the limit.
        help: changes; those that close the deficit come first.
    """

    layout: Layout
    prediction: Any
    deficit: int
    help: tuple[Help, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The layout and its changes as JSON."""
        return {
            "layout": self.layout.to_json(),
            "peak_bytes": self.prediction.peak_bytes,
            "deficit_bytes": self.deficit,
            "help": [{**vars(one), "layout": one.layout.to_json()} for one in self.help],
        }


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        cluster: name of the cluster.
        devices: number of ranks.
        memory_limit: bytes that the tensors of a rank may take.
        total: number of combinations, the sum of :attr:`removed` and :attr:`fitting`.
        removed: number of combinations that each constraint removed.
        fitting: number of combinations that were priced and fit.
        measured: keys of layouts that were recorded or found in the cache.
        candidates: the best layouts, ties first; see :attr:`ties`.
        front: Pareto front of time and memory, the fastest first.
        closest: the layout closest to fitting, if none fits.
        interrupted: whether Ctrl-C ended the search; candidates are the best until then.
        wall_seconds: duration of the search.
        tolerance: relative difference of times within which candidates tie.
        interval: how far predicted seconds may be off; None: not known.
        assumed: what the flags do not say, in words.
        priced: all layouts that were priced and fit, the fastest first.
        searched: values of each dimension that has several.
    """

    cluster: str
    devices: int
    memory_limit: int
    total: int
    removed: Mapping[str, int]
    fitting: int
    measured: int
    candidates: tuple[Candidate, ...]
    front: tuple[Candidate, ...] = ()
    closest: Closest | None = None
    interrupted: bool = False
    wall_seconds: float = 0.0
    tolerance: float = TOLERANCE
    notes: tuple[str, ...] = field(default=())
    interval: PredictionFactors | None = None
    assumed: str = ""
    priced: tuple[tuple[Layout, Prediction], ...] = ()
    searched: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def best(self) -> Candidate:
        """The fastest candidate; of those that tie, the one with least memory.

        Raises:
            PlanError: nothing fits; names the closest layout.
        """
        if self.candidates:
            return self.candidates[0]
        raise PlanError(self.explain())

    @property
    def ties(self) -> int:
        """Number of candidates as fast as the fastest within the model's error."""
        if not self.candidates:
            return 0
        fastest = min(one.prediction.seconds for one in self.candidates)
        within = fastest * (1 + self.tolerance)
        return sum(one.prediction.seconds <= within for one in self.candidates)

    def pareto(self) -> tuple[Candidate, ...]:
        """The front of time and memory, the fastest first."""
        return self.front

    def table(self) -> str:
        """Format the candidates and the removed combinations as a table."""
        lines = []
        if self.candidates:
            lines.append(f"{'':>2} {'seconds':>9} {'GiB':>7} {'tie':>3}  layout")
        for index, one in enumerate(self.candidates):
            found, tie = one.prediction, "=" if index < self.ties else ""
            gib = one.peak_bytes / GIB
            lines.append(f"{index + 1:>2} {found.seconds:9.4g} {gib:7.2f} {tie:>3}  {one.layout}")
        return "\n".join([*lines, *self.counts()])

    def counts(self) -> list[str]:
        """Format the number of combinations that each constraint removed."""
        lines = [f"searched: {name} {', '.join(v)}" for name, v in self.searched.items()]
        lines.append(f"of {self.total:,} combinations:")
        lines += [f"{count:>12,}  {reason}" for reason, count in _largest(self.removed.items())]
        lines.append(f"{self.fitting:>12,}  fit")
        if self.interrupted:
            estimated = any(one.estimated for one in self.candidates)
            lines.append(
                "interrupted: the best until then" + "; their bytes are estimates" * estimated
            )
        return lines

    def explain(self, index: int = 0) -> str:
        """Explain the rank of a candidate, or the closest layout if nothing fits."""
        if self.closest is not None:
            return _explain_closest(self)
        if not self.candidates:
            return "\n".join(["no layout exists:", *self.counts()])
        one = self.candidates[index]
        found, fastest = one.prediction, min(c.prediction.seconds for c in self.candidates)
        lines = [
            f"{one.layout}",
            f"step     {found.seconds:.4g} s, {found.seconds / fastest:.3f} x the fastest",
            f"memory   {one.peak_bytes / GIB:.2f} of {self.memory_limit / GIB:.2f} GiB",
        ]
        if getattr(found, "limit", ""):
            lines.append(f"limited  by {found.limit}")
        lines += [f"exposed  {seconds:.4g} s {group}" for group, seconds in found.exposed.items()]
        if index < self.ties and self.ties > 1:
            percent = 100 * self.tolerance
            lines.append(
                f"tie      {self.ties} candidates are within {percent:g} % of the fastest: ordered "
                "by memory, then by exposed communication, then by number of features"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "cluster": self.cluster,
            "devices": self.devices,
            "memory_limit_bytes": self.memory_limit,
            "searched": {name: list(values) for name, values in self.searched.items()},
            "combinations": self.total,
            "removed": dict(_largest(self.removed.items())),
            "fitting": self.fitting,
            "signatures": self.measured,
            "ties": self.ties,
            "tolerance": self.tolerance,
            "interval": None if self.interval is None else asdict(self.interval),
            "assumptions": self.assumed,
            "interrupted": self.interrupted,
            "wall_seconds": self.wall_seconds,
            "candidates": [one.to_json() for one in self.candidates],
            "front": [one.to_json() for one in self.front],
            "closest": None if self.closest is None else self.closest.to_json(),
            "notes": list(self.notes),
        }


def _largest(counts: Iterable[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    return sorted(counts, key=lambda item: -item[1])


def _explain_closest(plan: SearchResult) -> str:
    closest = plan.closest
    assert closest is not None
    lines = [
        f"nothing fits into {plan.memory_limit / GIB:.2f} GiB on {plan.devices} devices",
        f"closest: {closest.layout}",
        f"  needs {closest.prediction.peak_bytes / GIB:.2f} GiB, {closest.deficit / GIB:.2f} GiB "
        "too much",
    ]
    for one in closest.help:
        verdict = "fits" if one.fits else "does not fit either"
        lines.append(f"  with {one.what}: {one.peak_bytes / GIB:.2f} GiB, {verdict}")
    if not any(one.fits for one in closest.help):
        lines.append("  no change that the planner knows is enough: use more devices")
    return "\n".join([*lines, *plan.counts()])
