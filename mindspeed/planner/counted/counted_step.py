"""One training step of one rank, executed and counted: bytes alive, FLOPs, communication.

    settings = prepare([...])                       # final values, of a dry run
    step = count_step(settings.args, rank=0)
    step.peak, step.static["optimizer"], step.flops

The rank runs the trainer's own code: its model, data parallelism, optimizer and schedule, with
every feature that is on. On FakeTensors nothing is computed, allocated or sent, so a rank of any
job fits into this process. :func:`count_here` counts a rank of a real job; both give the same
figures to the byte.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from mindspeed.instruments import Communication
from mindspeed.instruments.flops import FlopCount
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.planner.cluster.rates import Product

Watch = Callable[[LiveMemory], AbstractContextManager[Any]]
"""Something that looks on while a step is counted."""


@dataclass(frozen=True)
class CountedStep:
    """Figures of one rank; bytes are those of tensors, without what an allocator adds.

    Attributes:
        rank: global rank.
        micro_batches: of the step.
        parameters: entries on this rank; of Megatron-FSDP those of its shards.
        static: bytes between steps, by kind (:mod:`mindspeed.planner.counted.step_counter`).
        peak: most bytes alive at once during a step.
        at_peak: these bytes by kind.
        flops: of the step.
        communications: of the step in their order.
        products: how often each matrix product ``(m, n, k, dtype)`` ran.
        other_flops: of operators that are no plain product (attention), by operator.
        moved: bytes read and written by operators without FLOPs, by operator.
        calls: how often each operator that computes or moves bytes ran.
        host: most bytes of host memory, for copies that are swapped out.
        host_static: bytes of host memory between steps.
    """

    rank: int
    micro_batches: int
    parameters: int
    static: Counter[str]
    peak: int
    at_peak: Counter[str]
    flops: FlopCount
    communications: tuple[Communication, ...]
    products: Counter[Product] = field(default_factory=Counter)
    other_flops: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    host: int = 0
    host_static: int = 0


def count_step(
    args: argparse.Namespace,
    rank: int = 0,
    *,
    micro_batches: int | None = None,
    watch: Watch = nullcontext,
    imbalance: float = 1.0,
    short: bool = False,
) -> CountedStep:
    """Count one step of a rank of the job, on FakeTensors.

    Args:
        args: final values, of a dry run.
        rank: global rank.
        micro_batches: default: those of the job.
        watch: is around the step that is counted.
        imbalance: load of the first expert-parallel rank over the mean.
        short: the step before the one that is counted, which makes the states of the optimizer, has
            one micro-batch.
    """
    from mindspeed.planner.counted.balanced_routing import assumed_routing
    from mindspeed.planner.counted.fake_world import PlannedTensors, fake_world

    args = copy.copy(args)
    with fake_world(args, rank), PlannedTensors(), assumed_routing(args, imbalance):
        return count_here(args, rank, micro_batches, watch, short)


def count_here(
    args: argparse.Namespace,
    rank: int,
    micro_batches: int | None = None,
    watch: Watch = nullcontext,
    short: bool = False,
) -> CountedStep:
    """Count one step of this process, whose process groups exist.

    Args:
        args: final values.
        rank: global rank of this process.
        micro_batches: default: those of the job.
        watch: is around the step that is counted.
        short: the step before it has one micro-batch.
    """
    from mindspeed.planner.counted.loop import StepOfRank
    from mindspeed.planner.counted.step_counter import StepCounter, claim

    with _no_collections(), StepCounter() as counter:
        step = StepOfRank(args, counter, micro_batches)
        claim(counter, step.model)
        (step.run_shortest if short else step.run)()  # a later step finds optimizer states
        claim(counter, step.model)
        gc.collect()
        static, host = _found(counter.now), counter.host
        counter.restart()
        with counter.counting(), watch(counter):
            step.run()
        return CountedStep(
            rank,
            step.micro_batches,
            step.parameters,
            static,
            counter.peak,
            _found(counter.at_peak),
            counter.flops,
            tuple(counter.communications),
            counter.products,
            counter.other_flops,
            counter.moved,
            counter.calls,
            counter.host_peak,
            host,
        )


def _found(counts: Counter[str]) -> Counter[str]:
    """Kinds of the device that there are."""
    return Counter({kind: n for kind, n in counts.items() if n and kind != "host"})


@contextmanager
def _no_collections() -> Iterator[None]:
    """When cycles of objects are collected must not decide what lives at the peak."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    gc.freeze()  # what exists is not looked at by the collection between the steps
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
