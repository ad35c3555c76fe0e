"""Searches of small real spaces, in a process where Megatron is behind the adaptor."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mindspeed.planner.layout import Layout
from mindspeed.planner.search.space import JobSizes, Space

SETUP = "tests.support.warm"
CLUSTER = "h100"


def space_of(job: Any, devices: int, values: dict[str, Any]) -> tuple[Any, list[Layout]]:
    """Final values of a job, and the layouts of a space with these values."""
    from mindspeed.planner.search.plan import _own

    args, own = _own(job, devices)
    space = Space.of(JobSizes.of(args, devices)).only((), own).with_values(values)
    return args, list(space.layouts(JobSizes.of(args, devices), Counter()))


def every_price(argv: list[str], devices: int, values: dict[str, Any], cache: str) -> list[Any]:
    """Of each layout: itself, bounds by formula and by its layers, its price, two comparisons.

    Whether its shape is that of the job, and the error of bytes where they are estimated.
    """
    from mindspeed.errors import MindSpeedError
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.count.cache import RunCache
    from mindspeed.planner.job import Job
    from mindspeed.planner.search.evaluator import JobEvaluator, reshaped
    from mindspeed.planner.shape import shape_of

    job, cluster = Job(argv), load_cluster(CLUSTER)
    args, layouts = space_of(job, devices, values)
    evaluator = JobEvaluator(job, args, cluster, RunCache(cache, job, cluster))
    found: list[Any] = []
    formulas = [evaluator.bound(layout) for layout in layouts]
    for layout, formula in zip(layouts, formulas, strict=True):
        try:
            settings = job.settings(layout.overrides(), layout.devices)
        except MindSpeedError as error:
            found.append((layout, str(error)))
            continue
        shape = shape_of(settings.args)
        while evaluator.refine(layout):
            pass
        evaluator.measure(layout)
        priced = evaluator.price(layout)
        again = reshaped(evaluator._shapes[evaluator.key(layout)], layout)
        bounds = formula, evaluator.bound(layout)
        exact = evaluator.is_exact(layout)
        error = priced.peak_bytes / evaluator.exact(layout).peak_bytes - 1
        assert not (exact and error), layout
        price = priced.seconds, priced.peak_bytes
        found.append((layout, bounds, price, (shape == again, None if exact else error)))
    return found


def searched(
    argv: list[str], devices: int, values: dict[str, Any], cache: str, limit: float, top: int
) -> Any:
    """The best by the search, how many keys it measured, and how many runs it made."""
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.count.cache import RunCache
    from mindspeed.planner.job import Job
    from mindspeed.planner.search.bounded_search import search
    from mindspeed.planner.search.evaluator import JobEvaluator

    job, cluster = Job(argv), load_cluster(CLUSTER)
    args, layouts = space_of(job, devices, values)
    runs = RunCache(cache, job, cluster)
    outcome = search(layouts, JobEvaluator(job, args, cluster, runs), limit, top=top)
    return [layout for layout, _ in outcome.best], outcome.measured, runs.misses


def interrupted(argv: list[str], devices: int, values: dict[str, Any]) -> Any:
    """A plan that a SIGTERM reaches in its second key, whose run would not end; its child."""
    import os
    import signal
    import time

    from mindspeed.planner import isolated
    from mindspeed.planner.search import evaluator
    from mindspeed.planner.search.plan import plan

    before, (reader, writer) = evaluator.JobEvaluator.measure, os.pipe()

    def stuck() -> None:
        os.write(writer, os.getpid().to_bytes(8, "little"))
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)

    def measure(*args: Any, **kwargs: Any) -> Any:
        if done:
            isolated.call(stuck)
        done.append(1)
        return before(*args, **kwargs)

    done: list[int] = []
    evaluator.JobEvaluator.measure = measure  # type: ignore[method-assign]
    try:
        found = plan(argv, CLUSTER, devices=devices, search=(), fix=values)
    finally:
        evaluator.JobEvaluator.measure = before  # type: ignore[method-assign]
    child = int.from_bytes(os.read(reader, 8), "little")
    return (
        found.interrupted,
        [one.layout for one in found.candidates],
        os.path.exists(f"/proc/{child}"),
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    )


def refused(argv: list[str], devices: int, values: dict[str, Any]) -> list[tuple[Layout, str]]:
    """Layouts of a space with what a start says about them, nothing if it accepts them."""
    from mindspeed.errors import MindSpeedError
    from mindspeed.planner.job import Job

    job = Job(argv)
    _, layouts = space_of(job, devices, values)
    found = []
    for layout in layouts:
        try:
            job.settings(layout.overrides(), layout.devices)
        except MindSpeedError as error:
            found.append((layout, str(error)))
        else:
            found.append((layout, ""))
    return found


def accepted_outside(
    argv: list[str], devices: int, values: dict[str, Any]
) -> tuple[int, list[tuple[str, Layout]]]:
    """Layouts that a space removes for a reason, and those of them that a start accepts."""
    import itertools

    from mindspeed.errors import MindSpeedError
    from mindspeed.planner.job import Job
    from mindspeed.planner.search import space as spaces

    job = Job(argv)
    args, _ = space_of(job, devices, {})
    sizes = JobSizes.of(args, devices)
    defaults = {name: value[0] for name, value in vars(Space()).items()}
    accepted, tried = [], 0
    for chosen in itertools.product(*values.values()):
        point = {**defaults, **dict(zip(values, chosen, strict=True))}
        reasons = (spaces.reason_against(name, sizes, point) for name in defaults)
        reason = next((one for one in reasons if one), None)
        if reason is None:
            continue
        tried += 1
        try:
            layout = spaces._layout(sizes, point)
            job.settings(layout.overrides(), layout.devices)
        except (MindSpeedError, ZeroDivisionError):
            continue
        accepted.append((reason, layout))
    return tried, accepted


def best_of(argv: list[str], devices: int, options: dict[str, Any]) -> Any:
    """The best layout of a plan, its composed and its counted bytes, and what was searched."""
    from mindspeed.planner.count.check import check
    from mindspeed.planner.scripts import job_of
    from mindspeed.planner.search.plan import plan

    found = plan(argv, CLUSTER, devices=devices, top=1, **options)
    layout, composed = found.best.layout, found.best.peak_bytes
    counted = check(job_of(argv).settings(layout.overrides(), devices).args).fullest.peak
    return layout, composed, counted, found.searched
