"""Record the lifetimes of the storages of one step of one rank.

    found = record(job, point, cluster)     # a Recording; changes the state of this process

The rank runs the real program on FakeTensors, as :mod:`mindspeed.planner.count.counted_step`
counts it. The recorded step is the second one: optimizer states and caches exist.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from mindspeed.features.registry import planned_as
from mindspeed.instruments.clock import VirtualClock
from mindspeed.instruments.live_memory import HOST
from mindspeed.job import Parallel
from mindspeed.planner.count.marks import Marks
from mindspeed.planner.count.recording import (
    BUILT,
    EXPERT_PRODUCTS,
    PER_LAYER,
    Block,
    Message,
    Part,
    Point,
    Recording,
    Row,
    Traffic,
    add,
    row_of,
)
from mindspeed.planner.count.step_counter import StepCounter, claim
from mindspeed.planner.job import Job

if TYPE_CHECKING:
    from mindspeed.planner.cluster import Cluster


class Recorder(StepCounter):
    """Appends every change of the bytes of the device to the block that runs.

    Args:
        clock: clock of the step, if any.

    Attributes:
        blocks: blocks so far.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        super().__init__(clock)
        self.blocks: list[Block] = []
        self.starts: list[float] = []
        self._before = 0, 0, 0
        self._routed = 0.0
        self._passed: set[int] = set()  # keys of storages that were sent or received

    def enter(self, action: int, part: Part, layer: int) -> None:
        """Begin a block; a block that goes on is not divided."""
        if self.blocks:
            last = self.blocks[-1]
            if (last.action, last.part, last.layer) == (action, part, layer):
                return  # the input of a recomputed layer has two gradients
        self.close()
        self.blocks.append(Block(action, part, layer))
        self.starts.append(self._clock.now if self._clock is not None else 0.0)

    def close(self) -> None:
        """Complete the figures of the block that runs."""
        now = self.flops.total, self.flops.recompute, len(self.communications)
        if self.blocks:
            last, (flops, recomputed, sent) = self.blocks[-1], self._before
            last.flops += now[0] - flops
            last.recomputed += now[1] - recomputed
            add(last.sent, _traffic(self.communications[sent:]))
            if self._clock is not None:
                last.seconds = self._clock.now - self.starts[-1]
                add_routed(last, self._clock.routed - self._routed)
        self._before = now
        self._routed = 0.0 if self._clock is None else self._clock.routed

    def _change(self, key: int, nbytes: int) -> None:
        before, kind = self._storages[key]
        super()._change(key, nbytes)
        self._note(kind, nbytes - before)

    def _freed(self, key: int) -> None:
        nbytes, kind = self._storages[key]
        super()._freed(key)
        if key in self._passed:
            self._passed.remove(key)
            if nbytes and self.blocks and self.blocks[-1].part in PER_LAYER:
                self.blocks[-1].messages.append(len(self.blocks[-1].deltas))
        self._note(kind, -nbytes)

    def passed(self, tensors: list[torch.Tensor], group: ProcessGroup) -> None:
        """Remember which storages are messages of the pipeline."""
        if group.group_desc.startswith("PIPELINE"):
            self._passed.update(one.untyped_storage()._cdata for one in tensors)

    def _note(self, kind: str, delta: int) -> None:
        if self.blocks and delta and kind != HOST:
            self.blocks[-1].deltas.append(delta)
            self.blocks[-1].kinds.append(kind)


def record(job: Job, point: Point, cluster: Cluster | None = None) -> Recording:
    """Record a rank of a small job; changes the state of this process.

    Args:
        job: the job whose flags ``point`` overrides.
        point: the rank.
        cluster: rates of the clock; None: no times.

    Raises:
        MindSpeedError: the job cannot start, or cannot be counted.
        PlanError: the executed actions are not those of the schedule's plan.
    """
    from mindspeed.planner.cluster.rates import clock_of

    args = job.settings(point.overrides, point.devices).args
    clock = None if cluster is None else clock_of(cluster, args)
    return record_point(args, point, clock)


def record_point(args: argparse.Namespace, point: Point, clock: VirtualClock | None) -> Recording:
    """Record the rank of a point, whose job has final values ``args``; see :func:`record`."""
    if not point.forward:
        return between_steps(args, point.stage, clock)
    return record_args(args, point.stage, clock, point.bare, point.step)


