"""Compare pipeline schedules without running them: bubble, memory, communication, timeline.

    mindspeed pipeline plan --pp 8 --vpp 2 --microbatches 64
    mindspeed pipeline plan --pp 4 --vpp 2 --microbatches 8 --plot schedules.png
    mindspeed pipeline plan --pp 4 --microbatches 8 --schedule zb-h1 --text --dump zb-h1.csv
    mindspeed pipeline plan --pp 8 --microbatches 16 --front --plot front.png
    mindspeed pipeline trace DIR --plot step.png
    mindspeed pipeline search --profile automated_pipeline.profile.json --out plan.json

Every schedule is built, checked and simulated as training would do it. Times are relative: by
default a micro-batch takes a rank 1 forward, 1 for the gradients of inputs and 1 for those of
weights. Give measured ones in any unit. Memory is in A: the activations of one micro-batch over all
layers of a rank. No device is needed. ``--front`` shows what less memory costs.

``trace`` shows the step of a training with ``--pipeline-trace DIR`` under its plan: times of the
stages, the late one, and the costs by which the next run places its actions.

``search`` chooses layers, recomputation and schedule for the profile that a start with
``--automated-pipeline`` wrote. Later starts read its result (``--automated-pipeline-file``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mindspeed.cli.comparison import as_entries, chosen, print_comparison
from mindspeed.cli.pipeline_output import (
    draw_front,
    front_data,
    front_of,
    print_front,
    print_trace,
    trace_data,
)
from mindspeed.cli.plot import check_format
from mindspeed.cli.timeline_plot import Style, draw
from mindspeed.errors import ConfigError
from mindspeed.flags import given_in, record_given
from mindspeed.instruments.timeline import Interval, text, write_trace
from mindspeed.pipeline.automated.profile import MODULES, read_profile
from mindspeed.pipeline.automated.result import write_result
from mindspeed.pipeline.automated.search import search
from mindspeed.pipeline.automated.stages import Price
from mindspeed.pipeline.schedule.comparison import ENTRIES, PricedSchedule, ScheduleJob, compare
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.csv_file import write_plan
from mindspeed.pipeline.schedule.schedules import memory_limit
from mindspeed.pipeline.schedule.simulate import Simulation, simulate
from mindspeed.pipeline.schedule.trace import read_trace
from mindspeed.ranges import MAX_SIZE, Range, number, whole

HELP = "compare and draw pipeline schedules: bubble, memory, messages"

MAX_PIPELINE, MAX_CHUNKS, MAX_MICROBATCHES = 256, 64, 4096
_MOST_CHUNKS = 1 << 17  # forwards of a step; a simulation of more takes minutes
# Op -> (what the legend says, colour)
_OPS = {
    "F": ("forward", "#3b82f6"),
    "Fc": ("forward, input kept", "#67e8f9"),
    "R": ("recomputation", "#a855f7"),
    "B": ("backward", "#10b981"),
    "I": ("input gradients", "#14b8a6"),
    "W": ("weight gradients", "#f59e0b"),
    "G": ("gradient reduction", "#be123c"),
    "O": ("copy to the host", "#475569"),
    "L": ("copy back", "#94a3b8"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    record_given(parser)
    add = parser.add_argument
    add(
        "action",
        choices=["plan", "search", "trace"],
        help="plan: build, check, simulate and draw schedules; search: layers, recomputation and "
        "schedule for a measured profile; trace: an executed step under its plan",
    )
    add(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="of trace: what a training with --pipeline-trace DIR wrote",
    )
    _add_plan_arguments(parser)
    plan_only = {action.dest: action for action in parser._actions if action.option_strings}
    _add_search_arguments(parser)
    both = {action.dest: action for action in parser._actions if action.option_strings}
    search_only = {name: action for name, action in both.items() if name not in plan_only}
    shown = {name: plan_only.pop(name) for name in ("plot", "trace", "text", "json")}
    parser.set_defaults(of_action={"plan": plan_only, "search": search_only}, drawing=shown)


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The pipeline and its schedules, and how they are shown."""
    add = parser.add_argument
    add("--pp", type=whole(2, MAX_PIPELINE), metavar="P", help="pipeline ranks")
    add(
        "--vpp", type=whole(1, MAX_CHUNKS), default=1, metavar="V", help="model chunks of each rank"
    )
    add(
        "--microbatches",
        type=whole(1, MAX_MICROBATCHES),
        metavar="M",
        help="micro-batches of a step and data-parallel rank",
    )
    add(
        "--schedule",
        default="all",
        metavar="NAMES",
        help=f"all, or some of {', '.join(ENTRIES)} and files FILE.csv, separated by commas",
    )
    _add_cost_arguments(parser)
    add(
        "--pipeline-memory-limit",
        type=number(Range(0, 1e6, above=True)),
        metavar="FACTOR",
        help="most activations, relative to the fullest rank of Megatron's own schedule",
    )
    add(
        "--front",
        action="store_true",
        help="search the schedules on a V-shape that no other beats in both memory and time",
    )
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the timelines, or bubble over memory with --front: .png, .svg or .pdf",
    )
    add("--trace", type=Path, metavar="FILE", help="timelines for chrome://tracing, .json")
    add("--text", action="store_true", help="draw the timelines in the terminal")
    add("--dump", type=Path, metavar="FILE", help="write the schedule (one --schedule) as csv")
    add("--json", action="store_true", help="print JSON, with the figures of every rank")


