"""The final summary: losses, evaluation scores, a sample, plots, and next commands."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mindspeed.cli.metrics import LOSS, VALIDATION_LOSS, read_run
from mindspeed.cli.quickstart.plan import QUESTIONS, Quickstart
from mindspeed.parsing import decode_json


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
