"""``mindspeed plan``: the best layouts of a job as tables, JSON, pictures and flags.

With ``--measure`` candidates are then started here for a few steps each.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mindspeed.cli import plan_run
from mindspeed.cli.plan_output import Unit, bytes_unit, new_table, print_whole
from mindspeed.cli.plan_run import (
    command,
    interruptible,
    is_script,
    job_of,
    launch_words,
    program,
    progress,
)
from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text, make_dirs
from mindspeed.processes import cores, imports_of_command

if TYPE_CHECKING:
    from rich.table import Table

    from mindspeed.planner.job import Job
    from mindspeed.planner.layout import Layout
    from mindspeed.planner.measure import MeasuredCandidate, Measurements
    from mindspeed.planner.search.result import Candidate, Closest, SearchResult


MANY = 1000
"""Candidates that are measured at most."""
NOTHING_FITS = 3
"""Exit status."""


def run_search(own: argparse.Namespace, flags: Sequence[str]) -> int:
    """Search, once for each number of devices, and print what was found.

    Args:
        own: flags of the command.
        flags: of the job.
    """
    _check_search(own)
    if own.out is not None:
        make_dirs(own.out)
    plans: list[SearchResult] = []
    with interruptible() as stop:
        for devices in own.devices or (None,):
            plans.append(search(own, flags, devices))
            if plans[-1].interrupted:
                break
    measured = None
    launches = [launch_words(own.launch, own.cluster, plan.devices) for plan in plans]
    if not own.json:
        for plan, launch in zip(plans, launches, strict=True):
            print_plan(plan, flags, launch)
    _write_files(own, flags, plans, launches)
    interrupted = plans[-1].interrupted
    if own.measure and plans[0].candidates and not interrupted:
        with interruptible() as stop:
            measured = measure_plan(own, flags, plans[0])
        interrupted = measured.interrupted
    if own.json:
        print(json.dumps(_data(plans, measured, len(own.devices or ()) > 1), indent=2))
    if interrupted:
        return stop.status
    return 0 if all(plan.candidates for plan in plans) else NOTHING_FITS


def _check_search(own: argparse.Namespace) -> None:
    if own.cluster is None:
        raise ConfigError(
            "--cluster is missing: a preset (generic, a100, h100, ...) or FILE.json; "
            "--check needs none"
        )
    if not own.measure:
        return
    if len(own.devices or ()) > 1:
        raise ConfigError("--measure starts what is planned for one number of --devices")
    if own.devices:
        plan_run.install_adaptor()

        check_devices(own.devices[0])
    from mindspeed.planner.cluster import one_kind

    one_kind(own.cluster, "--measure")


def _write_files(
    own: argparse.Namespace,
    flags: Sequence[str],
    plans: Sequence[SearchResult],
    launches: Sequence[str | None],
) -> None:
    """Write the files that were asked for."""
    if own.out is not None:
        write_plans(plans, own.out, flags, launches)
    if own.html is not None:
        job = job_of(flags)
        pages = [
            (f"{one.devices} devices", one, partial(_line, job, flags, launch))
            for one, launch in zip(plans, launches, strict=True)
        ]
        write_page(pages, own.html)
    if own.plot is not None:
        from mindspeed.cli.plan_output import draw_plans

        draw_plans(plans, own.plot)


def _data(plans: Sequence[SearchResult], measured: Measurements | None, several: bool) -> Any:
    """A plan, or a list of them if several numbers of devices were asked for."""
    found = [plan.to_json() for plan in plans]
    if measured is not None:
        found[0]["measured"] = measured.to_json()
    return found if several else found[0]


def search(
    own: argparse.Namespace, flags: Sequence[str], devices: int | None, title: str = ""
) -> SearchResult:
    """Search once, with a progress bar.

    Args:
        own: flags of the command.
        flags: of the job.
        devices: number of ranks; None: that of the job.
        title: begins the bar.
    """
    with imports_of_command():
        plan_run.install_adaptor()
        from mindspeed.planner.search.plan import plan

    with progress(f"{title}measuring signatures") as tell:
        return plan(
            flags,
            own.cluster,
            devices=devices,
            top=own.top or (MANY if own.measure == "black" else 5),
            fix=own.fix or {},
            search=own.search,
            memory_limit=own.memory_limit,
            jobs=own.jobs or cores(),
            cache=own.cache,
            progress=tell,
            loads=own.expert_imbalance,
        )


def print_plan(plan: SearchResult, flags: Sequence[str] = (), launch: str | None = None) -> None:
    """Print the candidates, what removed the others, and the flags to copy.

    Args:
        flags: of the job as the user gave them.
        launch: words of torchrun for the command.
    """
    console = Console(soft_wrap=True)

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    unit = bytes_unit([plan.memory_limit])
    line(
        f"{plan.devices} devices of {plan.cluster}, {unit(plan.memory_limit)} {unit.name} for "
        "tensors; "
        f"{plan.wall_seconds:,.0f} s, {plan.measured} signatures measured"
    )
    if plan.candidates:
        _print_candidates(plan, line)
    elif plan.closest is not None:
        line(f"nothing fits; closest: {plan.closest.layout}")
        unit = bytes_unit([plan.closest.prediction.peak_bytes])
        line(
            f"it needs {unit(plan.closest.prediction.peak_bytes)} {unit.name}, "
            f"{unit(plan.closest.deficit)} {unit.name} too much"
        )
        print_whole(_help(plan.closest, unit))
    elif not plan.interrupted:
        memory = any(reason.startswith("need more") for reason in plan.removed)
        line(
            "nothing fits, and nothing could be counted that comes near"
            if memory
            else f"no combination can be planned on {plan.devices} devices, because:"
        )
    for text in (*plan.counts(), *plan.notes):
        line(text)
    if plan.candidates:
        line(f"\n{command(flags, plan.best.flags, launch)}")


def _print_candidates(plan: SearchResult, line: Callable[[str], None]) -> None:
    unit = bytes_unit([max(one.peak_bytes for one in plan.candidates)])
    print_whole(_candidates(plan, unit))
    if plan.ties > 1:
        line(
            f"=: {plan.ties} are within {100 * plan.tolerance:g} % of the fastest, a tie for "
            "this model; less memory comes first"
        )
    if plan.interval is not None:
        line(plan.interval.sentence)
    if plan.assumed:
        line(f"assumed: {plan.assumed}")
    print_whole(_front(plan, unit))
    if any(one.estimated for one in (*plan.candidates, *plan.front)):
        line("~ estimated within 3 %; the best layout and those near the limit are counted")


def _candidates(plan: SearchResult, unit: Unit) -> Table:
    table = new_table(
        f"modelled seconds of a step, {unit.name} at the peak of the fullest rank",
        ["", "layout"],
        ["seconds", "likely", "tokens/s/device", "MFU", "bubble", unit.name],
    )
    table.add_column("limited by")
    for number, one in enumerate(plan.candidates, start=1):
        found = one.prediction
        table.add_row(
            f"{number}{' =' if number <= plan.ties > 1 else ''}",
            str(one.layout),
            _seconds(found.seconds),
            ""
            if plan.interval is None
            else plan.interval.text(found.seconds, found.uneven_seconds),
            _optional(found, "tokens_per_second_per_device", "{:,.0f}"),
            _optional(found, "mfu", "{:.1%}"),
            _optional(found, "bubble", "{:.1%}"),
            "~" * one.estimated + unit(one.peak_bytes),
            _optional(found, "limit", "{}"),
        )
    return table


def _front(plan: SearchResult, unit: Unit) -> Table:
    table = new_table(
        "front of time and memory: nothing is both faster and smaller",
        ["layout"],
        ["seconds", unit.name],
    )
    for one in plan.pareto():
        size = "~" * one.estimated + unit(one.peak_bytes)
        table.add_row(str(one.layout), _seconds(one.prediction.seconds), size)
    return table


def _help(closest: Closest, unit: Unit) -> Table:
    table = new_table("with a further change", ["change"], [unit.name, "fits"])
    for one in closest.help:
        table.add_row(one.what, unit(one.peak_bytes), "yes" if one.fits else "no")
    return table


def _seconds(value: float) -> str:
    return f"{value:,.3f}" if value >= 1 else f"{value:.4f}"


def _optional(found: Any, name: str, form: str) -> str:
    value = getattr(found, name, None)
    return "" if value is None else form.format(value)


def write_plans(
    plans: Sequence[SearchResult], out: Path, flags: Sequence[str], launches: Sequence[str | None]
) -> None:
    """Write the result, and the flags and recipe of every candidate, each file in one step.

    Args:
        plans: of one or more numbers of devices.
        out: directory; is created.
        flags: of the job as the user gave them.
        launches: for each plan the words of torchrun for its commands.
    """
    make_dirs(out)
    for plan, launch in zip(plans, launches, strict=True):
        where = out / f"{plan.devices}-devices" if len(plans) > 1 else out
        make_dirs(where)
        atomic_write_text(where / "plan.json", json.dumps(plan.to_json(), indent=2) + "\n")
        for number, one in enumerate(plan.candidates, start=1):
            text = f"{command(flags, one.flags, launch)}\n"
            atomic_write_text(where / f"candidate-{number}.sh", text)
            if not is_script(flags):
                atomic_write_text(where / f"candidate-{number}.yaml", _recipe(one, flags))
    print(f"wrote {out}", file=sys.stderr)


def _line(job: Job, flags: Sequence[str], launch: str | None, layout: Layout) -> str:
    """The command line that trains in a layout."""
    return command(flags, job.flags(layout.overrides()), launch)


def write_page(
    plans: Sequence[tuple[str, SearchResult, Callable[[Layout], str]]], path: Path
) -> None:
    """Write plans as a page: of each its title, its result and the command line of a layout."""
    from mindspeed.planner.search.page import html_of

    atomic_write_text(path, html_of(plans))
    print(f"wrote {path}", file=sys.stderr)


def _recipe(one: Candidate, flags: Sequence[str]) -> str:
    """The YAML for ``--config``."""
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.recipe import dump, parse_with_recipe

    parser = build_parser(with_help=False)
    head = f"# {one.layout}\n# {shlex.join(flags)}\n"
    return head + dump(parse_with_recipe(one.flags, parser), parser)


_DATA = ("data_path", "train_data_path", "data_args_path", "mock_data")


def measure_plan(own: argparse.Namespace, flags: Sequence[str], plan: SearchResult) -> Measurements:
    """Measure candidates of a plan and, without ``--json``, print them and the fastest's command.

    Args:
        own: flags of the command.
        flags: of the job as the user gave them.
        plan: its candidates.

    Raises:
        ConfigError: this machine has fewer devices than are planned for.
        PlanError: none of the candidates ran.
    """
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.measure import OF_A_MEASUREMENT, Launcher, measure

    check_devices(plan.devices)
    job = job_of(flags)
    out = own.out or Path()
    launcher = Launcher(program(flags), plan.devices, out / "measured", {})
    overrides: dict[str, Any] = dict(OF_A_MEASUREMENT)
    if not any(map(job.gives, _DATA)):
        overrides["mock_data"] = True

    def run(number: int, candidate: Any) -> float:
        words = job.flags({**candidate.layout.overrides(), **overrides})
        return launcher.seconds(f"candidate-{number}", words)

    def tell(one: MeasuredCandidate) -> None:
        seconds = one.error if one.seconds is None else f"{one.seconds:.4g} s a step"
        print(f"candidate {one.number}: {seconds}", file=sys.stderr, flush=True)

    node = load_cluster(own.cluster).levels[0].size or plan.devices
    found = measure(
        plan.candidates, run, node_size=node, all_of_them=own.measure == "black", tell=tell
    )
    _write(found, out)
    if found.interrupted and all(run.seconds is None for run in found.runs):
        print("interrupted before a candidate ran", file=sys.stderr)
        return found
    best = found.best
    if not own.json:
        print(found.table())
        print(f"\nmeasured best: candidate {best.number}, {best.candidate.layout}")
        launch = launch_words(own.launch, own.cluster, plan.devices)
        print(f"\n{command(flags, best.candidate.flags, launch)}")
    return found


def _write(found: Measurements, out: Path) -> None:
    make_dirs(out)
    text = json.dumps(found.to_json(), indent=2) + "\n"
    atomic_write_text(out / "measured.json", text)


def check_devices(wanted: int) -> None:
    """Refuse to measure on more devices than this machine has.

    Raises:
        ConfigError: it has fewer.
    """
    from mindspeed import device
    from mindspeed.training.resolve_parallel import check_fits_here

    here = device.current()
    if here.on_host:
        check_fits_here(wanted)
    elif here.count() < wanted:
        raise ConfigError(
            f"--measure starts {wanted} ranks and this machine has {here.count()} devices: plan "
            f"with --devices {here.count()}, or without --measure"
        )