def _add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """How long the actions of a rank take, and how stages and micro-batches differ."""
    add = parser.add_argument
    time = number(Range(0, 1e12))
    positive = number(Range(0, 1e12, above=True))
    for flag, default, what in (
        ("--forward", 1.0, "forward of a micro-batch through all layers of a rank"),
        ("--input-grad", 1.0, "gradients of its inputs"),
        ("--weight-grad", 1.0, "gradients of its weights"),
    ):
        add(flag, type=positive, default=default, metavar="T", help=what)
    add("--recompute", type=positive, metavar="T", help="recomputation (default: --forward)")
    for flag, what in (
        ("--latency", "time from the end of an action until its message is on the next rank"),
        ("--reduction", "data-parallel reduction of all gradients of a rank"),
        ("--exchange", "one of four all-to-alls of experts, over all layers of a rank"),
        ("--transfer", "copy to the host, or back, of what a micro-batch's weight gradients need"),
    ):
        add(flag, type=time, default=0.0, metavar="T", help=what)
    add(
        "--pairs",
        action="store_true",
        help="a forward and a backward at the same time, each hiding what the other exchanges",
    )
    add(
        "--rows-again",
        action="store_true",
        help="experts' rows come a second time in the backward (--moe-zero-memory level0)",
    )
    add(
        "--layers",
        type=whole(1, 1024),
        default=8,
        metavar="N",
        help="of a rank, for the length of pairs (default: %(default)s)",
    )
    add(
        "--stage-costs",
        metavar="C,C,...",
        help="cost of each of the P x V stages, in order; 1 is a stage of 1/V of a rank's layers",
    )
    add("--sizes", metavar="B,B,...", help="samples of each micro-batch, where they differ")


def run(args: argparse.Namespace) -> int:
    """Price the schedules and print, draw or write them, or search one."""
    _refuse_other_action(args)
    if args.action == "search":
        return _search(args)
    if args.action == "trace":
        return _trace(args)
    job, names = job_of(args), chosen("--schedule", args.schedule, ENTRIES, ".csv")
    _check_files(args, names)
    if args.front:
        _front(args, job, names)
        return 0
    found = compare(job, names)
    if args.json:
        print(json.dumps(as_data(job, found), indent=2))
    else:
        _print(job, found)
    simulations = {one.name: one.simulation for one in found if one.simulation is not None}
    if not simulations:
        raise ConfigError("no schedule exists for these sizes; the reasons are above")
    if args.text:
        width = Console().width
        for name, simulation in simulations.items():
            drawn = text(simulation.lanes, width, _name, idle=".", whole_names=True)
            print(f"\n{name}\n{drawn}")
    if args.plot:
        lines = {_caption(name, one): one.lanes for name, one in simulations.items()}
        draw(lines, style_of(simulations.values()), args.plot, _title(job))
    if args.trace:
        lines = {name: one.lanes for name, one in simulations.items()}
        write_trace(lines, args.trace, _title(job))
    if args.dump:
        write_plan(args.dump, simulations[names[0]].plan)
    return 0


def _front(args: argparse.Namespace, job: ScheduleJob, names: Sequence[str]) -> None:
    """Print the front, and draw it with the schedules that have a name."""
    points = front_of(job)
    if args.json:
        print(json.dumps({"ranks": job.ranks, "front": front_data(job, points)}, indent=2))
    else:
        print_front(_title(job), job, points)
    if args.plot:
        draw_front(_title(job), points, compare(job, names), args.plot)


