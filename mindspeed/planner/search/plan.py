"""Plan a job: find its best layouts on a cluster within the memory of a device.

found = plan(["--model", "llama3-70b", "--bf16", "--global-batch-size", "1024"], "h100",
             devices=1024)
found.best.layout, found.best.prediction.seconds, found.best.flags
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError, MindSpeedError
from mindspeed.features.registry import options, schedule_flags
from mindspeed.job import Precision
from mindspeed.memory.selective import modules_of
from mindspeed.planner.cluster import GIB, Cluster, load_cluster
from mindspeed.planner.cluster.mixed import MixedCluster
from mindspeed.planner.expert_loads import BALANCED, ExpertLoads, assumed
from mindspeed.planner.interval import interval_of, job_kind
from mindspeed.planner.job import Job
from mindspeed.planner.layout import Layout, Recompute, layout_of
from mindspeed.planner.search.bounded_search import Found, Outcome, Progress
from mindspeed.planner.search.bounded_search import search as bounded_search
from mindspeed.planner.search.expert_programs import ExpertPrograms
from mindspeed.planner.search.kinds import by_kind, on_kinds
from mindspeed.planner.search.result import (
    ESTIMATED,
    Candidate,
    Closest,
    Help,
    SearchResult,
    front_of,
)
from mindspeed.planner.search.selective import subsets
from mindspeed.planner.search.space import SEARCHED, JobSizes, Space

if TYPE_CHECKING:
    from mindspeed.planner.search.evaluator import JobEvaluator


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
    loads: ExpertLoads = BALANCED,
) -> SearchResult:
    """Find the best layouts of a job.

    Args:
        argv: flags of ``mindspeed pretrain``, or a script and its flags; or the job.
        cluster: the machine, its preset or its file.
        devices: number of ranks; default: that of the flags.
        top: number of layouts to find.
        fix: values of dimensions (fields of :class:`~mindspeed.planner.search.space.Space`); a list
            gives several.
        search: names of the dimensions to search; default
            :data:`~mindspeed.planner.search.space.SEARCHED`.
        memory_limit: bytes that the tensors of a rank may take; default: the cluster's.
        jobs: processes that count.
        cache: directory for counts, which the next search reuses.

    Raises:
        MindSpeedError: the job cannot start in any layout, or its flags are wrong.
    """
    from mindspeed.planner.count.cache import RunCache
    from mindspeed.planner.search.evaluator import JobEvaluator

    start = time.monotonic()
    argv = _job(argv).with_loads(loads)
    machine, devices = _machine(cluster, devices, memory_limit)
    limit = machine.memory_limit if memory_limit is None else memory_limit
    names = SEARCHED if search is None else tuple(search)
    _check_names([*names, *(fix or {})])
    args, own = _own(argv, devices)
    sizes = JobSizes.of(args, own.devices)
    space = Space.of(sizes, machine.levels[0].size or 8).only(names, own)
    given = (fix or {}).items()
    space = space.with_values({n: v if isinstance(v, list) else [v] for n, v in given})
    runs = RunCache(cache, argv, machine)
    evaluator = JobEvaluator(argv, args, machine, runs, jobs)
    removed: Counter[str] = Counter()
    with _interruptible():
        free = {*names} - {*(fix or {})}
        if "recompute" in free:
            space = _with_modules(space, sizes, evaluator, modules_of(vars(args)))
        layouts, total = list(space.layouts(sizes, removed)), space.total
        if "expert_program" in free:
            layouts = _with_programs(layouts, ExpertPrograms(args, machine), removed)
        if isinstance(machine, MixedCluster):
            dtype, head = Precision.of(args).products, evaluator.head_layers
            layouts = list(on_kinds(layouts, machine, sizes.num_layers, dtype, head, removed))
            total = removed.total() + len(layouts)
        outcome = bounded_search(
            layouts, evaluator, limit, top=top, error=ESTIMATED, progress=progress
        )
        closest = None
        try:
            if not outcome.interrupted:
                _make_best_exact(outcome, evaluator, limit)
                closest = None if outcome.best else closest_of(layouts, evaluator, limit)
        except KeyboardInterrupt:
            outcome.interrupted = True
    notes: list[str] = []
    if isinstance(machine, MixedCluster) and outcome.best:
        notes = by_kind(machine, *outcome.best[0], sizes.num_layers)
    return SearchResult(
        cluster=machine.name,
        devices=own.devices,
        memory_limit=int(limit),
        total=total,
        searched=space.several,
        removed=removed + outcome.removed,
        fitting=len(outcome.priced),
        measured=outcome.measured,
        candidates=tuple(_candidate(argv, evaluator, one) for one in outcome.best),
        front=tuple(_candidate(argv, evaluator, one) for one in front_of(outcome.priced)),
        closest=closest,
        interrupted=outcome.interrupted,
        wall_seconds=time.monotonic() - start,
        notes=tuple(notes),
        interval=interval_of(job_kind(args), machine.name),
        assumed=assumed(args),
        priced=tuple(sorted(outcome.priced, key=lambda one: one[1].seconds)),
    )


def _job(argv: Sequence[str] | Job) -> Job:
    if isinstance(argv, Job):
        return argv
    from mindspeed.planner.scripts import job_of

    return job_of(argv)


def _machine(
    cluster: Cluster | str | Path, devices: int | None, memory_limit: float | None
) -> tuple[Cluster, int | None]:
    """The cluster, within the limit where kinds have their own; the devices, if it fixes them."""
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if not isinstance(machine, MixedCluster):
        return machine, devices
    if devices not in (None, machine.devices):
        raise ConfigError(f"--devices {devices}: {machine.name} has {machine.devices} devices")
    limited = machine if memory_limit is None else machine.limited(memory_limit)
    return limited, machine.devices


def _with_programs(
    layouts: Iterable[Layout], programs: ExpertPrograms, removed: Counter[str]
) -> list[Layout]:
    """The layouts whose expert program may be the best."""
    reasons = [(layout, programs.reason_against(layout)) for layout in layouts]
    removed.update(reason for _, reason in reasons if reason is not None)
    return [layout for layout, reason in reasons if reason is None]


def _with_modules(
    space: Space, sizes: JobSizes, evaluator: JobEvaluator, modules: Sequence[str]
) -> Space:
    """Add sets of modules that are computed again, measured in the layout that may be fastest."""
    plain = space.with_values({"recompute": [Recompute()]}).layouts(sizes, Counter())
    ordered = sorted(plain, key=lambda one: (evaluator.bound(one).seconds, str(one)))
    layout = next((one for one in ordered[:TRIED] if _accepted(evaluator, one)), None)
    found = None if layout is None else evaluator.savings(layout, modules)
    sets = () if found is None else map(Recompute, subsets(*found))
    return space.with_values({"recompute": [*space.recompute, *sets]})


TRIED = 8
"""Layouts of which one has to start for modules to be measured."""


def _make_best_exact(outcome: Outcome, evaluator: JobEvaluator, limit: float) -> None:
    """Price the best layout without estimates; layouts that then do not fit are removed."""
    while outcome.best:
        layout, _ = outcome.best[0]
        try:
            found = evaluator.exact(layout)
        except MindSpeedError as error:
            outcome.drop(layout, f"cannot be counted: {str(error).strip().splitlines()[0]}")
            continue
        if found.peak_bytes <= limit:
            outcome.improve(layout, found)
            return
        outcome.drop(layout, f"need more than {limit / GIB:.4g} GiB")


def _check_names(names: Sequence[str]) -> None:
    known = [item.name for item in fields(Space)]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"{', '.join(wrong)}: no dimension; there are {', '.join(known)}")


def _own(job: Job, devices: int | None) -> tuple[Any, Layout]:
    """Final values of the job, and its own layout on the devices.

    If the flags name no layout that exists on the devices, the values are those of one rank.

    Raises:
        ConfigError: neither can start, or there is no global batch size.
    """
    for name, schedule in schedule_flags().items():
        if job.gives(name):
            raise ConfigError(
                f"--{name.replace('_', '-')}: a plan chooses the schedule; take the flag out, or "
                f"replace it by --pipeline-schedule {schedule}, which a search without the "
                "dimension schedule keeps"
            )
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
        own = replace(own, devices=devices)
    return args, own


def _candidate(job: Job, evaluator: JobEvaluator, found: Found) -> Candidate:
    layout, prediction = found
    flags = tuple(job.flags(layout.overrides()))
    return Candidate(layout, prediction, flags, not evaluator.is_exact(layout))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Handle SIGTERM, which ``timeout`` sends, as Ctrl-C, unless it has a handler already."""
    handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    if handled or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


