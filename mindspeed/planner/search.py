"""Plan a job: the best layouts of its space on a cluster, within the memory of a device.

found = plan(["--model", "llama3-70b", "--bf16", "--global-batch-size", "1024"], "h100",
             devices=1024)
found.best.layout, found.best.prediction.seconds, found.best.flags
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError, MindSpeedError
from mindspeed.planner import isolated
from mindspeed.planner.bounded_search import Found, Outcome, Progress, search
from mindspeed.planner.closest import closest_of
from mindspeed.planner.cluster import Cluster, load_cluster
from mindspeed.planner.job import Job
from mindspeed.planner.layout import Layout, layout_of
from mindspeed.planner.result import TOLERANCE, Candidate, Closest, Plan, front_of
from mindspeed.planner.space import Shape, Space

__all__ = ["DIMENSIONS", "plan", "search"]

DIMENSIONS = ("tp", "cp", "cp_algorithm", "ep", "etp", "pp", "mbs", "vpp", "split", "recompute")
"""What is searched by default; the schedule, the optimizer, the expert program and memory features
are as the job has them, unless ``search`` names them."""


def plan(
    argv: Sequence[str] | Job,
    cluster: Cluster | str | Path,
    *,
    devices: int | None = None,
    top: int = 5,
    fix: Mapping[str, Any] | None = None,
    search: Sequence[str] | None = None,
    memory_limit: float | None = None,
    jobs: int = 1,
    cache: str | Path | None = None,
    progress: Progress = lambda done, of: None,
    prove: int = 1,
) -> Plan:
    """Find the best layouts of a job.

    Args:
        argv: flags of ``mindspeed pretrain``, or a script and its flags; or the job.
        cluster: to run on, by its name or file.
        devices: ranks; default: those of the flags.
        top: how many layouts are wanted.
        fix: values of dimensions (fields of :class:`~mindspeed.planner.space.Space`); a list gives
            several.
        search: names of the dimensions that are searched; default :data:`DIMENSIONS`.
        memory_limit: bytes that the tensors of a rank may take; default: the cluster's.
        jobs: processes that count.
        cache: directory for counts, so that the next search goes on from them.
        progress: is told how far it is.
        prove: how many of the best are counted again, in whole steps of the first and the last
            pipeline stage.

    Raises:
        MindSpeedError: the job cannot start in any layout, or its flags are wrong.
    """
    from mindspeed.planner.evaluator import JobEvaluator
    from mindspeed.planner.run_cache import RunCache

    start = time.monotonic()
    if not isinstance(argv, Job):
        from mindspeed.planner.scripts import job_of

        argv = job_of(argv)
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    limit = machine.memory_limit if memory_limit is None else memory_limit
    names = DIMENSIONS if search is None else tuple(search)
    _check_names([*names, *(fix or {})])
    args, own = _own(argv, devices, names)
    shape = Shape.of(args, own.devices)
    space = Space.of(shape, machine.levels[0].size or 8).only(names, own)
    space = space.with_values({name: _several(value) for name, value in (fix or {}).items()})
    evaluator = JobEvaluator(argv, args, machine, RunCache(cache, argv, machine), jobs)
    removed: Counter[str] = Counter()
    outcome = _search(list(space.layouts(shape, removed)), evaluator, limit, top, progress)
    closest = None
    if not outcome.best and not outcome.interrupted:
        closest = _closest(space.layouts(shape, Counter()), evaluator, limit)
    best = [_candidate(argv, one, index < prove) for index, one in enumerate(outcome.best)]
    return Plan(
        cluster=machine.name,
        devices=own.devices,
        memory_limit=int(limit),
        total=space.total,
        removed=removed + outcome.removed,
        fitting=len(outcome.priced),
        measured=outcome.measured,
        candidates=tuple(best),
        front=tuple(_candidate(argv, one, False) for one in front_of(outcome.priced)),
        closest=closest,
        interrupted=outcome.interrupted,
        wall_seconds=time.monotonic() - start,
        tolerance=TOLERANCE,
    )


def _search(
    layouts: list[Layout], evaluator: Any, limit: float, top: int, progress: Progress
) -> Outcome:
    return search(layouts, evaluator, limit, top=top, progress=progress)


def _closest(layouts: Any, evaluator: Any, limit: float) -> Closest | None:
    try:
        return closest_of(layouts, evaluator, limit)
    except KeyboardInterrupt:
        return None


def _check_names(names: Sequence[str]) -> None:
    known = [item.name for item in fields(Space)]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"{', '.join(wrong)}: no dimension; there are {', '.join(known)}")


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _own(job: Job, devices: int | None, names: Sequence[str]) -> tuple[Any, Layout]:
    """Final values of the job, and its own layout on the devices.

    The flags may name no layout that exists on the devices: then the values are those of one rank.

    Raises:
        ConfigError: neither can start, or there is no global batch size.
    """
    try:
        settings = job.settings(None, devices)
    except MindSpeedError:
        one = Layout(1, 1).overrides()
        del one["global_batch_size"]
        settings = job.settings(one, 1)
    args = settings.args
    if settings.recipe and "global_batch_size:" not in settings.recipe:
        raise ConfigError(
            "--global-batch-size is missing: without it every layout would train on another batch"
        )
    own = layout_of(args)
    if devices is not None:
        from dataclasses import replace

        own = replace(own, devices=devices)
    return args, own


def _candidate(job: Job, found: Found, prove: bool) -> Candidate:
    layout, prediction = found
    counted = None
    if prove:
        try:
            counted = counted_peak(job, layout)
        except (MindSpeedError, KeyboardInterrupt):
            counted = None
    return Candidate(layout, prediction, tuple(job.flags(layout.overrides())), counted)


def counted_peak(job: Job, layout: Layout) -> int:
    """Bytes of the fuller of first and last pipeline rank, counted in a whole step of each.

    The step has as many micro-batches as are in flight at once, and two more.

    Raises:
        MindSpeedError: it cannot be counted.
    """
    stages = sorted({0, layout.pp - 1})
    return max(isolated.call(_peak, job, layout, stage) for stage in stages)


def _peak(job: Job, layout: Layout, stage: int) -> int:
    from mindspeed.planner.counted_step import count_step
    from mindspeed.training.fake_job import rank_in_stage

    args = job.settings(layout.overrides(), layout.devices).args
    in_flight = layout.pp * (2 if layout.vpp > 1 else 1)
    batches = min(layout.micro_batches, in_flight * layout.vpp)
    if layout.vpp > 1:
        batches = min(layout.micro_batches, 3 * layout.pp)
    return count_step(args, rank_in_stage(args, stage), micro_batches=batches).peak
