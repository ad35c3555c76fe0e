"""Explain a training job on one page: where its bytes, FLOPs, messages and seconds are.

    mindspeed explain --cluster h100 -- --model llama3-8b --bf16 --nproc 8 --seq-length 8192

For every pipeline rank the bytes by kind, the FLOPs and what it sends; for its layers the same of
one micro-batch; where the time of a step goes; and the three changes that would help most, each
with the figures that are predicted for the changed job, which fits. Takes all flags of ``mindspeed
pretrain``, or a script of Megatron-LM and its flags. No device is needed.

    mindspeed explain --timeline --cluster h100 --plot step.png -- --model llama3-8b ...

shows one step of one rank instead, as a modelled clock sees it: by layer and phase what it sends,
computes and waits for, with communication in its real order.

The status is 0, also for a job that does not fit, or 130 after Ctrl-C and 143 after SIGTERM,
which print what was found until then.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mindspeed.cli.plan import add_job_arguments, job_parser, read, use_machine
from mindspeed.cli.plan_check import (
    layout_of,
    memory_limit,
    memory_table,
    modelled,
    traffic_table,
    verdict,
    verdicts_by_kind,
)
from mindspeed.cli.plan_output import bytes_unit, flops_unit, new_table, print_whole
from mindspeed.cli.plan_run import command, interruptible, job_of, launch_words, named_progress
from mindspeed.errors import ConfigError
from mindspeed.flags import given_in, record_given
from mindspeed.processes import cores
from mindspeed.ranges import MAX_COUNT, MAX_RANKS, whole

if TYPE_CHECKING:
    from mindspeed.planner.cluster import Cluster
    from mindspeed.planner.count.parts import PartFigures
    from mindspeed.planner.explain.effects import Effect
    from mindspeed.planner.explain.explain import Explanation
    from mindspeed.planner.job import Job
    from mindspeed.planner.layout import Layout
    from mindspeed.planner.time.prediction import Prediction


HELP = "explain a job: where bytes, FLOPs, messages and bubbles are, and what would help"
PASS_THROUGH = True


def run(argv: Sequence[str]) -> int:
    """Run the command; flags that are not its own are those of ``mindspeed pretrain``."""
    parser = job_parser("explain", __doc__)
    add_arguments(parser)
    own, flags = read(parser, argv)
    use_machine(own)
    own.devices = own.devices if own.on is None else own.on[1]
    if own.cluster is None:
        raise ConfigError(
            "--cluster is missing: times need a preset (generic, a100, h100, ...) or FILE.json"
        )
    if own.timeline:
        from mindspeed.cli import explain_timeline

        explain_timeline.check(own)
    else:
        _refuse_without_timeline(own)
    limit, origin = memory_limit(own)
    assert limit is not None
    job = job_of(flags).with_loads(own.expert_imbalance)
    args = job.settings(None, own.devices).args
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.explain.explain import explain
    from mindspeed.planner.layout import layout_of

    cluster = load_cluster(own.cluster)
    cluster.check_stages(args)
    if own.timeline:
        explain_timeline.run_timeline(own, args, cluster)
        return 0
    with interruptible() as stop, named_progress() as tell:
        found = explain(
            job, args, cluster, limit, jobs=own.jobs or cores(), cache=own.cache, progress=tell
        )
    launch = launch_words(None, own.cluster, args.world_size)
    commands = Commands(job, flags, layout_of(args), launch)
    if own.json:
        print(json.dumps(as_data(args, found, commands), indent=2))
    else:
        print_page(args, found, cluster, origin, commands)
    return stop.status if found.interrupted else 0


def _refuse_without_timeline(own: argparse.Namespace) -> None:
    for name in ("stage", "micro_batches", "plot", "trace"):
        if name in given_in(vars(own)):
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --timeline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    record_given(parser)
    add_job_arguments(parser)
    add = parser.add_argument
    add("--devices", type=whole(1, MAX_RANKS), metavar="N", help="ranks (default: --nproc)")
    add("--cache", type=Path, metavar="DIR", help="of counts, for later calls and searches")
    add("--timeline", action="store_true", help="show one step of a rank, layer by layer")
    add(
        "--stage",
        type=whole(0),
        default=0,
        metavar="N",
        help="of --timeline: pipeline stage whose first rank is shown, counted from 0",
    )
    add(
        "--micro-batches",
        type=whole(1, MAX_COUNT),
        metavar="N",
        help="of --timeline: micro-batches of the step (default: 1; with virtual stages one for "
        "each rank of the pipeline, in a V-shape two)",
    )
    add("--plot", type=Path, metavar="FILE", help="of --timeline: draw it, .png, .svg or .pdf")
    add("--trace", type=Path, metavar="FILE", help="of --timeline: for chrome://tracing, .json")


_SECONDS_OF = {"forward": "forward", "backward": "backward", "recompute": "again"}


@dataclass(frozen=True)
class Commands:
    """Command lines of changed jobs.

    Attributes:
        job: as the user has it.
        flags: its words.
        layout: its own.
        launch: words of torchrun.
    """

    job: Job
    flags: Sequence[str]
    layout: Layout
    launch: str | None

    def differences(self, one: Effect) -> dict[str, Any]:
        """Flags that change; those that the job does not have need not go away."""
        found = one.change.differences(self.layout)
        return {name: new for name, new in found.items() if new is not None or self.job.gives(name)}

    def after(self, one: Effect) -> str:
        """The command line with a change."""
        return command(self.flags, self.job.flags(self.differences(one)), self.launch)


def print_page(
    args: argparse.Namespace, found: Explanation, cluster: Cluster, origin: str, commands: Commands
) -> None:
    """Print tables of ranks, of their layers, of the time of a step, and of changes."""
    console = Console(soft_wrap=True)

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    line(f"{layout_of(args)}; {found.check.micro_batches} micro-batches of {args.micro_batch_size}")
    for text in verdicts_by_kind(cluster, found.prediction, args) or [verdict(found.check, origin)]:
        line(text)
    print_whole(memory_table(found.check))
    if any(rank.traffic for rank in found.check.ranks):
        print_whole(traffic_table(found.check))
    print_whole(_parts_table(found.parts))
    if found.prediction is None:
        line("this job is counted whole: its time and changes are not predicted")
        return
    if not found.tried:
        print_whole(_time_table(found.prediction))
        line(modelled(found.prediction, args, cluster.name))
        line("this job is counted whole: its changes are not predicted")
        return
    print_whole(_time_table(found.prediction))
    line(modelled(found.prediction, args, cluster.name))
    if found.helpful:
        print_whole(_changes_table(found.prediction, found.helpful, commands))
    else:
        line(_no_help(found, commands))
    line(_tried(found.tried))
    if found.helpful:
        line(f"with the first change:\n\n{commands.after(found.helpful[0])}")


def _no_help(found: Explanation, commands: Commands) -> str:
    if found.check.fits:
        return "no single change makes it faster and fits; mindspeed plan searches all of them"
    text = "no single change makes it fit"
    if found.nearest is not None:
        one, unit = found.nearest, bytes_unit([found.nearest.peak_bytes])
        text += (
            f"; nearest: {one.change.what} ({flag_text(commands.differences(one))}), which needs "
            f"{unit(one.peak_bytes)} {unit.name}"
        )
    return f"{text}; mindspeed plan searches combinations"


def _tried(tried: Sequence[Effect]) -> str:
    """Summary of the changes that were tried."""
    from mindspeed.planner.explain.effects import INTERRUPTED

    refused = sum(bool(one.refused) for one in tried)
    predicted = sum(one.predicted for one in tried)
    text = (
        f"of {len(tried)} single changes {predicted} were predicted, {refused} a start would "
        f"refuse, {len(tried) - predicted - refused} cannot be among the best; --json lists them"
    )
    interrupted = any(one.skipped == INTERRUPTED for one in tried)
    if interrupted:
        text += "\ninterrupted: the best until then; figures with ~ are estimates"
    return text


def as_data(args: argparse.Namespace, found: Explanation, commands: Commands) -> dict[str, Any]:
    """Plain data for JSON: bytes and seconds."""
    prediction = found.prediction
    time = None
    if prediction is not None:
        names = ("seconds", "bubble", "optimizer_seconds", "mfu", "limit", "flops_per_device")
        time = {name: getattr(prediction, name) for name in names}
        time |= {"exposed": dict(prediction.exposed), "peak_bytes": prediction.peak_bytes}
    return {
        "layout": layout_of(args),
        "check": asdict(found.check),
        "fits": found.check.fits,
        "parts": {rank: [asdict(one) for one in rows] for rank, rows in found.parts.items()},
        "time": time,
        "helpful": [
            {**_effect(one, commands), "command": commands.after(one)} for one in found.helpful
        ],
        "nearest": None if found.nearest is None else _effect(found.nearest, commands),
        "tried": [_effect(one, commands) for one in found.tried],
        "interrupted": found.interrupted,
    }


def _effect(one: Effect, commands: Commands) -> dict[str, Any]:
    return {
        "what": one.change.what,
        "flags": commands.differences(one),
        "exact": one.exact,
        "seconds": one.seconds if one.predicted else None,
        "peak_bytes": one.peak_bytes if one.predicted else None,
        "refused": one.refused,
        "skipped": one.skipped,
    }


def _parts_table(parts: Mapping[int, tuple[PartFigures, ...]]) -> Table:
    every = [part for rows in parts.values() for part in rows]
    size = bytes_unit([*(part.kept or 0 for part in every), *(_sent(part) for part in every)])
    flops = flops_unit(value for part in every for _, value in part.flops)
    phases = [name for name in _SECONDS_OF if any(name in dict(part.flops) for part in every)]
    table = new_table(
        f"a layer, and one micro-batch where no step is named; {size.name} kept for backward and "
        f"sent,\n{flops.name} computed, times in ms",
        ["pipeline rank", "part"],
        ["parameters", "kept", *(_SECONDS_OF[name] for name in phases), "calls", "sent"],
    )
    for name in ("time", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, rows in parts.items():
        label = str(rank)
        for part in rows:
            table.add_row(
                label,
                f"{part.name}, a step" if part.of_step else part.name,
                f"{part.parameters:,}" if part.parameters else "",
                "" if part.kept is None else size(part.kept),
                *(flops(dict(part.flops).get(name, 0)) for name in phases),
                f"{part.calls:,.0f}",
                size(_sent(part)),
                f"{part.seconds * 1e3:,.3f}",
                f"{part.exposed * 1e3:,.3f}",
            )
            label = ""
    return table


def _sent(part: PartFigures) -> float:
    return sum(value for _, value in part.sent)


def _time_table(prediction: Prediction) -> Table:
    table = new_table("where the time of a step goes", ["what"], ["ms", "part"])
    for name, seconds in prediction.parts.items():
        share = seconds / prediction.seconds if prediction.seconds else 0.0
        table.add_row(name, f"{seconds * 1e3:,.3f}", f"{share:.1%}")
    table.add_row("step", f"{prediction.seconds * 1e3:,.3f}", "100.0%", style="bold")
    return table


def _changes_table(now: Prediction, helpful: Sequence[Effect], commands: Commands) -> Table:
    unit = bytes_unit([now.peak_bytes])
    table = new_table(
        f"what would help most; predicted for the changed job, memory in {unit.name}",
        ["change"],
        ["ms", "time", unit.name, "memory"],
    )
    table.add_column("flags")
    for one in helpful:
        table.add_row(
            one.change.what,
            f"{one.seconds * 1e3:,.3f}",
            f"{one.seconds / now.seconds - 1:+.1%}",
            ("" if one.exact else "~") + unit(one.peak_bytes),
            f"{one.peak_bytes / now.peak_bytes - 1:+.1%}",
            flag_text(commands.differences(one)),
        )
    return table


def flag_text(flags: Mapping[str, Any]) -> str:
    """Flags to add, and those to take away, as text."""
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None:
            words.append(f"(no {flag})")
        elif value is True:
            words.append(flag)
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words.append(" ".join([flag, *map(str, values)]))
    return " ".join(words)
