"""What rounding explains: the noise of each tensor, and how far two runs are apart in its units.

Three statistics of a tensor, all from digests:

    whole   ||A - B|| / ||A||                limit  6 times its noise
    block   the same of the worst block      limit 10 times
    norm    | ||B|| / ||A|| - 1 |            limit 12 times; smaller noise, sees systematic errors

The noise is measured by runs of A whose every recorded tensor has errors of rounding's size
(:mod:`.noise`), pooled over micro-batches. Without such runs it is a formula: the rounding of one
value times the square root of the number of residual branches before it. It is blind to systematic
errors that small, and knows nothing of what an optimizer makes of noise: only the first recorded
step is compared then, up to its gradients.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mindspeed.compare.digest import SKETCH_ERROR, SMALL
from mindspeed.compare.names import Name, depth
from mindspeed.compare.noise import UNIT, amplitude
from mindspeed.compare.recording import Recorded, Recording
from mindspeed.compare.routing import GAPS, Moved

LIMITS = {"whole": 6.0, "block": 10.0, "norm": 12.0}
FORCED_LIMITS = {"whole": 3.0, "block": 4.0, "norm": 6.0}
"""Of a run that computes with A's values: its noise does not grow."""
_TINY = 1e-300
_RARE = 1e-3  # expected signs, below which none is expected to turn
_EXACT = 1e9  # ratio of a difference where none is allowed


@dataclass(frozen=True)
class Difference:
    """How far a tensor of B is from that of A.

    Attributes:
        error: ``||A - B|| / ||A||``.
        ratios: Of each statistic to its noise.
        blind: The smallest error that would have been seen.
        scale: ``||B|| / ||A||``.
        limits: Largest ratios that rounding explains.
    """

    error: float
    ratios: dict[str, float]
    blind: float
    scale: float
    limits: Mapping[str, float] = field(default_factory=lambda: LIMITS)

    @property
    def worst(self) -> float:
        """Largest ratio in units of its limit; above 1 rounding does not explain it."""
        return max(ratio / self.limits[which] for which, ratio in self.ratios.items())

    @property
    def differs(self) -> bool:
        """Whether rounding does not explain it."""
        return self.worst > 1


class NoiseLevels:
    """The noise of A's tensors.

    Args:
        a: The run that is trusted.
        runs: The same run with noise; empty for the formula.
        forced: The other run computes with A's values.
    """

    def __init__(self, a: Recording, runs: Sequence[Recording] = (), forced: bool = False) -> None:
        self.measured, self.forced = bool(runs), forced
        self.limits = FORCED_LIMITS if forced else LIMITS
        outputs = (t.dtype for n, t in a.tensors.items() if n.what == "output")
        self._dtype = max(outputs, key=lambda dtype: UNIT.get(dtype, 0.0), default="float32")
        layers = [at for name in a.tensors if (at := depth(name.module)) < 10**6]
        self._layers = 1 + max(layers, default=0)
        self._tensors = a.tensors
        self._sums: defaultdict[tuple[object, ...], list[float]] = defaultdict(lambda: [0.0] * 4)
        for run in runs:
            other_experts = Moved(a, run.tensors)
            for name, own in a.tensors.items():
                other = run.tensors.get(name)
                if other is not None and name not in other_experts:
                    self._add(name, own, other)

    def _add(self, name: Name, own: Recorded, other: Recorded) -> None:
        if name.what == GAPS:
            return
        apart = squared_distances(own, other)
        norm = own.norm + _TINY
        sums = self._sums[_pooled(name)]
        reference = own.squares + own.squares.mean() + _TINY
        sums[0] += 1
        sums[1] += float(apart.sum()) / norm**2
        sums[2] += float((apart / reference).max())
        sums[3] += (other.norm / norm - 1) ** 2

    def of(self, tensor: Recorded) -> dict[str, float]:
        """Noise of each statistic of a tensor."""
        unit = UNIT.get(tensor.dtype, UNIT["float32"])
        elements = tensor.shape[0] * tensor.shape[1]
        floor = 0.4 * unit
        of_norm = max(floor / math.sqrt(elements), 2.0**-26)
        if elements > SMALL and tensor.dtype == "float32":
            floor = SKETCH_ERROR
        if elements == 1:  # no other values whose noise could be pooled
            floor = of_norm = amplitude(tensor.dtype, tensor.reduction)
        least = {"whole": floor, "block": floor, "norm": of_norm}
        turned = self._turned(tensor)
        for which, share in (("whole", 1), ("block", 2), ("norm", 1)):  # all may be in one block
            least[which] = max(least[which], share * turned / self.limits[which])
        sums = self._sums.get(_pooled(tensor.name))
        if sums is not None and sums[0]:
            measured = [math.sqrt(one / sums[0]) for one in sums[1:]]
            found = {k: max(v, m) for (k, v), m in zip(least.items(), measured, strict=True)}
            # Of independent errors, where few runs with noise have measured less by chance.
            found["norm"] = max(found["norm"], found["whole"] / math.sqrt(tensor.count))
            return found
        whole = self._formula(tensor)
        return {"whole": whole, "block": 2 * whole, "norm": whole / 2}

    def _turned(self, tensor: Recorded) -> float:
        """The error of a weight some of whose first updates have the other sign, relative.

        Adam's first update is the learning rate whatever the size of a gradient. Where that is
        within its noise the sign is anybody's, of about noise x elements of them, which is so rare
        in a small tensor that no run with noise may have met it.
        """
        name = tensor.name
        if name.step or not name.what.endswith("main_weight") or not tensor.norm:
            return 0.0
        kind = name.what.removesuffix("main_weight")
        gradient = self._tensors.get(name._replace(what=f"{kind}main_grad"))
        rate = self._tensors.get(name._replace(module="optimizer", what="learning_rate"))
        if gradient is None or rate is None:
            return 0.0
        turned = self.of(gradient)["whole"] * tensor.count
        return 0.0 if turned < _RARE else 2 * rate.norm * math.sqrt(1 + 3 * turned) / tensor.norm

    def _formula(self, tensor: Recorded) -> float:
        """Rounding of one value, and of what comes before it; infinite where it says nothing.

        Adam's first steps turn the noise of a gradient into a whole step, which no formula knows.
        """
        name, layers = tensor.name, self._layers
        own = amplitude(tensor.dtype, tensor.reduction)
        if name.what == "learning_rate" or name.when == "begin":
            return own
        if name.when == "end" and not name.what.endswith(("main_grad", "grad_norm")):
            return math.inf
        at = min(depth(name.module), layers)
        before = 2 * at if name.when == "forward" else 2 * layers + 2 * (layers - at)
        before = 2 if self.forced else before
        return math.sqrt(own**2 + before * amplitude(self._dtype, tensor.reduction) ** 2)


