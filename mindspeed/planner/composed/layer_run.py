"""A layer by itself: its seconds and what it keeps, from one micro-batch of three layers.

It costs a fraction of the runs of a signature, and its figures are those of a layer there; what the
ends of a model and the end of a step add is not in it. So a search has a lower bound of a layout
(:mod:`mindspeed.planner.search.bounds`) before it counts what the layout needs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from mindspeed.errors import PlanError
from mindspeed.instruments.clock import VirtualClock
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.cluster.rates import DeviceRates
from mindspeed.planner.composed.tiny_run import Point
from mindspeed.planner.job import Job

LAYERS = 3
"""Layers of the model that runs."""


@dataclass(frozen=True)
class LayerRun:
    """Figures of a layer.

    Attributes:
        forward: seconds of a micro-batch.
        backward: seconds of a micro-batch, recomputation included.
        kept: bytes from its forward to its backward.
    """

    forward: float
    backward: float
    kept: float


def layer_run(job: Job, point: Point, cluster: Cluster) -> LayerRun:
    """Run a model of three layers without a pipeline; changes the state of this process.

    Args:
        job: whose flags these are.
        point: a model of three equal layers on one pipeline rank.
        cluster: rates of the clock.

    Raises:
        MindSpeedError: the job cannot start, or cannot be counted.
    """
    from mindspeed.planner.counted.balanced_routing import assumed_routing
    from mindspeed.planner.counted.fake_world import PlannedTensors, fake_world
    from mindspeed.planner.counted.loop import StepOfRank
    from mindspeed.planner.counted.step_counter import StepCounter, claim

    args = job.settings(point.overrides, point.devices).args
    clock = VirtualClock.of(DeviceRates(cluster))
    with (
        fake_world(args, 0),
        PlannedTensors(),
        assumed_routing(args, 1.0),
        StepCounter() as counter,
    ):
        step = StepOfRank(args, counter, 1)
        claim(counter, step.model)
        marks = _Marks(clock, counter)
        marks.follow(step.model.chunks)
        with counter.counting(), clock, contextlib.suppress(_Known):
            step.run()
    return marks.layer()


class _Known(Exception):
    """The marks are complete; the rest of the step is of no interest."""


class _Marks:
    """Times and bytes at the inputs of layers, forwards and backwards."""

    def __init__(self, clock: Any, memory: Any) -> None:
        self._clock, self._memory = clock, memory
        self._forward: dict[int, tuple[float, int]] = {}
        self._backward: dict[int, float] = {}

    def follow(self, chunks: Any) -> None:
        """Watch the layers of the model."""
        from megatron.core.transformer import TransformerLayer

        layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerLayer)]
        if len(layers) < LAYERS:
            raise PlanError("a model of three layers was expected")
        for number, layer in enumerate(layers[:LAYERS]):  # those of multi-token prediction follow
            layer.register_forward_pre_hook(self._entering(number), with_kwargs=True)

    def _entering(self, number: int) -> Any:
        def entering(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._forward.setdefault(number, (self._clock.now, self._memory.total))
            if hidden.requires_grad:
                hidden.register_hook(left)

        def left(gradient: Any) -> None:
            self._backward[number] = self._clock.now
            if number == 1:
                raise _Known

        return entering

    def layer(self) -> LayerRun:
        """The second layer; the first one begins with more than itself.

        Raises:
            PlanError: a layer did not run forwards and backwards.
        """
        if len(self._forward) < LAYERS or self._backward.keys() < {1, 2}:
            raise PlanError("the layers of the model did not run one after the other")
        (start, before), (end, after) = self._forward[1], self._forward[2]
        backward = self._backward[1] - self._backward[2]
        return LayerRun(end - start, backward, after - before)
