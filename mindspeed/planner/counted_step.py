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
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed.profiling.flops import FlopCount, FlopCounter
from mindspeed.testing import CommLedger, Communication
from mindspeed.testing.live_memory import LiveMemory

KINDS = ("weights", "gradients", "optimizer", "activations", "step")
"""Kinds of bytes; ``step``: made by the optimizer's step."""


Watch = Callable[[LiveMemory], AbstractContextManager[Any]]
"""Something that looks on while a step is counted."""


@dataclass(frozen=True)
class CountedStep:
    """Figures of one rank; bytes are those of tensors, without what an allocator adds.

    Attributes:
        rank: global rank.
        micro_batches: of the step.
        parameters: entries on this rank.
        static: bytes between steps, by kind.
        peak: most bytes alive at once during a step.
        at_peak: these bytes by kind.
        flops: of the step.
        communications: of the step in their order.
    """

    rank: int
    micro_batches: int
    parameters: int
    static: Counter[str]
    peak: int
    at_peak: Counter[str]
    flops: FlopCount
    communications: tuple[Communication, ...]


def count_step(
    args: argparse.Namespace,
    rank: int = 0,
    *,
    micro_batches: int | None = None,
    watch: Watch = nullcontext,
    imbalance: float = 1.0,
) -> CountedStep:
    """Count one step of a rank of the job, on FakeTensors.

    Args:
        args: final values, of a dry run.
        rank: global rank.
        micro_batches: default: those of the job.
        watch: is around the step that is counted.
        imbalance: load of the first expert-parallel rank over the mean.
    """
    from mindspeed.planner.balanced_routing import assumed_routing
    from mindspeed.planner.fake_world import fake_world
    from mindspeed.planner.values import ConstantValues

    args = copy.copy(args)
    with ExitStack() as stack:
        stack.enter_context(fake_world(args, rank))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(ConstantValues())
        stack.enter_context(assumed_routing(args, imbalance))
        return count_here(args, rank, micro_batches, watch)


def count_here(
    args: argparse.Namespace,
    rank: int,
    micro_batches: int | None = None,
    watch: Watch = nullcontext,
) -> CountedStep:
    """Count one step of this process, whose process groups exist.

    Args:
        args: final values.
        rank: global rank of this process.
        micro_batches: default: those of the job.
        watch: is around the step that is counted.
    """
    from mindspeed.planner.step_of_rank import StepOfRank

    memory, ledger = LiveMemory(), CommLedger()
    with memory:
        step = StepOfRank(args, memory, micro_batches)
        step.run()  # a second step is like all later ones: optimizer states exist
        static = Counter({kind: n for kind, n in memory.now.items() if n})
        memory.restart()
        with ledger, FlopCounter() as flops, watch(memory):
            step.run()
        return CountedStep(
            rank,
            step.micro_batches,
            step.parameters,
            static,
            memory.peak,
            Counter({kind: n for kind, n in memory.at_peak.items() if n}),
            flops.count,
            tuple(ledger.events),
        )
