"""``mindspeed plan MODEL --on 16xh100``: does a model fit, how fast does it train, which flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mindspeed.cli import plan_run
from mindspeed.cli.plan_output import bytes_unit, new_table, print_whole
from mindspeed.cli.plan_run import command, interruptible, job_of, launch_words
from mindspeed.cli.plan_search import NOTHING_FITS, print_plan, search, write_page, write_plans
from mindspeed.errors import ConfigError
from mindspeed.files import make_dirs

if TYPE_CHECKING:
    from mindspeed.planner.job import Job
    from mindspeed.planner.layout import Layout
    from mindspeed.planner.question import Purpose
    from mindspeed.planner.search.result import SearchResult


@dataclass(frozen=True)
class Answer:
    """The plan for one purpose.

    Attributes:
        purpose: what the model is trained for.
        flags: of the job.
        assumed: words of the flags that the user has not said.
        plan: its best layouts.
    """

    purpose: Purpose
    flags: tuple[str, ...]
    assumed: tuple[str, ...]
    plan: SearchResult

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON."""
        return {
            "purpose": self.purpose.name,
            "assumed": list(self.assumed),
            **self.plan.to_json(),
        }


def run_question(own: argparse.Namespace, model: str, flags: Sequence[str]) -> int:
    """Plan a model for each purpose and print the answers.

    Args:
        own: flags of the command.
        model: its name or folder.
        flags: that the user has added.
    """
    plan_run.install_adaptor()
    from mindspeed.planner.question import PURPOSES, job_words, named_model

    purposes = own.purposes or list(PURPOSES)
    if wrong := [one for one in purposes if one not in PURPOSES]:
        raise ConfigError(f"--for {wrong[0]}: there are {', '.join(PURPOSES)}")
    name, model_flags = named_model(model)
    devices = own.devices[0]
    answers: list[Answer] = []
    with interruptible() as stop:
        for purpose in (PURPOSES[one] for one in purposes):
            assumed, words = job_words(purpose, name, model_flags, flags, devices)
            plan = search(own, words, devices, f"{purpose.title}: ")
            answers.append(Answer(purpose, tuple(words), tuple(assumed), plan))
            if plan.interrupted:
                break
    launch = launch_words(own.launch, own.cluster, devices)
    if own.json:
        data = {"model": name, "answers": [one.to_json() for one in answers]}
        print(json.dumps(data | {"assumed": answers[0].plan.assumed}, indent=2))
    else:
        _print(name, answers, launch)
    if own.html is not None:
        pages = [
            (
                one.purpose.title,
                one.plan,
                partial(_line, name, one.purpose, job_of(one.flags), launch),
            )
            for one in answers
        ]
        write_page(pages, own.html)
    if own.out is not None:
        for one in answers:
            out = own.out / one.purpose.name
            make_dirs(out)
            write_plans([one.plan], out, one.flags, [launch])
    if answers[-1].plan.interrupted:
        return stop.status
    return 0 if all(one.plan.candidates for one in answers) else NOTHING_FITS


def _line(model: str, purpose: Purpose, job: Job, launch: str | None, layout: Layout) -> str:
    """The command line that trains in a layout."""
    words = purpose.to_type(model, job.flags(layout.overrides()))
    return command((), words, launch, purpose.command)


def _print(model: str, answers: Sequence[Answer], launch: str | None) -> None:
    console = Console(soft_wrap=True)

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    first = answers[0].plan
    unit = bytes_unit([first.memory_limit])
    table = new_table(
        f"{model} on {first.devices} devices of {first.cluster}, "
        f"{unit(first.memory_limit)} {unit.name} for the tensors of each",
        ["", "fits", "layout"],
        ["s a step", "likely", "tokens/s/device", "MFU", unit.name],
    )
    for one in answers:
        table.add_row(one.purpose.title, *_row(one.plan, unit))
    print_whole(table)
    if first.interval is not None:
        line(first.interval.sentence)
    line(f"assumed: {first.assumed}")
    for one in answers:
        line(f"\n{one.purpose.title}; not said, so assumed: {' '.join(one.assumed)}")
        if not one.plan.candidates:
            line(one.plan.explain())
            continue
        words = one.purpose.to_type(model, one.plan.best.flags)
        line(f"{command((), words, launch, one.purpose.command)}")
    if len(answers) == 1:
        line("")
        print_plan(answers[0].plan, answers[0].flags, launch)


def _row(plan: SearchResult, unit: Any) -> list[str]:
    if not plan.candidates:
        closest = "" if plan.closest is None else str(plan.closest.layout)
        needs = "" if plan.closest is None else unit(plan.closest.prediction.peak_bytes)
        return ["no", closest, "", "", "", "", needs]
    best = plan.best
    found = best.prediction
    likely = (
        "" if plan.interval is None else plan.interval.text(found.seconds, found.uneven_seconds)
    )
    return [
        "yes",
        str(best.layout),
        f"{found.seconds:,.3g}",
        likely,
        f"{found.tokens_per_second_per_device:,.0f}",
        f"{found.mfu:.0%}",
        unit(best.peak_bytes),
    ]