def _pooled(name: Name) -> tuple[object, ...]:
    return (name.step, name.when, name.module, name.what)


def exactly(name: Name, first: int) -> bool:
    """Whether no difference is allowed: tokens, and weights before the first step."""
    begins = name.when == "begin" and name.step == first == 0
    return name.module == "data" or name.what == "choice" or begins


def difference(
    a: Recorded, b: Recorded, noise: NoiseLevels, exact: bool, clipped: float = 0.0
) -> Difference:
    """Compare a tensor.

    Args:
        a: Of the run that is trusted.
        b: Of the other one.
        noise: Of A.
        exact: No difference is allowed.
        clipped: By how much clipped gradients may differ, relative.
    """
    levels = noise.of(a)
    if a.name.when == "end" and not a.name.what.endswith("main_grad") and a.count > 1:
        levels = {which: level + clipped for which, level in levels.items()}
    limit = noise.limits["whole"] * levels["whole"]
    norm = a.norm + _TINY
    scale = b.norm / norm
    none = dict.fromkeys(LIMITS, 0.0)
    if a.exact is not None and a.exact == b.exact:
        return Difference(0.0, none, limit, 1.0)
    partial = a.partial or b.partial
    if b.not_finite != a.not_finite and not (partial and a.not_finite and b.not_finite):
        return Difference(math.inf, dict.fromkeys(LIMITS, _EXACT), limit, scale)
    if a.not_finite:
        return Difference(0.0, none, math.inf, 1.0)
    apart = squared_distances(a, b)
    error = math.sqrt(float(apart.sum())) / norm
    if exact and a.exact is not None and b.exact is not None:
        return Difference(error, dict.fromkeys(LIMITS, _EXACT), 0.0, scale)
    reference = a.squares + a.squares.mean() + _TINY
    found = {
        "whole": error,
        "block": math.sqrt(float((apart / reference).max())),
        "norm": abs(scale - 1) if norm > 1e-30 and not partial else 0.0,
    }
    ratios = {which: value / levels[which] for which, value in found.items()}
    return Difference(error, ratios, limit, scale, noise.limits)


def squared_distances(a: Recorded, b: Recorded) -> torch.Tensor:
    """Estimate of ``||a - b||^2`` of each block: ``[blocks]`` fp64."""
    return (a.sketch - b.sketch).square().mean(1)
