"""Seconds and activation bytes of a layer and of the output, from a micro-batch of three layers.

This costs a fraction of a recording and gives the same figures of a layer, as it ends when they are
known. A search bounds a layout with it
(:mod:`mindspeed.planner.search.bounds`) before it counts the layout.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from mindspeed.errors import PlanError
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.cluster.rates import clock_of
from mindspeed.planner.count.recording import Point
from mindspeed.planner.job import Job
from mindspeed.planner.layout import Layout, Recompute
from mindspeed.planner.shape import DENSE, RECOMPUTED

LAYERS = 3
"""Layers of the model that runs."""


@dataclass(frozen=True)
class LayerRun:
    """Figures of a layer.

    Attributes:
        forward: seconds of a micro-batch.
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
    with planned_rank(args, 0) as own, StepCounter(clock) as counter:
        step = StepOfRank(own, counter, 1)
        claim(counter, step.model)
        marks = _Marks(clock, counter)
        marks.follow(step.model.chunks)
        with counter.counting(), contextlib.suppress(_Known):
            step.run()
    return marks.layer()


class _Known(Exception):
    """Raised when all marks are known, to skip the rest of the step."""


class _Marks:
    """Times and bytes at the inputs of layers, in forward and backward."""

    def __init__(self, clock: Any, memory: Any) -> None:
        self._clock, self._memory = clock, memory
        self._forward: dict[int, tuple[float, int]] = {}
        self._backward: dict[int, float] = {}
        self._output = [0.0, 0.0]

    def follow(self, chunks: Any) -> None:
        """Hook the layers of the model."""
        from megatron.core.transformer import TransformerLayer

        layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerLayer)]
        if len(layers) < LAYERS:
            raise PlanError("a model of three layers was expected")
        for number, layer in enumerate(layers[:LAYERS]):  # those of multi-token prediction follow
            layer.register_forward_pre_hook(self._entering(number), with_kwargs=True)
        layers[LAYERS - 1].register_forward_hook(self._leaving)

    def _leaving(self, module: Any, args: Any, result: Any) -> None:
        hidden = result[0] if isinstance(result, tuple) else result

        def left(gradient: Any) -> None:
            self._output[1] = self._clock.now

        self._output[0] = self._clock.now
        hidden.register_hook(left)

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
        """Return the second layer: the first one begins before its own work.

        Raises:
            PlanError: a layer did not run forward and backward.
        """
        if len(self._forward) < LAYERS or self._backward.keys() < {1, 2}:
            raise PlanError("the layers of the model did not run one after the other")
        (start, before), (end, after) = self._forward[1], self._forward[2]
        backward = self._backward[1] - self._backward[2]
        output = self._output[1] - self._output[0]
        return LayerRun(end - start, backward, after - before, output)
