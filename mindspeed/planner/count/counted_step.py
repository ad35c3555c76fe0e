"""Count one training step of one rank: bytes alive, FLOPs, communication.

    settings = prepare([...])                       # final values, of a dry run
    step = count_step(settings.args, rank=0)
    step.peak, step.static["optimizer"], step.flops

The rank executes the trainer's own code: its model, data parallelism, optimizer and schedule, with
every feature that is on. On FakeTensors nothing is computed, allocated or sent, so a rank of any
job fits into this process. :func:`count_here` counts a rank of a real job; the figures are equal to
the byte.
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from mindspeed.instruments import Communication
from mindspeed.instruments.flops import FlopCount
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.planner import isolated

Watch = Callable[[LiveMemory], AbstractContextManager[Any]]
"""Makes a context, from the counter, in which the step is counted."""


@dataclass(frozen=True)
class CountedStep:
    """Figures of one rank; bytes are those of tensors, without what an allocator adds.

    Attributes:
        parameters: parameters on this rank; with Megatron-FSDP those of its shards.
        static: bytes between steps, by kind (:mod:`mindspeed.planner.count.step_counter`).
        peak: largest number of bytes alive at once during a step.
        at_peak: bytes at the peak, by kind.
        communications: communications of the step, in order.
        host: peak bytes of host memory, for copies that are swapped out.
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
    host: int = 0
    host_static: int = 0


def count_step(
    args: argparse.Namespace,
    rank: int = 0,
    *,
    micro_batches: int | None = None,
    watch: Watch = nullcontext,
    short: bool = False,
) -> CountedStep:
    """Count one step of a rank of the job, on FakeTensors.

    Args:
        args: final values, of a dry run.
        micro_batches: micro-batches of the step; default: those of the job.
        watch: makes a context around the counted step.
        short: run one micro-batch in the step before, which creates optimizer states.
    """
    from mindspeed.planner.count.balanced_routing import planned_rank

    with planned_rank(args, rank) as args:
        return count_here(args, rank, micro_batches, watch, short)


def count_here(
    args: argparse.Namespace,
    rank: int,
    micro_batches: int | None = None,
    watch: Watch = nullcontext,
    short: bool = False,
) -> CountedStep:
    """Count one step of this process, whose process groups exist; see :func:`count_step`."""
    from mindspeed.planner.count.loop import StepOfRank
    from mindspeed.planner.count.step_counter import StepCounter, claim

    with no_collections(), StepCounter() as counter:
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
            counter.host_peak,
            host,
        )


def _found(counts: Counter[str]) -> Counter[str]:
    """Drop empty kinds and those of the host."""
    return Counter({kind: n for kind, n in counts.items() if n and kind != "host"})


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable garbage collection, whose time would decide what is alive at the peak."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # exclude existing objects from the collection between the steps
    try:
        yield
    finally:
        if not isolated.in_child:
            gc.unfreeze()
        if enabled:
            gc.enable()