MOST_KEYS = 6
"""Largest number of keys that are counted to find the closest layout, by ascending bounds."""


def closest_of(
    layouts: Iterable[Layout], evaluator: JobEvaluator, memory_limit: float
) -> Closest | None:
    """Find the layout that needs least memory, and what would close its deficit."""
    ordered = sorted(layouts, key=lambda one: (_least(evaluator, one), str(one)))
    known, tried = set[Hashable](), set[Hashable]()
    best: Found | None = None
    for layout in ordered:
        if best is not None and _least(evaluator, layout)[0] > best[1].peak_bytes:
            break
        key = evaluator.key(layout)
        if key not in known and (len(tried) == MOST_KEYS or key in tried):
            continue
        try:
            if key not in known:
                evaluator.check(layout)
                tried.add(key)
                evaluator.measure(layout)
                known.add(key)
            found = evaluator.exact(layout)
            if best is None or found.peak_bytes < best[1].peak_bytes:
                evaluator.check(layout)
                best = layout, found
        except MindSpeedError:
            continue
    if best is None:
        return None
    layout, prediction = best
    deficit = int(prediction.peak_bytes - memory_limit)
    found_help = sorted(_help(layout, evaluator, memory_limit), key=lambda h: not h.fits)
    return Closest(layout, prediction, deficit, tuple(found_help))


def _least(evaluator: JobEvaluator, layout: Layout) -> tuple[float, float, int]:
    """Sort key of layouts: static bytes, then what lowers activations."""
    again = layout.recompute.layers if layout.recompute is not None else 0
    share = 1000 if again < 0 else again
    return evaluator.bound(layout).nbytes, -share, layout.mbs


def _accepted(evaluator: JobEvaluator, layout: Layout) -> bool:
    try:
        evaluator.check(layout)
    except MindSpeedError:
        return False
    return True


def _help(layout: Layout, evaluator: JobEvaluator, memory_limit: float) -> Iterator[Help]:
    """Price each single change with which the job can start, then twice the devices."""
    for what, changed in _changes(layout):
        try:
            evaluator.check(changed)
            evaluator.measure(changed)
            peak = int(evaluator.exact(changed).peak_bytes)
        except MindSpeedError:
            continue
        yield Help(what, changed, peak, peak <= memory_limit)


def _changes(layout: Layout) -> Iterator[tuple[str, Layout]]:
    if layout.recompute is None or layout.recompute.layers >= 0:
        yield "--recompute-granularity full", replace(layout, recompute=Recompute(layers=-1))
    has = layout.memory or ()
    for name in options("memory"):
        if name not in has:
            yield name, replace(layout, memory=tuple(sorted({*has, name})))
    if layout.global_batch_size % (2 * layout.mbs * layout.dp) == 0:
        yield f"{2 * layout.devices} devices", replace(layout, devices=2 * layout.devices)