def _check_files(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse outputs that cannot be written, before anything is computed."""
    if args.front and (lost := [f for f in ("text", "trace", "dump") if getattr(args, f)]):
        raise ConfigError(f"--{lost[0]} shows one schedule: --front has many; take one of them")
    if args.plot:
        check_format("--plot", args.plot)
    if args.trace and args.trace.suffix != ".json":
        raise ConfigError(f"--trace {args.trace}: the file must end in .json")
    if args.dump and len(names) > 1:
        raise ConfigError("--dump writes one schedule: name it with --schedule")


def _trace(args: argparse.Namespace) -> int:
    """Show an executed step under its plan."""
    if args.folder is None:
        raise ConfigError("mindspeed pipeline trace: the folder of --pipeline-trace is missing")
    if args.plot:
        check_format("--plot", args.plot)
    found = read_trace(args.folder)
    if args.json:
        print(json.dumps(trace_data(found), indent=2))
    else:
        print_trace(found)
    lines = found.timelines()
    title = f"step {found.step}, {found.plan.num_microbatches} micro-batches"
    if args.text:
        for name, line in lines.items():
            drawn = text(line, Console().width, _name, idle=".", whole_names=True)
            print(f"\n{name}\n{drawn}")
    if args.plot:
        planned = simulate(found.plan, found.costs())
        style = replace(style_of([planned]), scale=1e3, unit="ms")
        draw(lines, style, args.plot, title)
    if args.trace:
        write_trace(lines, args.trace, title)
    return 0


def _refuse_other_action(args: argparse.Namespace) -> None:
    if args.folder is not None and args.action != "trace":
        raise ConfigError(f"{args.folder}: a folder belongs to mindspeed pipeline trace")
    actions = dict(args.of_action)
    if args.action == "search":
        actions["plan"] = {**actions["plan"], **args.drawing}
    given = given_in(vars(args))
    for action, options in actions.items():
        for name, option in options.items():
            if action != args.action and name in given:
                raise ConfigError(
                    f"{option.option_strings[0]} belongs to mindspeed pipeline {action}; it has no "
                    f"effect on {args.action}"
                )


def job_of(args: argparse.Namespace) -> ScheduleJob:
    """The job that the options of ``mindspeed pipeline plan`` describe.

    Raises:
        ConfigError: Sizes are missing, or do not suit each other.
    """
    if args.pp is None:
        raise ConfigError("--pp is missing: pipeline ranks")
    sizes = _sizes(args.sizes)
    count = args.microbatches or len(sizes or ())
    if not count:
        raise ConfigError("--microbatches is missing (or --sizes, one number for each)")
    if sizes is not None and len(sizes) != count:
        raise ConfigError(f"--sizes has {len(sizes)} numbers, --microbatches is {count}")
    if args.pp * args.vpp * count > _MOST_CHUNKS:
        raise ConfigError(
            f"--pp {args.pp} x --vpp {args.vpp} x {count} micro-batches are more than "
            f"{_MOST_CHUNKS:,} forwards; the pattern repeats, so fewer micro-batches show it"
        )
    stages = _numbers("--stage-costs", args.stage_costs)
    if stages is not None and len(stages) != args.pp * args.vpp:
        raise ConfigError(
            f"--stage-costs has {len(stages)} numbers; --pp {args.pp} x --vpp {args.vpp} are "
            f"{args.pp * args.vpp} stages"
        )
    factor = args.pipeline_memory_limit
    return ScheduleJob(
        args.pp,
        args.vpp,
        count,
        Costs(
            args.forward,
            args.input_grad,
            args.weight_grad,
            args.recompute,
            args.latency,
            args.reduction,
            args.transfer,
            exchange=args.exchange,
            layers=args.layers,
            rows_again=args.rows_again,
        ),
        None if factor is None else memory_limit(factor, args.pp, args.vpp),
        sizes,
        stages,
        args.pairs,
    )


def _numbers(flag: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    read = number(Range(0, 1e12, above=True))
    try:
        return tuple(read(word.strip()) for word in text.split(","))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ConfigError(f"{flag} {text}: positive numbers with commas are expected") from error


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    read = whole(1, MAX_SIZE)
    try:
        return tuple(int(read(word.strip())) for word in text.split(","))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ConfigError(f"--sizes {text}: whole numbers with commas are expected") from error


def as_data(job: ScheduleJob, found: Sequence[PricedSchedule]) -> dict[str, object]:
    """Plain data for JSON: times in the unit of the costs, memory in A."""
    return {
        "ranks": job.ranks,
        "chunks": job.chunks,
        "microbatches": job.num_microbatches,
        "memory_limit": job.memory_limit,
        "schedules": as_entries(found, lambda one: _figures(one.simulation)),
    }


def _figures(simulation: Simulation) -> dict[str, object]:
    return {
        "chunks": simulation.plan.placement.chunks,
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "peak_memory": simulation.peak_memory,
        "peak_chunks": simulation.peak_chunks,
        "busy": simulation.busy,
        "exposed_reduction": simulation.exposed_reduction,
        "messages": sum(simulation.messages.values()),
        "split_backwards": simulation.counts["I"],
        "recomputed": simulation.counts["R"],
    }


def _title(job: ScheduleJob) -> str:
    chunks = "" if job.chunks == 1 else f", {job.chunks} model chunks each"
    return f"{job.ranks} pipeline ranks{chunks}, {job.num_microbatches} micro-batches"


def _name(one: Interval) -> str:
    """``F3``: op and micro-batch, in later model chunks with a prime for each chunk before."""
    chunk = one.detail("chunk")
    return f"{one.kind}{one.detail('micro-batch')}" + ("'" * chunk if chunk < 3 else f"'{chunk}")


def style_of(simulations: Iterable[Simulation]) -> Style:
    """Colours say what is computed, paler ones a later model chunk; numbers are micro-batches."""
    later = max(max(one.plan.placement.chunks for one in simulations) - 1, 1)
    return Style(
        dict(_OPS.values()),
        label=lambda one: _OPS[one.kind][0],
        shade=lambda one: 1.0 - 0.5 * one.detail("chunk") / later,
        number=lambda one: str(one.detail("micro-batch")),
        scale=1.0,
        unit="time, in the unit of the costs",
    )


def _caption(name: str, simulation: Simulation) -> str:
    text = (
        f"{name}:  step {simulation.makespan:.6g},  bubble {100 * simulation.bubble:.1f} %,  "
        f"memory {max(simulation.peak_memory):.4g} A"
    )
    exposed = simulation.exposed_reduction
    return text + (f",  exposed reduction {exposed:.4g}" if exposed else "")


def _step(simulation: Simulation) -> float:
    """Time of a step, with the reduction that is not hidden."""
    return round(simulation.makespan + simulation.exposed_reduction, 6)


COLUMNS = ("v", "step", "bubble", "memory", "exposed", "sent", "again", "split")


def cells(one: PricedSchedule) -> tuple[str, ...]:
    """The figures of a schedule that exists, as :data:`COLUMNS` are called."""
    simulation = one.simulation
    assert simulation is not None
    return (
        str(simulation.plan.placement.chunks),
        f"{simulation.makespan:.6g}",
        f"{100 * simulation.bubble:.1f} %",
        f"{max(simulation.peak_memory):.4g}",
        f"{simulation.exposed_reduction:.6g}",
        f"{sum(simulation.messages.values())}",
        f"{simulation.counts['R']}",
        f"{simulation.counts['I']}",
    )


def _print(job: ScheduleJob, found: Sequence[PricedSchedule]) -> None:
    caption = (
        "v: model chunks of a rank; bubble: part of the step in which the mean rank does "
        "nothing new; memory: of the fullest rank, in activations of one micro-batch; exposed: "
        "reduction after the last backward; sent: messages between ranks; again: forwards computed "
        "again; split: backwards with weight gradients apart; *: the shortest step, reduction "
        "included"
    )
    priced = [(one, one.simulation) for one in found if one.simulation is not None]
    shortest = min((_step(simulation) for _, simulation in priced), default=0.0)
    rows = (
        (one.name + (" *" if _step(simulation) == shortest else ""), *cells(one))
        for one, simulation in priced
    )
    console = print_comparison(_title(job), caption, "schedule", COLUMNS, rows)
    for one in found:
        if said := one.note if one.simulation is not None else one.reason:
            console.print(f"{one.name}: {said}", highlight=False, markup=False)


def _add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the action ``search``."""
    add = parser.add_argument_group("search").add_argument
    add("--profile", type=Path, metavar="FILE", help="what a start measured")
    add("--out", type=Path, metavar="FILE", help="result, for --automated-pipeline-file")
    add(
        "--mode", choices=["memory", "perf"], default="memory", help="what to save: memory, or time"
    )
    ratio = number(Range(0, 1, above=True))
    add("--save-memory-ratio", type=ratio, default=0.2, metavar="R", help="of the memory")
    add(
        "--recompute-type",
        choices=range(len(MODULES)),
        type=int,
        default=2,
        help="0 MLP, 1 attention, 2 layer",
    )
    add(
        "--memory",
        type=number(Range(0, 1e9, above=True)),
        metavar="GIB",
        help="of a rank, instead of a part of what the default needs",
    )


def _search(args: argparse.Namespace) -> int:
    """Search layers, recomputation and schedule for a measured profile; write the result."""
    for name in ("profile", "out"):
        if getattr(args, name) is None:
            raise ConfigError(f"mindspeed pipeline search: --{name} is missing")
    profile = read_profile(args.profile)
    found = search(
        profile,
        args.mode,
        ratio=args.save_memory_ratio,
        module=MODULES[args.recompute_type],
        memory_limit=None if args.memory is None else args.memory * 2**30,
    )
    result = write_result(args.out, found, profile.job)
    print(f"before  {_price_row(found.before)}\nafter   {_price_row(found.after)}")
    print(f"flags   {' '.join(result.flags())}\nwrote {args.out}")
    return 0


def _price_row(price: Price) -> str:
    return (
        f"{1e3 * price.makespan:12,.3f} ms {price.peak / 2**20:12,.1f} MiB on the fullest rank "
        f"{100 * price.bubble:6.1f} % bubble"
    )
