"""The price of a layout: memory of every pipeline rank and seconds of a step, from its traces.

prediction = predict(traces, shape, cluster)

Memory is that of the traces. Time is simulated: the actions of all ranks with the seconds of their
chunks, then data-parallel communication and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mindspeed.planner.cluster import Cluster
from mindspeed.planner.compose.rank import RankTrace
from mindspeed.planner.count.check import GroupTraffic as Row
from mindspeed.planner.count.check import RankCheck
from mindspeed.planner.count.recording import EXPERT_PRODUCTS, Message, Sent
from mindspeed.planner.count.timed_step import BETWEEN_CHUNKS
from mindspeed.planner.shape import Shape
from mindspeed.planner.time.picture import step_picture
from mindspeed.planner.time.prediction import (
    Prediction,
    assembled,
    more_when_uneven,
    stage_costs,
)
from mindspeed.planner.time.step_plan import (
    EXCHANGE,
    DataParallel,
    dense_ranks,
    expert_ranks,
    group_ranks,
    step_plan,
)
from mindspeed.planner.time.whole_ranks import hidden_seconds, still_exposed


def predict(
    traces: Sequence[RankTrace],
    shape: Shape,
    cluster: Cluster,
    layout: Any = None,
    *,
    drawn: bool = False,
) -> Prediction:
    """Predict memory and time of a job.

    Args:
        traces: all its pipeline ranks, recorded with times of the cluster.
        drawn: add a picture of the step.

    Raises:
        ConfigError: the schedule does not exist for this shape.
    """
    chunks: list[dict[str, float]] = [{} for _ in shape.stages]
    for one, stages in zip(traces, shape.placement.stages, strict=True):
        for (op, chunk), seconds in one.step.seconds.items():
            own = chunks[stages[chunk]]
            own[op] = seconds
            if shape.request.pairs:  # which hide their all-to-alls
                own[op] -= one.step.exchanges[op, chunk]
                own[EXCHANGE] = one.step.exchanges["F", chunk] / 2
    costs = stage_costs(chunks, shape, cluster)
    plans = step_plan(shape, costs)
    memory = [(one.static, one.peak) for one in traces]
    edges = zip(plans.starts, plans.idle, strict=True)
    ends = [
        _end_of_step(one, shape, cluster, kind, edge)
        for one, kind, edge in zip(traces, shape.kinds_on(cluster), edges, strict=True)
    ]
    waits = [_waits(one) for one in traces]
    if shape.request.pairs:
        waits = [
            still_exposed(one, hidden_seconds(rank, plans.short, shape, costs))
            for rank, one in enumerate(waits)
        ]
    flops = sum(one.step.flops for one in traces) / shape.ranks
    more = more_when_uneven([(_busy(one), _routed(one)) for one in traces], shape)
    found = assembled(shape, cluster, plans, memory, ends, waits, flops, layout, more)
    if drawn:
        found = replace(found, picture=step_picture(traces, shape, costs, found.seconds))
    return found


def _busy(trace: RankTrace) -> float:
    """Seconds of the actions of a rank."""
    known = dict(trace.step.seconds)
    for (op, chunk), seconds in trace.step.seconds.items():
        if op == "I":  # whole ones may run in pairs only
            known.setdefault(("B", chunk), seconds + known["W", chunk])
    return sum(known[place[:2]] for place in trace.step.row)


def _routed(trace: RankTrace) -> float:
    """Those of products and exchanges of experts among them."""
    return sum(one.waited for name, one in trace.step.sent.items() if name.routed)


def _waits(trace: RankTrace) -> dict[str, float]:
    """Seconds that a rank waits within its actions, by process group."""
    found: dict[str, float] = {}
    for name, one in trace.step.sent.items():
        no_wait = name == EXPERT_PRODUCTS or any(part in name.group for part in BETWEEN_CHUNKS)
        if one.waited and not no_wait:
            found[name.group] = found.get(name.group, 0.0) + one.waited
    return found


def _end_of_step(
    trace: RankTrace, shape: Shape, cluster: Cluster, kind: Cluster, edge: tuple[float, float]
) -> DataParallel:
    """Seconds after the last action, and those of data-parallel collectives that nothing hides.

    On the first pipeline rank Megatron-Core reduces gradients bucket by bucket while the last
    backward runs, and gathers parameters while the next forward runs; nothing hides the last bucket
    to reduce and the first one to gather. Other ranks have one bucket, which the end and the start
    of the pipeline hide.

    Args:
        kind: of the devices of the rank.
        edge: seconds before the first and after the last action of the rank.
    """
    optimizer = trace.step.closing_seconds
    for name, one in trace.step.closing.items():
        ranks = group_ranks(name.group, name.size, shape)
        if name.op and one.payload > 0 and len(ranks) > 1:
            calls = max(1, round(one.calls))
            machine = kind if max(ranks) < shape.devices // shape.ranks else cluster
            optimizer += calls * machine.collective_seconds(name.op, one.payload / calls, ranks)
    start, idle = edge
    buckets = 1
    if shape.bucket and not start:  # of the first pipeline rank
        buckets = max(1, round(trace.parameters / shape.bucket))
    reduce = _collectives(trace.shared, ("reduce_scatter", "all_reduce"), shape, kind, buckets)
    gather = _collectives(trace.shared, ("all_gather",), shape, kind, buckets)
    exposed = max(0.0, reduce - idle)
    if shape.overlap_gradients and buckets > 1:
        backward = sum(t for (op, _), t in trace.step.seconds.items() if op == "B")
        exposed = max(reduce / buckets, reduce - backward)
    if shape.overlap_parameters:
        forward = sum(t for (op, _), t in trace.step.seconds.items() if op == "F")
        gather = max(gather / buckets, gather - forward) if buckets > 1 else gather - start
    return DataParallel(exposed + max(0.0, gather), optimizer)


def _collectives(
    sent: Sent, ops: Sequence[str], shape: Shape, cluster: Cluster, buckets: int
) -> float:
    """Seconds of collectives that have so many buckets together."""
    asked = {name: one for name, one in sent.items() if name.op in ops and one.payload > 0}
    whole = sum(one.payload for one in asked.values())
    total = 0.0
    for name, one in asked.items():
        ranks = _replicas(name, shape)
        if len(ranks) > 1:
            calls = max(1, round(buckets * one.payload / whole))
            payload = one.payload / calls
            if name.op == "all_gather":  # of the shard, which may be recorded on fewer ranks
                payload *= name.size / len(ranks)
            total += calls * cluster.collective_seconds(name.op, payload, ranks)
    return total


def _replicas(name: Message, shape: Shape) -> tuple[int, ...]:
    return expert_ranks(shape) if "EXPERT" in name.group else dense_ranks(shape)


def rank_check(rank: int, trace: RankTrace, shape: Shape) -> RankCheck:
    """Figures of a pipeline rank, as counting gives them."""
    return RankCheck(
        (rank,),
        trace.parameters,
        dict(trace.static),
        trace.peak,
        dict(trace.at_peak),
        trace.step.flops,
        trace.step.recomputed,
        tuple(sorted(_rows(trace, shape), key=lambda row: (-row.wire, row.group, row.op))),
        trace.host,
    )


def _rows(trace: RankTrace, shape: Shape) -> Iterator[Row]:
    """Messages of a step by group and operation."""
    sums: dict[tuple[str, int, str], list[float]] = {}
    for sent in (trace.step.sent, trace.step.closing, trace.shared):
        for name, one in sent.items():
            if name.op and one.payload > 0:
                size = name.size if name.shared else len(group_ranks(name.group, name.size, shape))
                row = sums.setdefault((name.group, size, name.op), [0.0, 0.0, 0.0])
                for index, value in enumerate((one.calls, one.payload, one.wire)):
                    row[index] += value
    for (group, size, op), found in sums.items():
        calls, payload, wire = map(round, found)
        if op == "all_reduce":
            wire = round(2 * (size - 1) / size * payload)
        if payload and size > 1:
            yield Row(group, size, op, calls, payload, wire)
