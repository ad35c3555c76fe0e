"""One training step of one rank, executed and timed by a model: where its seconds go.

    step = time_step(settings.args, load_cluster("h100"), rank=0)
    step.chunks[0].forward, step.optimizer_seconds, step.exposed["TENSOR_MODEL_PARALLEL_GROUP"]

The step is the one that :mod:`mindspeed.planner.counted_step` counts, on FakeTensors and in its
real order. Operators and communications take what :class:`~mindspeed.planner.rates.DeviceRates`
says; communication that the program waits for is exposed, and computation is slower while
communication runs. Counts are facts, these times are a model.

The rank never waits for a slower one, so there is no pipeline bubble: the simulator of
:mod:`mindspeed.pipeline.schedule` composes it from the seconds of chunks. Kernels are those of the
CPU's path: operators that a device fuses and the CPU does not are timed one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.instruments.clock import Interval, VirtualClock
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.products import Product
from mindspeed.planner.rates import DeviceRates

BETWEEN_CHUNKS = (
    *("PIPELINE_MODEL_PARALLEL", "PIPELINE_UPWARD", "PIPELINE_DOWNWARD"),
    *("DATA_PARALLEL", "INTRA_PARTIAL", "INTER_PARTIAL"),
)
"""Parts of the descriptions of groups whose communication is not that of a chunk alone."""


@dataclass(frozen=True)
class ChunkSeconds:
    """Seconds of a part of the model for one micro-batch, with what it waits for inside it.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass, without recomputation.
        recompute: of recomputation in the backward pass.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.forward + self.backward + self.recompute


@dataclass(frozen=True)
class TimedStep:
    """Modelled seconds of one rank.

    Attributes:
        rank: global rank.
        micro_batches: of the step.
        seconds: of the step, if no other rank is ever late.
        intervals: what happened, with times from the start of the step.
        chunks: of each model chunk for one micro-batch, on average. Waits for tensor-, context- and
            expert-parallel groups count, those for pipeline and data parallelism do not.
        layers: the same for each scope of :mod:`mindspeed.planner.scopes`; ``chunk 0`` is what is
            outside of layers.
        gradient_seconds: after the last backward: reductions that were not hidden.
        optimizer_seconds: of its step, with parameters that it gathers.
        exposed: seconds waited for communication, by description of the group.
        products: how often each matrix product ``(m, n, k, dtype)`` ran.
    """

    rank: int
    micro_batches: int
    seconds: float
    intervals: tuple[Interval, ...]
    chunks: tuple[ChunkSeconds, ...]
    layers: Mapping[str, ChunkSeconds]
    gradient_seconds: float
    optimizer_seconds: float
    exposed: Mapping[str, float]
    products: Counter[Product]


Watch = Callable[[VirtualClock], contextlib.AbstractContextManager[Any]]
"""Made with the clock; it is around the step that is timed."""


def time_step(
    args: argparse.Namespace,
    cluster: Cluster,
    rank: int = 0,
    *,
    micro_batches: int | None = None,
    watch: Watch = contextlib.nullcontext,
) -> TimedStep:
    """Time one step of a rank of the job, on FakeTensors.

    Args:
        args: final values, of a dry run.
        cluster: rates of devices and links.
        rank: global rank.
        micro_batches: default: those of the job.
        watch: is around the step that is timed.
    """
    from mindspeed.planner.balanced_routing import assumed_routing
    from mindspeed.planner.fake_world import fake_world
    from mindspeed.planner.values import PlannedTensors

    args = copy.copy(args)
    with fake_world(args, rank), PlannedTensors(), assumed_routing(args):
        return time_here(args, cluster, rank, micro_batches, watch)


def time_here(
    args: argparse.Namespace,
    cluster: Cluster,
    rank: int,
    micro_batches: int | None = None,
    watch: Watch = contextlib.nullcontext,
) -> TimedStep:
    """Time one step of this process, whose process groups exist.

    Args:
        args: final values.
        cluster: rates of devices and links.
        rank: global rank of this process.
        micro_batches: default: those of the job.
        watch: is around the step that is timed.
    """
    from mindspeed.planner.scopes import GRADIENTS, OPTIMIZER, parts_named
    from mindspeed.planner.step_of_rank import StepOfRank

    step = StepOfRank(args, LiveMemory(), micro_batches)
    step.run()  # a second step is like all later ones: optimizer states exist
    rates = DeviceRates(cluster)
    clock = VirtualClock.of(rates)
    with parts_named(clock, step.model), clock, watch(clock):
        step.run()
    layers = _by_scope(clock.intervals, step.micro_batches)
    return TimedStep(
        rank,
        step.micro_batches,
        clock.now,
        tuple(clock.intervals),
        _by_chunk(layers, len(step.model.chunks)),
        layers,
        _seconds(clock.intervals, GRADIENTS),
        _seconds(clock.intervals, OPTIMIZER),
        exposed_by_group(clock.intervals),
        rates.products,
    )


def exposed_by_group(intervals: Iterable[Interval]) -> dict[str, float]:
    """Seconds waited for communication, by description of the group."""
    found: dict[str, float] = defaultdict(float)
    for interval in intervals:
        if interval.kind == "wait" and interval.communication is not None:
            found[interval.communication.description] += interval.seconds
    return dict(found)


def between_chunks(interval: Interval) -> bool:
    """Whether it is a wait for pipeline or data parallelism."""
    if interval.kind != "wait" or interval.communication is None:
        return False
    return any(part in interval.communication.description for part in BETWEEN_CHUNKS)


def _seconds(intervals: Iterable[Interval], scope: str) -> float:
    return sum(
        interval.seconds
        for interval in intervals
        if interval.kind != "communication" and interval.scope == scope
    )


def _by_scope(intervals: Iterable[Interval], micro_batches: int) -> dict[str, ChunkSeconds]:
    """Of all scopes of chunks, per micro-batch."""
    from mindspeed.planner.scopes import chunk_of

    found: dict[str, Counter[str]] = {}
    for interval in intervals:
        if interval.kind == "communication" or between_chunks(interval):
            continue
        if chunk_of(interval.scope) is not None:
            seconds = found.setdefault(interval.scope, Counter())
            seconds[interval.phase] += interval.seconds / micro_batches  # type: ignore[assignment]
    return {
        scope: ChunkSeconds(times["forward"], times["backward"], times["recompute"])
        for scope, times in found.items()
    }


def _by_chunk(layers: Mapping[str, ChunkSeconds], count: int) -> tuple[ChunkSeconds, ...]:
    from mindspeed.planner.scopes import chunk_of

    chunks = []
    for index in range(count):
        parts = [times for scope, times in layers.items() if chunk_of(scope) == index]
        chunks.append(
            ChunkSeconds(
                sum(part.forward for part in parts),
                sum(part.backward for part in parts),
                sum(part.recompute for part in parts),
            )
        )
    return tuple(chunks)
