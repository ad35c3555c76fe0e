"""Steps of tiny jobs, counted and timed on FakeTensors; run in a process of its own."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from tests.planner.real_and_fake import SMALL
from tests.support.trainer_job import command


def arguments(flags: str, world: int) -> Any:
    """Final values of a tiny job."""
    from mindspeed.training.initialize import prepare

    return prepare(command(["--dry-run", *SMALL.split(), *flags.split()]), world).args


def counted(jobs: list[tuple[str, int]]) -> list[tuple[int, Counter[Any]]]:
    """Parameters and payload by operation, group and phase of each job's first rank."""
    from mindspeed.planner.count.counted_step import count_step

    found = []
    for flags, world in jobs:
        step = count_step(arguments(flags, world))
        sent: Counter[Any] = Counter()
        for one in step.communications:
            sent[one.op, one.description, one.phase] += one.payload
        found.append((step.parameters, sent))
    return found


def timed(jobs: list[tuple[str, int]], **changes: Any) -> list[Any]:
    """Timed first rank of each job on the generic cluster with some fields changed."""
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.count.timed_step import time_step

    cluster = dataclasses.replace(load_cluster("generic"), **changes)
    return [time_step(arguments(flags, world), cluster) for flags, world in jobs]


def overlapped(slowdown: float, nbytes: int) -> list[float]:
    """Seconds of a product alone, beside an all-reduce of ``nbytes``, and of that all-reduce."""
    import torch
    import torch.distributed as dist

    from mindspeed.instruments.clock import VirtualClock
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.cluster.rates import DeviceRates

    cluster = dataclasses.replace(load_cluster("generic"), overlap_slowdown=slowdown)
    a = torch.ones(256, 256)
    with VirtualClock.of(DeviceRates(cluster)) as clock:
        a @ a
        work = dist.all_reduce(torch.ones(nbytes // 4), async_op=True)
        a @ a
        work.wait()
    alone, beside = (one for one in clock.select("compute") if one.name == "aten::mm")
    (sent,) = clock.select("communication")
    return [alone.seconds, beside.seconds, sent.seconds]


def costs_of_layers(flags: str, world: int, stage: int) -> dict[str, Any]:
    """Costs of every layer and phase, their sum, and seconds of the shortest step of a stage."""
    from mindspeed.planner.cluster import Level, load_cluster
    from mindspeed.planner.count.layer_costs import by_scope, total
    from mindspeed.planner.count.parts import fewest_micro_batches
    from mindspeed.planner.count.timed_step import time_step
    from mindspeed.training.fake_job import rank_in_stage

    args = arguments(flags, world)
    count, rank = fewest_micro_batches(args), rank_in_stage(args, stage)
    link = Level("network", size=None, gbs=1.0, latency_us=0.0)  # bytes decide
    cluster = dataclasses.replace(load_cluster("generic"), levels=(link,))
    step = time_step(args, cluster, rank, micro_batches=count)
    return {
        "layers": {str(one): costs for one, costs in by_scope(step.intervals).items()},
        "total": total(step.intervals),
        "seconds": step.seconds,
    }
