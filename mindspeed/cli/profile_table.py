"""What ``mindspeed profile --modelled`` prints: the model, a table by layer and phase, the sum."""

from __future__ import annotations

import argparse
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mindspeed.training.modelled_costs import PHASES, Costs, alike, by_layer, total
from mindspeed.training.modelled_step import ASSUMPTIONS, Cluster, ModelledStep

SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A"}


def rates(cluster: Cluster) -> str:
    """The rates of the model on one line."""
    link, network = cluster.link, cluster.network
    return (
        f"F = {cluster.flops_per_second / 1e12:g} TFLOP/s; in a node of {cluster.node_size} "
        f"beta = 1 / {link.bytes_per_second / 1e9:g} GB/s, alpha = {link.latency * 1e6:g} us; "
        f"between nodes beta = 1 / {network.bytes_per_second / 1e9:g} GB/s, "
        f"alpha = {network.latency * 1e6:g} us"
    )


def print_figures(
    args: argparse.Namespace, cluster: Cluster, stage: int, step: ModelledStep
) -> None:
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
        f"of stage {stage}; {_layout(args)}\n{rates(cluster)}\nassumptions: "
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


def _table(step: ModelledStep, every: Costs) -> Table:
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
    for names, _, phases in alike(by_layer(step.intervals)):
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
    """At least four digits, no more than three after the point."""
    return f"{value:,.{3 if value < 10 else 2 if value < 100 else 1 if value < 10_000 else 0}f}"


def _count(micro_batches: int) -> str:
    return "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"


def _layout(args: Any) -> str:
    return (
        f"{args.world_size} ranks = tensor {args.tensor_model_parallel_size} x pipeline "
        f"{args.pipeline_model_parallel_size} x context {args.context_parallel_size} x data "
        f"{args.data_parallel_size}"
    )
