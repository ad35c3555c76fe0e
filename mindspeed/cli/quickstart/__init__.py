"""``mindspeed quickstart``: the whole way of a language model, on this machine, in minutes.

    text -> tokenizer -> token files -> pretraining (TP 2 x PP 2) -> Hugging Face, same logits
         -> LoRA on questions and answers -> merged -> answers, exam, pictures

Nothing is downloaded: text, questions and exam come from the documentation of the running Python.
Every step is an ordinary command, which is printed before it runs, so this is also the tour of the
tool. What is finished is skipped when the command is started again, and a training that was
interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from rich.console import Console

from mindspeed.cli.quickstart.plan import Plan
from mindspeed.cli.quickstart.running import INDENT, run_step, show
from mindspeed.cli.quickstart.step import typed
from mindspeed.cli.quickstart.summary import print_summary
from mindspeed.errors import ConfigError, TrainingError
from mindspeed.files import make_dirs, tighten_umask
from mindspeed.ranges import MAX_RANKS, whole

HELP = "the whole way on this machine: from text to a tuned, evaluated model"

ITERATIONS = 400
FAST_ITERATIONS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("--workdir", type=Path, default=Path("runs/quickstart"), metavar="DIR")
    parser.add_argument(
        "--nproc", type=whole(1, MAX_RANKS), help="processes of the pretraining (default: tp x pp)"
    )
    parser.add_argument(
        "--tp", type=whole(1, MAX_RANKS), default=2, help="tensor-parallel size (default: 2)"
    )
    parser.add_argument(
        "--pp", type=whole(1, MAX_RANKS), default=2, help="pipeline stages (default: 2)"
    )
    parser.add_argument(
        "--iters", type=whole(1), help=f"iterations of the pretraining (default: {ITERATIONS})"
    )
    parser.add_argument(
        "--fast", action="store_true", help=f"only {FAST_ITERATIONS} iterations, to see it work"
    )


def run(args: argparse.Namespace) -> int:
    """Run all steps that are not done yet, then show what came out."""
    console = Console()
    plan = make_plan(args)
    tighten_umask()
    _one_device_per_rank(plan, console)
    logs = make_dirs(plan.workdir / "logs")
    started = time.monotonic()
    steps = plan.steps()
    for number, step in enumerate(steps, start=1):
        head = f"[bold cyan]\\[{number:2d}/{len(steps)}][/] [bold]{step.title}[/]"
        if step.done():
            console.print(f"{head}  [green]done before[/]")
            continue
        console.print(head)
        show(console, typed(step.command, console.width - INDENT), "dim")
        began = time.monotonic()
        try:
            run_step(step, logs / f"{number:02d}-{step.command[0]}.log", console)
        except KeyboardInterrupt:
            raise TrainingError("interrupted; start the same command again to go on") from None
        console.print(f"{' ' * INDENT}[dim]({time.monotonic() - began:.1f} s)[/]")
    print_summary(plan, console, time.monotonic() - started)
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan that the flags describe.

    Raises:
        ConfigError: The processes do not fit the layout.
    """
    ranks = args.nproc or args.tp * args.pp
    if ranks % (args.tp * args.pp):
        raise ConfigError(
            f"--nproc {ranks} is not divisible by --tp {args.tp} x --pp {args.pp} = "
            f"{args.tp * args.pp}"
        )
    iterations = args.iters or (FAST_ITERATIONS if args.fast else ITERATIONS)
    return Plan(args.workdir, ranks, args.tp, args.pp, iterations)


def _one_device_per_rank(plan: Plan, console: Console) -> None:
    """Use the CPU for everything where there are fewer accelerators than processes.

    NCCL and HCCL need a device of its own for each rank. A device chosen by MINDSPEED_DEVICE stays.
    """
    if "MINDSPEED_DEVICE" in os.environ:
        return
    from mindspeed import device

    here = device.current()
    if here.name != "cpu" and here.count() < plan.ranks:
        os.environ["MINDSPEED_DEVICE"] = "cpu"
        console.print(
            f"{plan.ranks} processes need as many devices, this machine has {here.count()} "
            f"({here.name}): the CPU is used; --tp 1 --pp 1 uses the device"
        )
