"""``mindspeed quickstart``: from raw text to a fine-tuned, evaluated model, in minutes.

    text -> tokenizer -> token files -> pretraining (TP 2 x PP 2) -> Hugging Face, same logits
         -> LoRA on questions and answers -> merged -> answers, evaluation, plots

Nothing is downloaded: text and questions come from the documentation of the running Python. Every
step is an ordinary mindspeed command, which is printed before it runs. When the command is started
again, finished steps are skipped and an interrupted training continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mindspeed.cli.main import dispatch
from mindspeed.cli.plot import LOSS, VALIDATION_LOSS, read_run
from mindspeed.cli.quickstart_plan import QUESTIONS, Quickstart, QuickstartStep, typed
from mindspeed.errors import ConfigError, MindSpeedError, TrainingError
from mindspeed.files import atomic_write_text, make_dirs, secure_open, tighten_umask
from mindspeed.parsing import decode_json
from mindspeed.ranges import MAX_RANKS, whole

HELP = "from raw text to a fine-tuned, evaluated model on this machine, in minutes"

ITERATIONS = 400
FAST_ITERATIONS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--workdir",
        type=Path,
        default=Path("runs/quickstart"),
        metavar="DIR",
        help="directory of all files",
    )
    add("--nproc", type=whole(1, MAX_RANKS), help="processes for pretraining (default: tp x pp)")
    add("--tp", type=whole(1, MAX_RANKS), default=2, help="tensor-parallel size")
    add("--pp", type=whole(1, MAX_RANKS), default=2, help="pipeline-parallel size")
    add("--iters", type=whole(1), help=f"pretraining iterations (default: {ITERATIONS})")
    add("--fast", action="store_true", help=f"only {FAST_ITERATIONS} pretraining iterations")


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


INDENT = 6
LINES_SHOWN = 12


def run_step(step: QuickstartStep, log: Path, console: Console) -> None:
    """Run one step and show what it printed.

    Args:
        log: File for its standard error.
        console: Where to show its output.

    Raises:
        MindSpeedError: It failed.
    """
    if step.replaces is not None and step.replaces.exists() and not step.fresh():
        shutil.rmtree(step.replaces)
    if step.how == "training":
        _train(step, log, console)
        return
    try:
        text = (
            _run_in_process(step.command)
            if step.how == "in_process"
            else _run_subprocess(step.command, log, console)
        )
    except ConfigError as error:
        if not step.optional:
            raise
        show(console, f"skipped: {error}", "yellow")
        return
    if step.keeps_text:
        atomic_write_text(step.output, text)
    lines = [line for line in text.splitlines() if line.strip()]
    more = [f"... {len(lines) - LINES_SHOWN} more lines"] if len(lines) > LINES_SHOWN else []
    show(console, "\n".join(lines[:LINES_SHOWN] + more), "cyan" if step.keeps_text else "")


def show(console: Console, text: str, style: str = "") -> None:
    """Print text below the title of a step."""
    if text:
        console.print(Padding(Text(text, style=style), (0, 0, 0, INDENT)))


def _run_in_process(command: Sequence[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = dispatch(command[0], list(command[1:]))
    if status != 0:
        raise MindSpeedError(f"mindspeed {command[0]} failed: {output.getvalue().strip()}")
    return output.getvalue()


def _run_subprocess(command: Sequence[str], log: Path, console: Console) -> str:
    with secure_open(log) as errors, console.status(f"mindspeed {command[0]} ..."):
        process = _start(command, stdout=subprocess.PIPE, stderr=errors)
        try:
            text = process.communicate()[0].decode("utf-8", errors="replace")
        except KeyboardInterrupt:
            _stop(process)
            raise
    if process.returncode != 0:
        raise MindSpeedError(f"{text}{_tail(log)}mindspeed {command[0]} failed; see {log}")
    return text


def _train(step: QuickstartStep, log: Path, console: Console) -> None:
    assert step.metrics is not None
    if step.trained:
        show(console, f"continuing after iteration {step.trained}")
    with secure_open(log, "a") as output:
        process = _start(step.command, stdout=output, stderr=subprocess.STDOUT)
        try:
            follow(process, step.metrics, step.trained, step.iterations, console)
        except KeyboardInterrupt:
            show(console, "stopping after the training has saved a checkpoint")
            _stop(process)
            raise
    if process.returncode != 0:
        raise TrainingError(f"{_tail(log)}the training failed; see {log}")


def _start(command: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a command as a subprocess, without Python warnings by default."""
    environment = {**os.environ, "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")}
    return subprocess.Popen(
        [sys.executable, "-m", "mindspeed", *command],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches only us; we ask the training to save and stop
        **streams,
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _tail(log: Path, lines: int = 25) -> str:
    kept = log.read_text("utf-8", errors="replace").splitlines()[-lines:]
    return "".join(f"{line}\n" for line in kept)


def print_summary(plan: Quickstart, console: Console, seconds: float) -> None:
    """Print the table of results."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("pretraining", _losses(plan.metrics))
    table.add_row("fine-tuning", _losses(plan.tuning_metrics))
    table.add_row("transformers", Text(_text(plan.workdir / "verify.txt")))
    before, after = (score(plan.results(name)) for name in ("pretrained", "tuned"))
    table.add_row(
        "evaluation", f"accuracy {before:.0%} before fine-tuning, [bold green]{after:.0%}[/] after"
    )
    table.add_row("generated text", Text(_text(plan.sample), style="italic"))
    table.add_row("answers", Text(answers(plan.answers), style="italic"))
    for plot in (plan.loss_plot, plan.tuning_plot):
        if plot.exists():
            table.add_row("plot", str(plot))
    table.add_row("checkpoint", str(plan.checkpoints))
    table.add_row("for transformers", str(plan.exported))
    table.add_row("adapter, merged", f"{plan.adapter}, {plan.merged}")
    table.add_row("", "")
    for title, command in (
        (
            "next commands",
            f"mindspeed chat --load {plan.merged} --prompt-type {plan.corpus_files.template}",
        ),
        ("", f"mindspeed generate --load {plan.checkpoints} --prompt TEXT"),
        ("", f"tensorboard --logdir {plan.workdir / 'tensorboard'}"),
        ("", "mindspeed recipes"),
    ):
        table.add_row(title, Text(command))
    time = f"{int(seconds) // 60}:{int(seconds) % 60:02d} minutes"
    title = f"[bold]from raw text to a fine-tuned model in {time}[/]"
    console.print(Panel(table, title=title, border_style="green"))


def score(results: Path) -> float:
    """Accuracy in a results file."""
    return float(decode_json(results.read_text("utf-8"))["tasks"]["boolq"]["score"])


def answers(path: Path) -> str:
    """Each question with the first line of its answer."""
    text = _text(path, 2000)
    found = []
    for prompt in QUESTIONS:
        question = prompt.splitlines()[1].removeprefix("Question: ")
        _, _, rest = text.partition(prompt)
        answer = (rest.strip().splitlines() or ["..."])[0]
        found.append(f"{question} {answer}")
    return "\n".join(found)


def _losses(metrics: Path) -> str:
    run = read_run(metrics, "quickstart")
    values = list(run.curve(LOSS).values())
    text = f"loss {values[0]:.2f} -> [bold green]{values[-1]:.2f}[/]"
    held_out = list(run.curve(VALIDATION_LOSS).values())
    return text + (f", validation loss {held_out[-1]:.2f}" if held_out else "")


def _text(path: Path, characters: int = 400) -> str:
    lines = (line.rstrip() for line in path.read_text("utf-8").splitlines())
    text = "\n".join(filter(None, lines))
    return text if len(text) <= characters else text[:characters].rsplit(" ", 1)[0] + " ..."


POLL_SECONDS = 0.25
LINES_PER_RUN = 20


def follow(
    process: subprocess.Popen[bytes], metrics: Path, done: int, total: int, console: Console
) -> None:
    """Show new records of ``metrics`` until ``process`` ends.

    Args:
        process: The training.
        metrics: Its metrics file, which need not exist yet; records already in it are not shown.
        done: Iterations done before.
        total: Total number of iterations.
        console: Where to draw.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    position = metrics.stat().st_size if metrics.exists() else 0
    next_line = done
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting processes", total=total, completed=done)
        ended = False
        while not ended:
            time.sleep(POLL_SECONDS)
            ended = process.poll() is not None
            records, position = new_records(metrics, position)
            for record in records:
                iteration = record["iteration"]
                if record.get("validation_loss") is not None:
                    _say(console, iteration, f"validation loss {record['validation_loss']:.3f}")
                if record.get("lm_loss") is not None:
                    text = _describe(record)
                    bar.update(task, completed=iteration, description=text)
                    if iteration >= next_line:
                        next_line = iteration + max(total // LINES_PER_RUN, 1)
                        _say(console, iteration, text)


def new_records(path: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """Complete lines of a metrics file after ``position``; a resumed run may truncate the file."""
    if not path.exists():
        return [], 0
    with open(path, "rb") as file:
        position = min(position, path.stat().st_size)
        file.seek(position)
        text = file.read()
    complete = text[: text.rfind(b"\n") + 1]
    records = []
    for line in complete.splitlines():
        try:
            records.append(decode_json(line))
        except json.JSONDecodeError:  # the file was truncated in the meantime
            continue
    return records, position + len(complete)


def _say(console: Console, iteration: int, text: str) -> None:
    console.print(f"      {iteration:5d}  {text}", highlight=False, markup=False)


def _describe(record: dict[str, Any]) -> str:
    minutes, seconds = divmod(int(record.get("eta_seconds") or 0), 60)
    speed = f"{record['tokens_per_second']:,.0f} tokens/s"
    return f"loss {record['lm_loss']:.3f}   {speed}   {minutes}:{seconds:02d} left"
