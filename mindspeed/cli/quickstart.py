"""``mindspeed quickstart``: from nothing to a trained language model, on this machine, in minutes.

    corpus -> tokenizer -> .bin/.idx -> pretrain on 4 ranks (TP 2 x PP 2) -> loss.png -> a sample

Nothing is downloaded: the text is the documentation of the running Python. Every step prints what
it does and how long it took; what is finished is skipped when the command is started again, and a
training that was interrupted goes on from its last checkpoint. Each step is an ordinary command of
its own (printed at the end), so this is also the tour of the tool.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mindspeed import recipes
from mindspeed.cli.watch import follow
from mindspeed.errors import ConfigError, DataError, TrainingError
from mindspeed.files import atomic_write_text, make_dirs, secure_open, tighten_umask

HELP = "pretrain a small LLaMA on this machine, from text to a picture of the loss"

VOCAB_SIZE = 2048
PROMPT = "The import statement"
SAMPLE_TOKENS = 120
FAST_ITERATIONS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("--workdir", type=Path, default=Path("runs/quickstart"), metavar="DIR")
    parser.add_argument("--nproc", type=int, help="processes (default: tp x pp)")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size (default: 2)")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default: 2)")
    parser.add_argument("--iters", type=int, help="training iterations (default: 600)")
    parser.add_argument(
        "--fast", action="store_true", help=f"only {FAST_ITERATIONS} iterations, to see it work"
    )


@dataclass(frozen=True)
class Plan:
    """Where everything is, and how the model is trained."""

    workdir: Path
    ranks: int
    tp: int
    pp: int
    iterations: int

    @property
    def corpus(self) -> Path:
        return self.workdir / "corpus.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.workdir / "tokenizer"

    @property
    def dataset(self) -> Path:
        return self.workdir / "data" / "corpus_text_document"

    @property
    def checkpoints(self) -> Path:
        return self.workdir / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.workdir / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.workdir / "tensorboard"

    @property
    def log(self) -> Path:
        return self.workdir / "pretrain.log"

    @property
    def picture(self) -> Path:
        return self.workdir / "loss.png"

    @property
    def sample(self) -> Path:
        return self.workdir / "sample.txt"

    @property
    def trained(self) -> int:
        """Iterations of the latest checkpoint."""
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        text = tracker.read_text().strip() if tracker.exists() else ""
        return int(text) if text.isdecimal() else 0

    def pretrain_command(self) -> list[str]:
        """The training as one would type it."""
        evaluations = max(self.iterations // 6, 1)
        flags: dict[str, Any] = {
            "config": recipes.path("quickstart"),
            "nproc": self.ranks,
            "tensor-model-parallel-size": self.tp,
            "pipeline-model-parallel-size": self.pp,
            "train-iters": self.iterations,
            "lr-warmup-iters": min(30, self.iterations // 4),
            "eval-interval": evaluations,
            "data-path": self.dataset,
            "tokenizer-model": self.tokenizer,
            "save": self.checkpoints,
            "save-interval": evaluations,
            "keep-last": 2,
            "metrics-file": self.metrics,
            "tensorboard-dir": self.tensorboard,
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        return ["pretrain", *words, "--auto-resume", "--override-opt-param-scheduler"]

    def generate_command(self) -> list[str]:
        """The sample as one would type it; one process reads the checkpoint of all ranks."""
        words = ["generate", f"--load={self.checkpoints}", f"--prompt={PROMPT}"]
        return [*words, f"--max-new-tokens={SAMPLE_TOKENS}"]


@dataclass(frozen=True)
class Step:
    """One step: ``done`` says whether it can be skipped, ``run`` does it and says what came out."""

    title: str
    done: Callable[[], bool]
    run: Callable[[Console], str]


def run(args: argparse.Namespace) -> int:
    """Run all steps that are not done yet, then show what came out."""
    console = Console()
    plan = _plan(args)
    tighten_umask()
    make_dirs(plan.workdir)
    started = time.monotonic()
    steps = _steps(plan)
    for number, step in enumerate(steps, start=1):
        head = f"[bold cyan]\\[{number}/{len(steps)}][/] [bold]{step.title}[/]"
        if step.done():
            console.print(f"{head}  [green]done before[/]")
            continue
        console.print(head)
        began = time.monotonic()
        result = step.run(console)
        console.print(f"      {result}  [dim]({time.monotonic() - began:.1f} s)[/]")
    _print_summary(plan, console, time.monotonic() - started)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    ranks = args.nproc or args.tp * args.pp
    if min(args.tp, args.pp, ranks) < 1 or ranks % (args.tp * args.pp):
        raise ConfigError(
            f"--nproc {ranks} is not divisible by --tp {args.tp} x --pp {args.pp} = "
            f"{args.tp * args.pp}"
        )
    iterations = args.iters or (FAST_ITERATIONS if args.fast else 600)
    if iterations < 1:
        raise ConfigError(f"--iters {iterations}: at least 1 is needed")
    return Plan(args.workdir, ranks, args.tp, args.pp, iterations)


def _steps(plan: Plan) -> list[Step]:
    layout = f"{plan.ranks} processes, TP {plan.tp} x PP {plan.pp}"
    index = plan.dataset.with_name(plan.dataset.name + ".idx")
    return [
        Step(
            "collect English text from this Python's documentation",
            plan.corpus.exists,
            lambda console: _write_corpus(plan, console),
        ),
        Step(
            f"train a byte-level BPE tokenizer with {VOCAB_SIZE} entries",
            lambda: _newer(plan.tokenizer / "tokenizer_config.json", plan.corpus),
            lambda console: _train_tokenizer(plan, console),
        ),
        Step(
            "turn the text into token files",
            lambda: _newer(index, plan.tokenizer / "tokenizer_config.json"),
            lambda console: _tokenize(plan, console),
        ),
        Step(
            f"pretrain a LLaMA for {plan.iterations} iterations ({layout})",
            lambda: plan.trained >= plan.iterations,
            lambda console: _pretrain(plan, console),
        ),
        Step(
            "draw the loss",
            lambda: _newer(plan.picture, plan.metrics),
            lambda _: _draw(plan),
        ),
        Step(
            "let the model write",
            lambda: _newer(plan.sample, plan.checkpoints / "latest_checkpointed_iteration.txt"),
            lambda console: _write_sample(plan, console),
        ),
    ]


def _newer(output: Path, source: Path) -> bool:
    return output.exists() and output.stat().st_mtime >= source.stat().st_mtime


def _write_corpus(plan: Plan, console: Console) -> str:
    from mindspeed.data.corpus import write_python_docs

    with console.status("reading ...") as status:
        summary = write_python_docs(
            plan.corpus, lambda count: status.update(f"reading ... {count} documents")
        )
    return f"{summary.documents} documents, {summary.characters / 1e6:.2f} million characters"


def _train_tokenizer(plan: Plan, console: Console) -> str:
    from mindspeed.data.tokenizer import save_tokenizer, train_bpe

    with console.status("counting pairs of characters ..."), open(plan.corpus, "rb") as file:
        tokenizer = train_bpe((json.loads(line)["text"] for line in file), VOCAB_SIZE)
        save_tokenizer(tokenizer, plan.tokenizer)
    pieces = tokenizer.encode(f"{PROMPT} finds a module").tokens
    shown = " ".join(piece.replace("\u0120", "_") for piece in pieces)
    return f"for example: [dim]{shown}[/]"


def _tokenize(plan: Plan, console: Console) -> str:
    from mindspeed.cli.preprocess import preprocess_with_bar
    from mindspeed.data.preprocess import PreprocessOptions
    from mindspeed.data.tokenizer import TokenizerOptions

    report = preprocess_with_bar(
        PreprocessOptions(
            inputs=(plan.corpus,),
            output_prefix=plan.workdir / "data" / "corpus",
            tokenizer=TokenizerOptions(tokenizer_model=str(plan.tokenizer.resolve())),
            append_eod=True,
            overwrite=True,
        ),
        console,
    )
    return f"{report.totals.tokens:,} tokens"


def _pretrain(plan: Plan, console: Console) -> str:
    if plan.trained:
        console.print(f"      going on after iteration {plan.trained}")
    with secure_open(plan.log, "a") as log:
        process = _start(plan.pretrain_command(), log)
        try:
            follow(process, plan.metrics, plan.trained, plan.iterations, console)
        except KeyboardInterrupt:
            console.print("      stopping; the training saves a checkpoint first")
            process.terminate()
            process.wait()
            raise TrainingError(
                f"interrupted after iteration {plan.trained}; start the same command again to go on"
            ) from None
    if process.returncode != 0:
        lines = plan.log.read_text("utf-8", errors="replace").splitlines()
        raise TrainingError("\n".join([*lines[-25:], f"the training failed; see {plan.log}"]))
    first, last = _losses(plan.metrics)
    return f"loss {first:.2f} -> {last:.2f}"


def _start(command: Sequence[str], output: Any) -> subprocess.Popen[bytes]:
    """One of our commands as a process of its own, quiet about what users cannot change."""
    environment = {**os.environ, "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")}
    return subprocess.Popen(
        [sys.executable, "-m", "mindspeed", *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches us; we ask the training to save and stop
    )


def _losses(metrics: Path) -> tuple[float, float]:
    """First and last training loss of a run."""
    from mindspeed.cli.metrics import LOSS, read_run

    values = list(read_run(metrics, "quickstart").curve(LOSS).values())
    return values[0], values[-1]


def _draw(plan: Plan) -> str:
    from mindspeed.cli.figures import draw
    from mindspeed.cli.metrics import read_run

    try:
        title = f"mindspeed quickstart: LLaMA, TP {plan.tp} x PP {plan.pp}"
        draw([read_run(plan.metrics, "quickstart")], plan.picture, title=title)
    except ConfigError as error:  # a picture is not worth failing for
        return f"[yellow]left out: {error}[/]".replace("[plot]", r"\[plot]")
    return str(plan.picture)


def _write_sample(plan: Plan, console: Console) -> str:
    with console.status("loading the checkpoint of all ranks into one process ..."):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "mindspeed", *plan.generate_command()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise DataError(f"generation failed:\n{done.stderr.strip()[-2000:]}")
    atomic_write_text(plan.sample, done.stdout)
    return str(plan.sample)


def _print_summary(plan: Plan, console: Console, seconds: float) -> None:
    from mindspeed.cli.metrics import VALIDATION_LOSS, read_run

    first, last = _losses(plan.metrics)
    validation = list(read_run(plan.metrics, "quickstart").curve(VALIDATION_LOSS).values())
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("training loss", f"{first:.2f} -> [bold green]{last:.2f}[/]")
    if validation:
        table.add_row("validation loss", f"[bold green]{validation[-1]:.2f}[/]")
    if plan.picture.exists():
        table.add_row("picture", str(plan.picture))
    table.add_row("checkpoint", str(plan.checkpoints / f"iter_{plan.trained:07d}"))
    table.add_row("TensorBoard", f"tensorboard --logdir {plan.tensorboard}")
    table.add_row("the model writes", Text(_opening(plan.sample), style="italic"))
    table.add_row("", "")
    table.add_row("go on with", f"mindspeed generate --load {plan.checkpoints} --prompt TEXT")
    table.add_row("", f"mindspeed plot {plan.workdir}")
    table.add_row("", f"mindspeed pretrain --config {recipes.path('quickstart')} --help")
    title = f"[bold]trained in {int(seconds) // 60}:{int(seconds) % 60:02d} minutes[/]"
    console.print(Panel(table, title=title, border_style="green"))


def _opening(sample: Path, characters: int = 400) -> str:
    text = sample.read_text("utf-8").strip()
    return text if len(text) <= characters else text[:characters].rsplit(" ", 1)[0] + " ..."
