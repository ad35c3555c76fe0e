"""The price of a layout: memory of every pipeline rank and seconds of a step, from its signature.

    prediction = predict(signature, shape, cluster)

Memory is composed: bytes between steps of a rank's chunks, and along its row of the schedule what
micro-batches in flight keep and what the running action needs. Time is simulated: the actions of
all ranks with the seconds of their chunks, then data-parallel communication and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.composed.figures import END, Figure, Quantity, within_actions
from mindspeed.planner.composed.pieces import Context, Previous, released
from mindspeed.planner.composed.signature import Signature
from mindspeed.planner.composed.step_plan import (
    Actions,
    DataParallel,
    StageCosts,
    StepPlan,
    closing_seconds,
    data_parallel,
    step_plan,
)
from mindspeed.planner.shape import Shape


@dataclass(frozen=True)
class RankFigures:
    """Memory of a pipeline rank, in bytes of tensors.

    Attributes:
        rank: pipeline rank.
        static: bytes between steps, by kind.
        activations: bytes at the peak beyond those between steps.
        peak: largest number of bytes alive.
        fits: whether a device of the cluster has as much memory.
    """

    rank: int
    static: Mapping[str, float]
    activations: float
    peak: float
    fits: bool


@dataclass(frozen=True)
class Prediction:
    """The price of a layout.

    Attributes:
        layout: the layout.
        seconds: duration of a step.
        peak_bytes: peak memory of the fullest rank.
        ranks: memory of each pipeline rank.
        bubble: fraction of the pipeline's time in which the mean rank computes nothing useful.
        exposed: seconds of a step in which the busiest rank waits, by process group.
        optimizer_seconds: seconds from the end of the pipeline to the next step, without waiting.
        flops_per_device: FLOPs of the mean device in a step, recomputation included.
        mfu: model FLOPs, without recomputation, as a fraction of what the devices could do.
        tokens_per_second_per_device: throughput.
        limit: largest part of the step: ``compute``, ``bubble`` or the name of a wait.
    """

    layout: Any
    seconds: float
    peak_bytes: float
    ranks: tuple[RankFigures, ...]
    bubble: float
    exposed: Mapping[str, float]
    optimizer_seconds: float
    flops_per_device: float
    mfu: float
    tokens_per_second_per_device: float
    limit: str

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return all(rank.fits for rank in self.ranks)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by what they are spent on; their sum is :attr:`seconds`."""
        pipeline = self.seconds - self.optimizer_seconds
        bubble = self.bubble * (pipeline - self.exposed.get("data parallel", 0.0))
        found = {"bubble of the pipeline": bubble, "optimizer": self.optimizer_seconds}
        for group, seconds in self.exposed.items():
            if seconds:
                found[f"waiting: {group.removesuffix('_GROUP').replace('_', ' ').lower()}"] = (
                    seconds
                )
        return {"computation": self.seconds - sum(found.values()), **found}


def predict(
    signature: Signature,
    shape: Shape,
    cluster: Cluster,
    layout: Any = None,
) -> Prediction:
    """Predict memory and time of a shape.

    Args:
        signature: pieces of the shape's layers, measured with times of the cluster.
        shape: the job.
        cluster: the machine.
        layout: passed through.

    Raises:
        ConfigError: the schedule does not exist for this shape.
    """
    plans = step_plan(shape, _costs(signature, shape, cluster))
    ranks = tuple(memory(signature, shape, cluster.memory_limit, plans.short))
    ends = [_end_of_step(signature, shape, cluster, rank) for rank in range(shape.ranks)]
    waits = _waits(signature, shape, plans)
    flops = _flops(signature, shape)
    return assembled(shape, cluster, plans, ranks, ends, waits, flops, layout)


def assembled(
    shape: Shape,
    cluster: Cluster,
    plans: StepPlan,
    ranks: tuple[RankFigures, ...],
    ends: Sequence[DataParallel],
    waits: Sequence[Mapping[str, float]],
    flops: float,
    layout: Any = None,
) -> Prediction:
    """Assemble a prediction from a simulated schedule and what is added to it.

    Args:
        shape: the job.
        cluster: the machine.
        plans: the schedule with the seconds of its actions.
        ranks: memory of each pipeline rank.
        ends: seconds after the last action of each pipeline rank.
        waits: seconds that each pipeline rank waits within its actions, by process group.
        flops: FLOPs of the mean device.
        layout: passed through.
    """
    pipeline = plans.seconds
    slowest = max(ends, key=lambda end: end.seconds)
    seconds = pipeline + slowest.seconds
    busiest = max(range(shape.ranks), key=lambda rank: sum(waits[rank].values()))
    exposed = {**waits[busiest], "data parallel": slowest.exposed}
    if shape.ranks > 1 and not shape.overlap_messages:
        each = message_seconds(shape, cluster)
        exposed["messages"] = each * 2 * shape.micro_batches * shape.chunks
    idle = plans.bubble * pipeline
    devices, peak = shape.devices, cluster.device.peak(shape.dtype)
    rate = seconds * devices
    share = {**exposed, "bubble": idle}
    share["compute"] = seconds - sum(share.values())
    return Prediction(
        layout=layout,
        seconds=seconds,
        peak_bytes=max(rank.peak for rank in ranks),
        ranks=ranks,
        bubble=plans.bubble,
        exposed=exposed,
        optimizer_seconds=slowest.optimizer,
        flops_per_device=flops,
        mfu=shape.model_flops / (rate * peak) if rate else 0.0,
        tokens_per_second_per_device=shape.tokens / rate if rate else 0.0,
        limit=max(share, key=lambda name: share[name]),
    )


