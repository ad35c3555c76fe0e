"""Order of what a search finds: ties, and the front of time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from mindspeed.planner.layout import Layout

TOLERANCE = 0.05
"""Part of a time within which two predictions are a tie: the error of the model."""


class Priced(Protocol):
    """What a search needs of a prediction (:class:`mindspeed.planner.price.Prediction`)."""

    @property
    def seconds(self) -> float:
        """Of a step."""

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""

    @property
    def exposed(self) -> Mapping[str, float]:
        """Seconds of communication that nothing hides, by group."""


def preference(layout: Layout, priced: Priced) -> tuple[float, float, int, str]:
    """Order of ties: memory, exposed communication, number of features."""
    return priced.peak_bytes, sum(priced.exposed.values()), features(layout), str(layout)


def features(layout: Layout) -> int:
    """How many features a layout uses beside plain parallelism."""
    recompute = layout.recompute is not None and str(layout.recompute) != "none"
    named = (layout.schedule, layout.cp_algorithm, layout.expert_program, layout.stage_layers)
    return (
        len(layout.memory or ())
        + recompute
        + (layout.vpp > 1)
        + sum(value is not None for value in named)
    )


def front_of(found: Iterable[tuple[Layout, Any]]) -> list[tuple[Layout, Any]]:
    """Those that no other beats in time and memory, the fastest first."""
    ordered = sorted(found, key=lambda one: (one[1].seconds, *preference(*one)))
    front: list[tuple[Layout, Any]] = []
    for one in ordered:
        if not front or one[1].peak_bytes < front[-1][1].peak_bytes:
            front.append(one)
    return front