def record_args(
    args: argparse.Namespace,
    stage: int,
    clock: VirtualClock | None = None,
    bare: bool = False,
    a_step: bool = True,
) -> Recording:
    """Record a pipeline rank of a job with final values ``args``; see :func:`record`.

    Args:
        args: final values.
        stage: pipeline rank.
        clock: of the step.
        bare: whether its layers are bare.
        a_step: whether a step is recorded after the one that makes all states; if not, layers are
            real in the last micro-batch, whose bytes they keep between steps.
    """
    from mindspeed.planner.count.balanced_routing import planned_rank
    from mindspeed.planner.count.bare import make_bare
    from mindspeed.planner.count.counted_step import no_collections
    from mindspeed.planner.count.loop import StepOfRank
    from mindspeed.training.fake_job import rank_in_stage
    from mindspeed.training.pipeline_figures import scheduled_pipeline

    planned, has_plan = planned_row(args, stage), scheduled_pipeline(args) is not None
    with (
        planned_rank(args, rank_in_stage(args, stage)) as own,
        no_collections(),
        Recorder(clock) as recorder,
    ):
        step = StepOfRank(own, recorder)
        first = step.micro_batches
        if first_may_be_short(own):
            first = 1
        elif own.virtual_pipeline_model_parallel_size and not has_plan:
            group = own.microbatch_group_size_per_vp_stage or 0
            first = max(group, own.pipeline_model_parallel_size)
        if bare:
            make_bare(step.model, recorder)
        elif not a_step and {place.op for place in planned} <= {"F", "B"}:
            make_bare(step.model, recorder, first - 1)
        claim(recorder, step.model)
        step.run_shortest(first)
        claim(recorder, step.model)
        gc.collect()
        static, host = Counter({k: n for k, n in recorder.now.items() if n}), recorder.host
        static.pop(HOST, None)
        recorder.restart()
        marks = Marks(recorder.enter, planned)
        if a_step:
            with _recording(recorder, clock), marks.watching(step.model):
                step.run()
            marks.check()
        blocks, recorder.blocks = tuple(recorder.blocks), []  # what is freed now is no event
        return Recording(
            planned,
            blocks,
            marks.layers,
            static,
            step.parameters,
            host,
            recorder.peak,
            Counter({kind: n for kind, n in recorder.at_peak.items() if n}),
        )


def between_steps(
    args: argparse.Namespace, stage: int, clock: VirtualClock | None = None
) -> Recording:
    """Record what a rank of any size has between steps, and its optimizer, without a forward.

    Paddings of buffers that data-parallel ranks share do not grow with layers, nor do the bytes of
    the optimizer's step.
    """
    from mindspeed.planner.count.balanced_routing import planned_rank
    from mindspeed.planner.count.counted_step import no_collections
    from mindspeed.planner.count.loop import StepOfRank
    from mindspeed.training.fake_job import rank_in_stage

    with (
        planned_rank(args, rank_in_stage(args, stage)) as own,
        no_collections(),
        Recorder(clock) as recorder,
    ):
        step = StepOfRank(own, recorder, 1)
        claim(recorder, step.model)
        step.model.optimizer.step()  # makes its states
        claim(recorder, step.model)
        gc.collect()
        found = {kind: recorder.now[kind] for kind in BUILT if recorder.now[kind]}
        recorder.restart()
        with _recording(recorder, clock):
            recorder.enter(-1, Part.CLEAR, 0)
            step.model.optimizer.zero_grad()
            recorder.enter(-1, Part.UPDATE, 0)
            step.model.optimizer.step()
        blocks, recorder.blocks = tuple(recorder.blocks), []
        none = Counter[str]()
        return Recording((), blocks, (), Counter(found), step.parameters, 0, 0, none)


@contextlib.contextmanager
def _recording(recorder: Recorder, clock: VirtualClock | None) -> Iterator[None]:
    """Count and time what runs in this context, and complete its blocks."""
    with recorder.counting():
        yield
    recorder.close()
    if clock is not None:
        assign(clock, recorder.blocks, recorder.starts)


def planned_row(args: argparse.Namespace, stage: int) -> Row:
    """The row that the schedule's plan has for a pipeline rank."""
    from mindspeed.training.pipeline_figures import micro_batches, request_of

    parallel, request = Parallel.of(args), request_of(args)
    return row_of(request, parallel.pipeline, parallel.chunks or 1, micro_batches(args), stage)


def first_may_be_short(args: argparse.Namespace) -> bool:
    """Whether a first step of one micro-batch creates all states that a whole one does."""
    if Parallel.of(args).chunks is not None or vars(args).get("planned_loop") is not None:
        return False  # an interleaved schedule and a script's own step need several
    return not planned_as("needs steps", vars(args))


def _traffic(communications: Iterable[Any]) -> dict[Message, Traffic]:
    found: dict[Message, Traffic] = {}
    for one in communications:
        if len(one.ranks) > 1:
            key = Message(one.description, len(one.ranks), one.op)
            add(found, {key: Traffic(1, one.payload, one.wire)})
    return found


def add_routed(block: Block, seconds: float) -> None:
    """Add seconds of products of experts to a block."""
    if seconds:
        add(block.sent, {EXPERT_PRODUCTS: Traffic(waited=seconds)})


def assign(clock: VirtualClock, blocks: Sequence[Block], starts: Sequence[float]) -> None:
    """Assign waits to the blocks in which they begin."""
    for interval in clock.intervals:
        one = interval.communication
        if one is not None and len(one.ranks) > 1 and interval.kind == "wait":
            block = blocks[max(0, bisect_right(starts, interval.start) - 1)]
            key = Message(one.description, len(one.ranks), "")
            add(block.sent, {key: Traffic(waited=interval.seconds)})
