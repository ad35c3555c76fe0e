"""What is predicted of a layout: memory of its ranks, seconds of a step, what these are spent on.

assembled(shape, cluster, plans, ranks, ends, waits, flops)     # a Prediction
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any

from mindspeed.planner.cluster import Cluster
from mindspeed.planner.shape import EXPERT, Shape
from mindspeed.planner.time.picture import StepPicture
from mindspeed.planner.time.step_plan import EXCHANGE, DataParallel, StageCosts, StepPlan


@dataclass(frozen=True)
class RankFigures:
    """Memory of a pipeline rank, in bytes of tensors.

    Attributes:
        static: bytes between steps, by kind.
        peak: largest number of bytes alive.
        fits: whether a device of the cluster has as much memory.
    """

    static: Mapping[str, float]
    peak: float
    fits: bool

    @property
    def activations(self) -> float:
        """Bytes at the peak beyond those between steps."""
        return self.peak - sum(self.static.values())


@dataclass(frozen=True)
class Prediction:
    """The price of a layout.

    Attributes:
        layout: the layout.
        seconds: duration of a step.
        peak_bytes: peak memory of the fullest rank; with several kinds of devices, what one kind
            has less than the largest counts as used.
        ranks: memory of each pipeline rank.
        bubble: fraction of the pipeline's time in which the mean rank computes nothing useful.
        exposed: seconds of a step in which the busiest rank waits, by process group.
        optimizer_seconds: seconds from the end of the pipeline to the next step, without waiting.
        flops_per_device: FLOPs of the mean device in a step, recomputation included.
        mfu: model FLOPs, without recomputation, as a fraction of what the devices could do.
        tokens_per_second_per_device: throughput.
        limit: largest part of the step: ``compute``, ``bubble`` or the name of a wait.
        picture: its schedule and what is alive over it, if it was asked for and is short enough.
        uneven_seconds: duration if the busiest rank gets as many tokens of experts as it may beyond
            what is assumed (:mod:`mindspeed.planner.expert_loads`).
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
    picture: StepPicture | None = None
    uneven_seconds: float = 0.0

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


def assembled(
    shape: Shape,
    cluster: Cluster,
    plans: StepPlan,
    memory: Sequence[tuple[Mapping[str, float], float]],
    ends: Sequence[DataParallel],
    waits: Sequence[Mapping[str, float]],
    flops: float,
    layout: Any = None,
    more: float = 0.0,
) -> Prediction:
    """Assemble a prediction from a simulated schedule and what is added to it.

    Args:
        plans: the schedule with the seconds of its actions.
        memory: bytes of each pipeline rank between steps, by kind, and at its peak.
        ends: seconds after the last action of each pipeline rank.
        waits: seconds that each pipeline rank waits within its actions, by process group.
        flops: FLOPs of the mean device.
        more: part of the pipeline's seconds that uneven routing adds.
    """
    pipeline = plans.seconds
    slowest = max(ends, key=lambda end: end.seconds)
    seconds = pipeline + slowest.seconds
    busiest = max(range(shape.ranks), key=lambda rank: sum(waits[rank].values()))
    exposed = {**waits[busiest], "data parallel": slowest.exposed}
    if shape.ranks > 1 and not shape.overlap_messages:
        each = max(message_seconds(shape, cluster))
        exposed["messages"] = each * 2 * shape.micro_batches * shape.chunks
    idle = plans.bubble * pipeline
    devices, peak = shape.devices, cluster.peak(shape.dtype)
    rate = seconds * devices
    share = {**exposed, "bubble": idle}
    share["compute"] = seconds - sum(share.values())
    limits = [kind.memory_limit for kind in shape.kinds_on(cluster)]
    peaks = [peak for _, peak in memory]
    return Prediction(
        layout=layout,
        seconds=seconds,
        peak_bytes=cluster.memory_limit + max(map(sub, peaks, limits)),
        ranks=tuple(
            RankFigures(static, peak, peak <= limit)
            for (static, peak), limit in zip(memory, limits, strict=True)
        ),
        bubble=plans.bubble,
        exposed=exposed,
        optimizer_seconds=slowest.optimizer,
        flops_per_device=flops,
        mfu=shape.model_flops / (rate * peak) if rate else 0.0,
        tokens_per_second_per_device=shape.tokens / rate if rate else 0.0,
        limit=max(share, key=lambda name: share[name]),
        uneven_seconds=seconds + more * pipeline,
    )


def more_when_uneven(ranks: Sequence[tuple[float, float]], shape: Shape) -> float:
    """Part of the pipeline's seconds that a busiest rank adds, which its slowest stage decides.

    Args:
        ranks: seconds of the actions of each pipeline rank, and those of products and exchanges of
            experts among them.
    """
    slowest = max(busy for busy, _ in ranks)
    if not slowest:
        return 0.0
    return max(busy + shape.uneven * routed for busy, routed in ranks) / slowest - 1


def stage_costs(
    chunks: Sequence[Mapping[str, float]], shape: Shape, cluster: Cluster
) -> StageCosts:
    """Costs of the actions of a schedule, with the messages that block them.

    Args:
        chunks: seconds of the ops of each stage; a whole backward or a split one may be missing.
    """
    messages = message_seconds(shape, cluster)
    blocking = [0.0, *(0.0 if shape.overlap_messages else one for one in messages), 0.0]
    stages = []
    for stage, known in enumerate(chunks):
        seconds = dict(known)
        seconds["F"] = seconds.get("F", 0.0) + blocking[stage + 1]
        for op in ("B", "I"):
            if op in seconds:
                seconds[op] += blocking[stage]
        if "I" not in seconds:  # whole backwards are recorded only
            seconds["I"] = seconds["W"] = seconds.get("B", 0.0) / 2
        elif "B" not in seconds:
            seconds["B"] = seconds["I"] + seconds.get("W", 0.0)
        stages.append(seconds)
    ops = "F", "I", "W", EXCHANGE
    mean = [sum(one.get(op, 0.0) for one in stages) / shape.ranks for op in ops]
    return StageCosts(
        forward=mean[0],
        input_gradient=mean[1],
        weight_gradient=mean[2],
        exchange=mean[3],
        latency=max(messages, default=0.0) if shape.overlap_messages else 0.0,
        rows_again=shape.rows_again,
        of_stages=tuple(stages),
        layers_of_stages=tuple(
            sum(kind.startswith(EXPERT) for kind in stage) for stage in shape.stages
        ),
    )


def message_seconds(shape: Shape, cluster: Cluster) -> list[float]:
    """Seconds of a message from each stage to the next one; none between chunks of one rank."""
    if shape.ranks == 1:
        return []
    each = shape.devices // shape.ranks
    owners = {stage: rank for rank, stages in enumerate(shape.placement.stages) for stage in stages}
    found = []
    for stage in range(len(owners) - 1):
        pair = owners[stage] * each, owners[stage + 1] * each
        same = pair[0] == pair[1]
        found.append(0.0 if same else cluster.collective_seconds("send", shape.message, pair))
    return found
