"""``mindspeed plan --measure``: candidates of a plan, started here for a few steps each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.cli.plan_program import command, job_of, launch_words, program
from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text, make_dirs

if TYPE_CHECKING:
    from mindspeed.planner.measure import Measured, Measurements
    from mindspeed.planner.search.result import Plan

_DATA = ("data_path", "train_data_path", "data_args_path", "mock_data")


def measure_plan(own: argparse.Namespace, flags: Sequence[str], plan: Plan) -> Measurements:
    """Measure candidates of a plan and, without ``--json``, print them and the fastest's command.

    Args:
        own: flags of the command.
        flags: of the job as the user gave them.
        plan: its candidates.

    Raises:
        ConfigError: this machine has fewer devices than are planned for.
        PlanError: none of the candidates ran.
    """
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.measure import OF_A_MEASUREMENT, Launcher, measure

    check_devices(plan.devices)
    job = job_of(flags)
    out = own.out or Path()
    launcher = Launcher(program(flags), plan.devices, out / "measured", {})
    overrides: dict[str, Any] = dict(OF_A_MEASUREMENT)
    if not any(map(job.gives, _DATA)):
        overrides["mock_data"] = True

    def run(number: int, candidate: Any) -> float:
        words = job.flags({**candidate.layout.overrides(), **overrides})
        return launcher.seconds(f"candidate-{number}", words)

    def tell(one: Measured) -> None:
        seconds = one.error if one.seconds is None else f"{one.seconds:.4g} s a step"
        print(f"candidate {one.number}: {seconds}", file=sys.stderr, flush=True)

    node = load_cluster(own.cluster).levels[0].size or plan.devices
    found = measure(
        plan.candidates, run, node_size=node, all_of_them=own.measure == "black", tell=tell
    )
    _write(found, out)
    if found.interrupted and all(run.seconds is None for run in found.runs):
        print("interrupted before a candidate ran", file=sys.stderr)
        return found
    best = found.best
    if not own.json:
        print(found.table())
        print(f"\nmeasured best: candidate {best.number}, {best.candidate.layout}")
        launch = launch_words(own.launch, own.cluster, plan.devices)
        print(f"\n{command(flags, best.candidate.flags, launch)}")
    return found


def _write(found: Measurements, out: Path) -> None:
    make_dirs(out)
    text = json.dumps(found.to_json(), indent=2) + "\n"
    atomic_write_text(out / "measured.json", text)


def check_devices(wanted: int) -> None:
    """Refuse to measure on more devices than this machine has.

    Raises:
        ConfigError: it has fewer.
    """
    from mindspeed import device
    from mindspeed.training.resolve_parallel import check_fits_here

    here = device.current()
    if here.on_host:
        check_fits_here(wanted)
    elif here.count() < wanted:
        raise ConfigError(
            f"--measure starts {wanted} ranks and this machine has {here.count()} devices: plan "
            f"with --devices {here.count()}, or without --measure"
        )
