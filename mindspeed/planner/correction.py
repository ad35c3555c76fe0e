"""Correct predicted seconds by measured ones, with three factors for a whole cluster.

The model of time has errors that all candidates share: devices compute slower than their rates,
links within a node and between nodes are slower than their figures. So the seconds of any step are

    f_compute * compute + f_intra * intra + f_inter * inter

with the model's own parts of that step. The first measured step sets the scale of all factors;
around it they are independent normal variables of :data:`SPREAD`, and each measured step, of
:data:`NOISE`, updates them (Bayesian linear regression; Bishop, Pattern Recognition and Machine
Learning, 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed.planner.layout import Layout

SPREAD = 0.3
"""Standard deviation of a factor, relative to the common scale."""
NOISE = 0.05
"""Standard deviation of a measured step that the factors do not explain, relative to the step."""
_DEVIATIONS = 2.0


@dataclass(frozen=True)
class Parts:
    """Predicted seconds of a step, by factor.

    Attributes:
        compute: computation, bubbles, everything except exposed communication.
    """

    compute: float
    intra: float = 0.0
    inter: float = 0.0

    @classmethod
    def of(cls, prediction: Any, layout: Layout, node_size: int) -> Parts:
        """Split a prediction of a layout, on nodes of ``node_size`` devices, into its parts."""
        found = {True: 0.0, False: 0.0}
        for name, seconds in prediction.exposed.items():
            found[extent(name, layout) <= node_size] += seconds
        compute = prediction.seconds - found[True] - found[False]
        return cls(max(0.0, compute), found[True], found[False])

    @property
    def seconds(self) -> float:
        """Sum of the parts."""
        return self.compute + self.intra + self.inter

    def vector(self) -> Any:
        """The parts as an array ``[3]``."""
        return np.array([self.compute, self.intra, self.inter])


def extent(name: str, layout: Layout) -> int:
    """Consecutive ranks that a process group spans, in Megatron's order of ranks.

    Args:
        name: description of the group, ``data parallel``, or ``messages`` of the pipeline.
    """
    name = name.upper()
    replica = layout.devices // layout.pp
    if "EXPERT" in name and "DATA" not in name:
        return min(replica, (layout.etp or layout.tp) * layout.ep)
    if "MESSAGES" in name or name.startswith("PIPELINE"):
        return min(layout.devices, 2 * replica)
    if "DATA" in name:
        return replica
    if "CONTEXT" in name:
        return layout.tp * layout.cp
    return layout.tp if "TENSOR" in name else layout.devices


@dataclass(frozen=True)
class Factors:
    """Estimates of the three factors.

    Attributes:
        mean: means of the factors of compute, intra and inter, ``[3]``.
        covariance: covariance matrix, ``[3, 3]``.
    """

    mean: Any
    covariance: Any

    @classmethod
    def first(cls, parts: Parts, seconds: float) -> Factors:
        """Estimate from the first measured step, which scales all three equally."""
        scale = seconds / parts.seconds
        return cls(np.full(3, scale), np.eye(3) * (SPREAD * scale) ** 2).updated(parts, seconds)

    def updated(self, parts: Parts, seconds: float) -> Factors:
        """Update with another measured step."""
        x = parts.vector()
        along = self.covariance @ x
        gain = along / (x @ along + (NOISE * seconds) ** 2)
        mean = self.mean + gain * (seconds - x @ self.mean)
        return Factors(mean, self.covariance - np.outer(gain, along))

    def seconds(self, parts: Parts) -> float:
        """The corrected prediction."""
        return float(parts.vector() @ self.mean)

    def optimistic(self, parts: Parts) -> float:
        """Lower confidence bound on a step: two standard deviations below the prediction."""
        x = parts.vector()
        deviation = float(np.sqrt(max(0.0, x @ self.covariance @ x)))
        return max(0.0, self.seconds(parts) - _DEVIATIONS * deviation)

    def to_json(self) -> Mapping[str, float]:
        """The means by factor."""
        return dict(zip(("compute", "intra", "inter"), self.mean.tolist(), strict=True))
