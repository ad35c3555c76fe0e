"""Seconds and activation bytes of a layer and of the output, from a micro-batch of three layers.

This costs a fraction of a recording and gives the same figures of a layer, as it ends when they are
known. A search bounds a layout with it
(:mod:`mindspeed.planner.search.bounds`) before it counts the layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mindspeed.errors import PlanError
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.cluster.rates import clock_of
from mindspeed.planner.count.marks import Marks
from mindspeed.planner.count.recording import Part, Point
from mindspeed.planner.job import Job
from mindspeed.planner.layout import Layout, Recompute
from mindspeed.planner.shape import DENSE, RECOMPUTED

LAYERS = 3
"""Layers of the model that runs."""


@dataclass(frozen=True)
class LayerRun:
    """Figures of a layer.

    Attributes:
        backward: seconds of a micro-batch, recomputation included.
        kept: bytes kept from forward to backward.
        output: seconds from the end of the last layer until its gradient, of a micro-batch.
    """

    forward: float
    backward: float
    kept: float
    output: float


def layer_point(layout: Layout, kinds: tuple[str, ...], kind: str) -> Point:
    """The model of three layers to run for one kind of layer.

    Args:
        kinds: kinds of all layers of the model.
    """
    base = layout.signature()
    dp = 2 * base.devices // (base.tp * base.cp)
    alone = replace(base, devices=base.tp * base.cp * dp, global_batch_size=base.mbs * dp * 2)
    flags: dict[str, Any] = {"num_layers": LAYERS, "noop_layers": None}
    if any(not one.startswith(DENSE) for one in kinds):
        flags["moe_layer_freq"] = f"[{int(not kind.startswith(DENSE))}]*{LAYERS}"
    if any(one.endswith(RECOMPUTED) for one in kinds):
        flags |= Recompute(layers=-1 if kind.endswith(RECOMPUTED) else 0).overrides()
    return Point(alone.overrides() | flags, alone.devices, 0)


def layer_run(job: Job, point: Point, cluster: Cluster) -> LayerRun:
    """Run a model of three layers without a pipeline; changes the state of this process.

    Args:
        job: the job whose flags ``point`` overrides.
        point: three equal layers on one pipeline rank.

    Raises:
        MindSpeedError: the job cannot start, or cannot be counted.
    """
    from mindspeed.planner.count.balanced_routing import planned_rank
    from mindspeed.planner.count.loop import StepOfRank
    from mindspeed.planner.count.step_counter import StepCounter, claim

    args = job.settings(point.overrides, point.devices).args
    clock = clock_of(cluster, args)
    begun: dict[tuple[Part, int], tuple[float, int]] = {}

    def enter(action: int, part: Part, layer: int) -> None:
        begun.setdefault((part, layer), (clock.now, counter.total))
        if part in (Part.AGAIN, Part.BACK) and layer == 0:
            raise _Known

    with planned_rank(args, 0) as own, StepCounter(clock) as counter:
        step = StepOfRank(own, counter, 1)
        claim(counter, step.model)
        watched = Marks(enter, ()).watching(step.model)
        with contextlib.suppress(_Known), counter.counting(), watched:
            step.run()
    try:
        (start, before), (end, after) = (begun[Part.LAYER, layer] for layer in (1, 2))
        second, first, ending = (_backward(begun, layer) for layer in (1, 0, 2))
        left = begun.get((Part.LAYER, LAYERS)) or begun[Part.POST, 0]  # of multi-token prediction
    except KeyError:
        raise PlanError("the layers of the model did not run one after the other") from None
    return LayerRun(end - start, first - second, after - before, ending - left[0])


def _backward(begun: Mapping[tuple[Part, int], tuple[float, int]], layer: int) -> float:
    """The time at which the gradient of the output of a layer was known."""
    found = begun.get((Part.AGAIN, layer)) or begun[Part.BACK, layer]
    return found[0]


class _Known(Exception):
    """Raised when the second layer has run forward and backward, to skip the rest of the step."""
