"""``mindspeed plan --plan-activations`` and ``--plan-pipeline``: choices of features, made offline.

    mindspeed plan --plan-activations 60GiB --out plan -- --model llama3-8b ...
    mindspeed plan --plan-pipeline -- --automated-pipeline --model llama3-8b ...

What these features measure in the first steps of a job is counted and modelled here instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.cli.dry_run import settings_of
from mindspeed.errors import MindSpeedError

if TYPE_CHECKING:
    from mindspeed.planner.cluster import Cluster
    from mindspeed.planner.feature_plans import ActivationPlan

FILE = "activations.json"
_FEATURE = ["--adaptive-recompute-device-size", "1", "--adaptive-recompute-profiling-step", "1"]
_DURATION = ("--train-iters", "--train-samples", "--config")


def run_activations(own: argparse.Namespace, flags: Sequence[str]) -> int:
    """Choose what is kept and recomputed within ``--plan-activations``; print and write it.

    Args:
        own: flags of the command.
        flags: of the job.
    """
    duration = [] if set(_DURATION) & set(flags) else ["--train-iters", "1000"]
    args = settings_of([*flags, *_FEATURE, *duration], "plan", _ranks(own)).args
    from mindspeed.planner import isolated
    from mindspeed.planner.feature_plans import ActivationPlan, plan_stage

    budget, cluster = own.plan_activations, _cluster(own)
    stages = range(args.pipeline_model_parallel_size)
    calls = [(args, budget, cluster, stage) for stage in stages]
    chosen = []
    for found in isolated.map(plan_stage, calls, jobs=own.jobs):
        if isinstance(found, MindSpeedError):
            raise found
        chosen.append(found)
    plan = ActivationPlan(budget, tuple(chosen))
    written = []
    if own.out is not None:
        own.out.mkdir(parents=True, exist_ok=True)
        written = plan.write(Path(own.out) / FILE)
    if own.json:
        print(json.dumps(_data(plan, written), indent=2))
    else:
        print(_text(plan, written))
    return 0 if plan.fits else 3


def run_pipeline(own: argparse.Namespace, flags: Sequence[str]) -> int:
    """Write the result of ``--automated-pipeline``, which is among the flags of the job."""
    args = settings_of(flags, "plan", _ranks(own)).args
    from mindspeed.planner import isolated
    from mindspeed.planner.feature_plans import plan_pipeline

    print(isolated.call(plan_pipeline, args, _cluster(own)))
    return 0


def _ranks(own: argparse.Namespace) -> int | None:
    return own.devices[0] if own.devices else None


def _cluster(own: argparse.Namespace) -> Cluster:
    from mindspeed.planner.cluster import load_cluster

    return load_cluster(own.cluster or "generic")


def _data(plan: ActivationPlan, flags: Sequence[str]) -> dict[str, object]:
    return {
        "budget": plan.budget,
        "fits": plan.fits,
        "peaks": [stage.peak for stage in plan.stages],
        "seconds": [stage.seconds for stage in plan.stages],
        "activation_plan": plan.rules(),
        "flags": list(flags),
    }


def _text(plan: ActivationPlan, flags: Sequence[str]) -> str:
    lines = [
        f"pipeline rank {number}: {stage.peak / 2**20:,.1f} MiB of {plan.budget / 2**20:,.1f}, "
        f"least {stage.least / 2**20:,.1f}; recomputation adds "
        f"{1e3 * stage.seconds:,.3f} ms to a micro-batch (modelled)"
        for number, stage in enumerate(plan.stages)
    ]
    rules = plan.rules()
    lines += [f"layers {layers}: {_words(sites)}" for layers, sites in rules.items()]
    if not rules:
        lines.append("all activations are kept")
    elif not flags:
        lines.append("--out DIR writes the file for --activation-plan")
    return "\n".join([*lines, *([" ".join(flags)] if flags else [])])


def _words(sites: dict[str, str]) -> str:
    return ", ".join(f"{action} {site}" for site, action in sites.items())
