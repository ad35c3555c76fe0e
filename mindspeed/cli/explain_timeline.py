"""``mindspeed explain --timeline``: one step of a rank on the modelled clock, by layer and phase.

Printed as a table of what one layer sends, computes and waits for; written as a picture and for
chrome://tracing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mindspeed.cli.plan_check import layout_of
from mindspeed.cli.plan_run import progress
from mindspeed.cli.plot import COLORS, check_format, figure_class
from mindspeed.errors import ConfigError
from mindspeed.instruments.clock import TimedCall
from mindspeed.instruments.timeline import write_trace
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.count.layer_costs import (
    PHASES,
    Costs,
    by_scope,
    group_equal_layers,
    lanes,
    total,
)
from mindspeed.planner.count.timed_step import TimedStep

ASSUMPTIONS = (
    "each process group has a link of its own, without contention",
    "other ranks are never late: no pipeline bubble",
)
SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A"}


def check(own: argparse.Namespace) -> None:
    """Refuse flags that do not belong together, and files that cannot be written.

    Args:
        own: flags of ``mindspeed explain``.

    Raises:
        ConfigError: names the flag.
    """
    for name in ("json", "memory_limit", "cache"):
        if getattr(own, name):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} has no effect with --timeline: remove it")
    if own.plot is not None:
        check_format("--plot", own.plot)
        figure_class()
    if own.trace is not None and own.trace.suffix != ".json":
        raise ConfigError(f"--trace {own.trace}: the file must end in .json")


def run_timeline(own: argparse.Namespace, args: argparse.Namespace, cluster: Cluster) -> None:
    """Time one step of the first rank of a pipeline stage; print and write what happened.

    Args:
        own: flags of ``mindspeed explain``.
        args: final values of the job.
        cluster: rates of devices and links.

    Raises:
        MindSpeedError: the job cannot be timed; says what is in the way.
    """
    from mindspeed.planner import isolated
    from mindspeed.planner.count.parts import fewest_micro_batches
    from mindspeed.planner.count.timed_step import time_step
    from mindspeed.training.fake_job import rank_in_stage

    stages = args.pipeline_model_parallel_size
    if own.stage >= stages:
        raise ConfigError(f"--stage {own.stage}: there are stages 0 to {stages - 1}")
    count = own.micro_batches or fewest_micro_batches(args)
    rank = rank_in_stage(args, own.stage)
    with progress("running the step") as tell:
        tell(0, 1)
        step = isolated.call(lambda: time_step(args, cluster.at(rank), rank, micro_batches=count))
    print_figures(args, cluster, own.stage, step)
    _write(own, cluster, step)


def _write(own: argparse.Namespace, cluster: Cluster, step: TimedStep) -> None:
    title = f"modelled step: {rates(cluster)}"
    if own.plot is not None:
        draw_step(step.intervals, own.plot, title)
        print(f"wrote {own.plot}")
    if own.trace is not None:
        write_trace({f"stage {own.stage}": lanes(step.intervals)}, own.trace, title)
        print(f"wrote {own.trace}")


def draw_step(intervals: Sequence[TimedCall], output: Path, title: str) -> None:
    """Draw a step, and enlarged the forward and the backward of a layer in its middle.

    Args:
        intervals: what happened.
        output: file to write; its ending chooses the format.
        title: line above the picture.

    Raises:
        ConfigError: unknown format, or matplotlib is missing.
    """
    from mindspeed.cli.timeline_plot import Style, draw

    visible = [one for one in intervals if one.communication is None or _is_sent(one)]
    line = lanes(visible)
    lines = {"whole step": line}
    for name, window in _enlarged(visible):
        lines[name] = replace(line, window=window)
    colors = {"forward": COLORS[0], "recompute": COLORS[3], "backward": COLORS[2]}
    draw(lines, Style(colors, label=lambda one: one.phase), output, title)


def _is_sent(one: TimedCall) -> bool:
    return one.communication is not None and len(one.communication.ranks) > 1


def _enlarged(
    intervals: Sequence[TimedCall],
) -> Iterator[tuple[str, tuple[float, float]]]:
    """A layer in the middle: its first forward, and its backward after its recomputation."""
    layers = list(dict.fromkeys(one.scope for one in intervals if one.scope.layer is not None))
    layer = layers[len(layers) // 2] if layers else None
    for title, phases in (("forward", {"forward"}), ("backward", {"recompute", "backward"})):
        own = [one for one in intervals if one.scope == layer and one.phase in phases]
        own = [one for one in own if one.kind != "communication"]
        if own:
            yield f"{layer}, {title}", (own[0].start, max(one.end for one in own))


def rates(cluster: Cluster) -> str:
    """The rates of the model on one line."""
    device = cluster.device
    peaks = ", ".join(f"{tflops:g} {dtype}" for dtype, tflops in device.peak_tflops.items())
    links = (
        f"{level.name}{'' if level.size is None else f' of {level.size}'} {level.gbs:g} GB/s and "
        f"{level.latency_us:g} us"
        for level in cluster.levels
    )
    return (
        f"{cluster.name}: {peaks} TFLOP/s, memory {device.memory_gbs:g} GB/s, launch "
        f"{device.launch_us:g} us; {'; '.join(links)}"
    )


def print_figures(args: argparse.Namespace, cluster: Cluster, stage: int, step: TimedStep) -> None:
    """Print everything about a step.

    Args:
        args: final values.
        cluster: rates of the model.
        stage: the pipeline stage.
        step: what happened on its first rank.
    """
    console = Console()
    every = total(step.intervals)
    console.print(
        f"[bold]modelled[/bold], not measured: one step of {_count(step.micro_batches)} on a rank "
        f"of stage {stage}; {layout_of(args)}\n{rates(cluster)}\nassumptions: "
        f"{'; '.join(ASSUMPTIONS)}",
        highlight=False,
    )
    table = _table(step, every)
    # A table that is wider than the screen would lose digits at the end of its columns.
    width = console.measure(table, options=console.options.update(max_width=1_000)).maximum
    Console(width=max(width, console.width)).print(table)
    share = every.exposed / step.seconds if step.seconds else 0.0
    console.print(
        f"modelled step: {step.seconds * 1e3:,.3f} ms, of which communication is exposed for "
        f"{every.exposed * 1e3:,.3f} ms ({share:.1%})",
        highlight=False,
    )


def _table(step: TimedStep, every: Costs) -> Table:
    operations = sorted(every.sent)
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title="one layer: MiB that a rank sends by collective (AG all-gather, RS reduce-scatter,\n"
        "AR all-reduce, A2A all-to-all), calls, GFLOP, modelled milliseconds",
        title_style="",
    )
    table.add_column("layer", min_width=10)
    table.add_column("phase", no_wrap=True)
    for name in (*(SHORT.get(op, op) for op in operations), "calls", "GFLOP"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("compute", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    for names, phases in group_equal_layers(by_scope(step.intervals)):
        for phase in PHASES:
            if phase in phases:
                table.add_row(names, phase, *_figures(phases[phase], operations))
                names = ""
    table.add_section()
    table.add_row("whole step", "", *_figures(every, operations), style="bold")
    return table


def _figures(costs: Costs, operations: list[str]) -> list[str]:
    sent = [_short(costs.sent[op] / 2**20) if costs.calls[op] else "" for op in operations]
    rest = (costs.flops / 1e9, costs.computing * 1e3, costs.exposed * 1e3)
    return [*sent, f"{sum(costs.calls.values()):,}", *map(_short, rest)]


def _short(value: float) -> str:
    """Text with at least four digits, no more than three after the point."""
    return f"{value:,.{3 if value < 10 else 2 if value < 100 else 1 if value < 10_000 else 0}f}"


def _count(micro_batches: int) -> str:
    return "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