def memory(
    signature: Signature, shape: Shape, limit: float = float("inf"), plan: Plan | None = None
) -> Iterator[RankFigures]:
    """Yield the bytes of each pipeline rank.

    Args:
        signature: pieces of the shape's layers.
        shape: the job.
        limit: bytes of a device.
        plan: plan of the schedule; default: built here.
    """
    if plan is None:
        plan = step_plan(shape, Costs()).short
    for rank in range(shape.ranks):
        figures = signature.rank(shape.chunks_of(rank), shape.data_parallel)
        static = {n.name: value for n, value in figures.items() if n.quantity is Quantity.STATIC}
        tail = figures[Figure(Quantity.TAIL)]
        most = max(tail, _activations(signature, shape, rank, plan.rows[rank]))
        total = sum(static.values())
        yield RankFigures(rank, static, most, total + most, total + most <= limit)


def _activations(signature: Signature, shape: Shape, rank: int, row: tuple[Action, ...]) -> float:
    """Peak bytes beyond those between steps, along the actions of a rank."""
    kept, stash, needs = {}, {}, dict[tuple[int, Previous, str], float]()
    roles = [role for role, _ in shape.chunks_of(rank)]
    figures = signature.rank(shape.chunks_of(rank), shape.data_parallel)
    held = -figures.get(Figure(Quantity.FREED), 0.0)
    last, most = None, 0.0
    for action in row:
        op, stage = action.op, action.stage
        if action.microbatch is None:
            continue
        role, kinds = shape.role(stage), shape.stages[stage]
        if stage not in kept:
            figures = signature.chunk(role, kinds)
            kept[stage] = figures[Figure(Quantity.KEPT)]
            stash[stage] = figures[Figure(Quantity.STASH)]
        key = stage, Previous.of(last, action), op
        if key not in needs:
            needs[key] = signature.need(Context.of(role, roles, rank), kinds, key[1], op)
        most = max(most, held + needs[key])
        held += released(op, kept[stage], stash[stage])
        last = action
    return most


def _costs(signature: Signature, shape: Shape, cluster: Cluster) -> StageCosts:
    stages = []
    for stage, kinds in enumerate(shape.stages):
        figures = signature.chunk(shape.role(stage), kinds)
        stages.append({n.op: s for n, s in figures.items() if n.quantity is Quantity.SECONDS})
    return stage_costs(stages, shape, cluster)


def stage_costs(
    chunks: Sequence[Mapping[str, float]], shape: Shape, cluster: Cluster
) -> StageCosts:
    """Costs of the actions of a schedule, with the messages that block them.

    Args:
        chunks: seconds of the ops of each stage; a whole backward or a split one may be missing.
        shape: the job.
        cluster: the machine.
    """
    message = message_seconds(shape, cluster)
    blocking = 0.0 if shape.overlap_messages else message
    stages = []
    for stage, known in enumerate(chunks):
        seconds = dict(known)
        seconds["F"] = seconds.get("F", 0.0) + (blocking if stage + 1 < len(chunks) else 0)
        for op in ("B", "I"):
            if op in seconds:
                seconds[op] += blocking if stage else 0
        if "I" not in seconds:  # the tiny run had no such action
            seconds["I"] = seconds["W"] = seconds.get("B", 0.0) / 2
        elif "B" not in seconds:
            seconds["B"] = seconds["I"] + seconds.get("W", 0.0)
        stages.append(seconds)
    mean = [sum(one.get(op, 0.0) for one in stages) / shape.ranks for op in ("F", "I", "W")]
    return StageCosts(
        forward=mean[0],
        input_gradient=mean[1],
        weight_gradient=mean[2],
        latency=message if shape.overlap_messages else 0.0,
        of_stages=tuple(stages),
    )


def message_seconds(shape: Shape, cluster: Cluster) -> float:
    """Seconds of a message to the next pipeline rank."""
    if shape.ranks == 1:
        return 0.0
    return cluster.collective_seconds("send", shape.message, (0, shape.devices // shape.ranks))


def _end_of_step(signature: Signature, shape: Shape, cluster: Cluster, rank: int) -> DataParallel:
    chunks = [
        signature.chunk(shape.role(stage), shape.stages[stage], shape.data_parallel)
        for stage in shape.placement.stages[rank]
    ]
    figures = signature.rank(shape.chunks_of(rank), shape.data_parallel)
    end = figures[Figure(Quantity.SECONDS, END)]
    optimizer = end + closing_seconds(figures, shape, cluster)
    return data_parallel(chunks, shape, cluster, optimizer)


def messages(
    signature: Signature, shape: Shape, rank: int, actions: Actions
) -> dict[Figure, float]:
    """Messages and waiting of a pipeline rank in a step, in its actions and between them."""
    stages = shape.placement.stages[rank]
    chunks = {one: signature.chunk(shape.role(one), shape.stages[one]) for one in stages}
    return within_actions(chunks, actions, shape.micro_batches)


def _waits(signature: Signature, shape: Shape, plans: StepPlan) -> list[dict[str, float]]:
    """Seconds that each pipeline rank waits within its actions, by process group."""
    every = [messages(signature, shape, *one) for one in enumerate(plans.actions)]
    return [{n.name: v for n, v in one.items() if n.quantity is Quantity.WAIT} for one in every]


def _flops(signature: Signature, shape: Shape) -> float:
    """FLOPs of the mean device."""
    stages, flops = enumerate(shape.stages), Figure(Quantity.FLOPS)
    total = sum(signature.chunk(shape.role(s), kinds)[flops] for s, kinds in stages)
    return total * shape.micro_batches / shape.ranks
