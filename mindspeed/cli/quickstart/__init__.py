"""``mindspeed quickstart``: from raw text to a fine-tuned, evaluated model, in minutes.

    text -> tokenizer -> token files -> pretraining (TP 2 x PP 2) -> Hugging Face, same logits
         -> LoRA on questions and answers -> merged -> answers, evaluation, plots

Nothing is downloaded: text and questions come from the documentation of the running Python. Every
step is an ordinary mindspeed command, which is printed before it runs. When the command is started
again, finished steps are skipped and an interrupted training continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from rich.console import Console

from mindspeed.cli.quickstart.plan import Quickstart
from mindspeed.cli.quickstart.running import INDENT, run_step, show
from mindspeed.cli.quickstart.step import typed
from mindspeed.cli.quickstart.summary import print_summary
from mindspeed.errors import ConfigError, TrainingError
from mindspeed.files import make_dirs, tighten_umask
from mindspeed.ranges import MAX_RANKS, whole

HELP = "from raw text to a fine-tuned, evaluated model on this machine, in minutes"

ITERATIONS = 400
FAST_ITERATIONS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument(
        "--workdir",
        type=Path,
        default=Path("runs/quickstart"),
        metavar="DIR",
        help="directory of all files (default: %(default)s)",
    )
    parser.add_argument(
        "--nproc", type=whole(1, MAX_RANKS), help="processes for pretraining (default: tp x pp)"
    )
    parser.add_argument(
        "--tp", type=whole(1, MAX_RANKS), default=2, help="tensor-parallel size (default: 2)"
    )
    parser.add_argument(
        "--pp", type=whole(1, MAX_RANKS), default=2, help="pipeline-parallel size (default: 2)"
    )
    parser.add_argument(
        "--iters", type=whole(1), help=f"pretraining iterations (default: {ITERATIONS})"
    )
    parser.add_argument(
        "--fast", action="store_true", help=f"only {FAST_ITERATIONS} pretraining iterations"
    )


def run(args: argparse.Namespace) -> int:
    """Run all steps that are not done yet, then print a summary."""
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
            raise TrainingError("interrupted; run the same command again to continue") from None
        console.print(f"{' ' * INDENT}[dim]({time.monotonic() - began:.1f} s)[/]")
    print_summary(plan, console, time.monotonic() - started)
    return 0


def make_plan(args: argparse.Namespace) -> Quickstart:
    """The plan that the flags describe.

    Raises:
        ConfigError: The number of processes does not fit the parallel sizes.
    """
    ranks = args.nproc or args.tp * args.pp
    if ranks % (args.tp * args.pp):
        raise ConfigError(
            f"--nproc {ranks} is not divisible by --tp {args.tp} x --pp {args.pp} = "
            f"{args.tp * args.pp}"
        )
    iterations = args.iters or (FAST_ITERATIONS if args.fast else ITERATIONS)
    return Quickstart(args.workdir, ranks, args.tp, args.pp, iterations)


def _one_device_per_rank(plan: Quickstart, console: Console) -> None:
    """Use the CPU for everything if there are fewer accelerators than processes.

    NCCL and HCCL need one device per rank. A device chosen with MINDSPEED_DEVICE is kept.
    """
    if "MINDSPEED_DEVICE" in os.environ:
        return
    from mindspeed import device

    here = device.current()
    if not here.on_host and here.count() < plan.ranks:
        os.environ["MINDSPEED_DEVICE"] = "cpu"
        console.print(
            f"{plan.ranks} processes need {plan.ranks} devices, this machine has {here.count()} "
            f"({here.name}): using the CPU; --tp 1 --pp 1 would use the device"
        )
