"""``mindspeed plan`` of one configuration, with ``--check`` or ``--plan-*``.

    mindspeed plan --check --cluster h100 -- --model llama3-8b ...
    mindspeed plan --plan-activations 60GiB --out plan -- --model llama3-8b ...
    mindspeed plan --plan-pipeline -- --automated-pipeline --model llama3-8b ...

``--check`` counts bytes, FLOPs and messages, and says whether the job fits. The other two compute
offline what features otherwise measure in the first steps of a job.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mindspeed.cli.dry_run import settings_of
from mindspeed.cli.plan_output import (
    bytes_unit,
    memory_table,
    new_table,
    print_whole,
    ranges,
)
from mindspeed.cli.plan_run import job_of, progress
from mindspeed.processes import cores, imports_of_command

if TYPE_CHECKING:
    from mindspeed.planner.cluster import Cluster
    from mindspeed.planner.compose.compose import Composed
    from mindspeed.planner.count.check import Check, GroupTraffic
    from mindspeed.planner.feature_plans import StageActivationPlans
    from mindspeed.planner.interval import PredictionFactors
    from mindspeed.planner.job import Job
    from mindspeed.planner.time.prediction import Prediction


DOES_NOT_FIT = 3
"""Exit status."""


def run_check(own: argparse.Namespace, flags: Sequence[str]) -> int:
    """Count the job and print what was found.

    Args:
        own: flags of the command.
        flags: of the job.
    """
    limit, origin = memory_limit(own)
    job = job_of(flags).with_loads(own.expert_imbalance)
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.count.check import megatron_formula
    from mindspeed.planner.expert_loads import assumed

    args = job.settings(None, own.devices).args
    counted = _counted(own, job, args, limit)
    found, prediction = counted.check, counted.prediction
    others = {"Megatron-LM's formula": megatron_formula(args, found.micro_batches)}
    cluster = None if own.cluster is None else load_cluster(own.cluster)
    name = None if cluster is None else cluster.name
    fits, verdicts = found.fits, [verdict(found, origin)]
    if own.memory_limit is None and (kinds := verdicts_by_kind(cluster, prediction, args)):
        fits, verdicts = prediction is not None and prediction.fits, kinds
    if own.json:
        data = as_data(args, counted, others, name)
        print(json.dumps({**data, "fits": fits, "verdict": verdicts}, indent=2))
    else:
        print_check(args, found, others, verdicts)
        console = Console(soft_wrap=True)
        if prediction is not None and name is not None:
            console.print(modelled(prediction, args, name), highlight=False)
            console.print(f"assumed: {assumed(args)}", highlight=False, markup=False)
        elif counted.untimed:
            text = f"the time of a step is not modelled: {counted.untimed}"
            console.print(text, highlight=False, markup=False)
    if own.plot is not None:
        from mindspeed.cli.plan_output import draw_memory

        draw_memory(found, own.plot, layout_of(args))
    return DOES_NOT_FIT if fits is False else 0


def verdicts_by_kind(
    cluster: Cluster | None, prediction: Prediction | None, args: argparse.Namespace
) -> list[str]:
    """Whether each of several kinds of devices has enough memory; empty for one kind."""
    from mindspeed.planner.cluster.mixed import MixedCluster
    from mindspeed.planner.layout import layout_of as layout_of_job
    from mindspeed.planner.search.kinds import by_kind

    if not isinstance(cluster, MixedCluster) or prediction is None:
        return []
    return by_kind(cluster, layout_of_job(args), prediction, args.num_layers)


def _counted(
    own: argparse.Namespace, job: Job, args: argparse.Namespace, limit: int | None
) -> Composed:
    """Composed from small runs, or counted whole."""
    from mindspeed.planner.cluster import load_cluster

    with imports_of_command():
        from mindspeed.planner import isolated
        from mindspeed.planner.compose.compose import compose, count_whole

        isolated.import_ahead()

    cluster = None if own.cluster is None else load_cluster(own.cluster)
    if cluster is not None:
        cluster.check_stages(args)
    if not own.whole:
        with progress("counting small runs") as tell:
            tell(0, 1)
            if composed := compose(job, args, cluster, limit, own.jobs or cores()):
                return composed
    with progress("counting and timing ranks of the pipeline") as tell:
        return count_whole(args, cluster, limit, own.jobs or cores(), tell)


def memory_limit(own: argparse.Namespace) -> tuple[int | None, str]:
    """Bytes for the tensors of a rank, and where the number is from."""
    if own.memory_limit is not None:
        return own.memory_limit, "--memory-limit"
    if own.cluster is None:
        return None, ""
    from mindspeed.planner.cluster import load_cluster

    cluster = load_cluster(own.cluster)
    device = cluster.device
    return cluster.memory_limit, (
        f"{cluster.name}: {device.memory_gib:g} GiB without {device.reserved_gib:g} GiB reserved"
    )


def as_data(
    args: argparse.Namespace,
    counted: Composed,
    others: Mapping[str, float | None],
    cluster: str | None,
) -> dict[str, Any]:
    """Plain data for JSON: bytes, and modelled seconds of a step."""
    from mindspeed.planner.expert_loads import assumed

    found, prediction = counted.check, counted.prediction
    return {
        "composed": found.composed,
        "modelled_seconds": None if prediction is None else prediction.seconds,
        "uneven_seconds": None if prediction is None else prediction.uneven_seconds,
        "assumptions": assumed(args),
        "modelled_interval": None
        if prediction is None or cluster is None
        else asdict(interval_of_job(args, cluster)),
        "layout": layout_of(args),
        "micro_batches": found.micro_batches,
        "memory_limit": found.memory_limit,
        "fits": found.fits,
        "note": found.note,
        "ranks": [asdict(rank) for rank in found.ranks],
        "formulas": dict(others),
    }


def layout_of(args: Any) -> str:
    """The sizes of the job in one line."""
    parts = {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "virtual": args.virtual_pipeline_model_parallel_size or 1,
        "context": args.context_parallel_size,
        "expert": args.expert_model_parallel_size,
        "data": args.data_parallel_size,
    }
    shown = (f"{name} {size}" for name, size in parts.items() if size > 1 or name == "data")
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    return f"{ranks}: {', '.join(shown)}"


def print_check(
    args: argparse.Namespace,
    found: Check,
    others: Mapping[str, float | None],
    verdicts: Sequence[str],
) -> None:
    """Print tables and the verdicts."""
    console = Console(soft_wrap=True)

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    line(f"{layout_of(args)}; {found.micro_batches} micro-batches of {args.micro_batch_size}")
    print_whole(memory_table(found))
    if any(rank.traffic for rank in found.ranks):
        print_whole(traffic_table(found))
    peak = found.fullest.peak
    unit = bytes_unit([peak])
    for name, value in others.items():
        text = "none for this model"
        if value is not None:
            percent = 100 * (value / peak - 1)
            text = f"{unit(value)} {unit.name}, {percent:+.0f} % of what is counted"
        line(f"{name}: {text}")
    if found.note:
        line(found.note)
    for text in verdicts:
        line(text)


def interval_of_job(args: argparse.Namespace, cluster: str) -> PredictionFactors:
    """How far modelled seconds of a job on the cluster of a name may be off."""
    from mindspeed.planner.interval import interval_of, job_kind

    return interval_of(job_kind(args), cluster)


def modelled(prediction: Prediction, args: argparse.Namespace, cluster: str) -> str:
    """The time of a step in one line."""
    spread = interval_of_job(args, cluster)
    likely = spread.text(prediction.seconds, prediction.uneven_seconds)
    return (
        f"modelled, not counted: a step takes {prediction.seconds:,.4g} s on {cluster} "
        f"({likely} s by the spread of published runs), "
        f"{prediction.tokens_per_second_per_device:,.0f} tokens/s and device, MFU "
        f"{prediction.mfu:.1%}, bubble {prediction.bubble:.1%}; most of it is {prediction.limit}"
    )


def verdict(found: Check, origin: str) -> str:
    """Fits or not, by how much."""
    fullest = found.fullest
    unit = bytes_unit([fullest.peak])
    where = f"pipeline rank {ranges(fullest.pipeline_ranks)}"
    need = f"{where} needs {unit(fullest.peak)} {unit.name}"
    if found.memory_limit is None:
        return f"{need}; give --memory-limit or --cluster for a verdict"
    left = found.memory_limit - fullest.peak
    need += f" of {unit(found.memory_limit)} ({origin})"
    if found.fits:
        return f"fits: {need}, {unit(left)} are left"
    return f"does not fit: {need}, {unit(-left)} too much"


def traffic_table(found: Check) -> Table:
    """Messages of pipeline ranks."""
    unit = bytes_unit(row.payload for rank in found.ranks for row in rank.traffic)
    table = new_table(
        f"{unit.name} of a rank's messages in a step; payload: the tensors, sent: by this rank",
        ["pipeline rank", "group", "operation"],
        ["ranks", "calls", "payload", "sent"],
    )
    alike: dict[tuple[GroupTraffic, ...], list[int]] = {}
    for rank in found.ranks:
        alike.setdefault(rank.traffic, []).extend(rank.pipeline_ranks)
    for traffic, numbers in alike.items():
        name = ranges(sorted(numbers))
        for row in traffic:
            calls = "" if row.calls is None else f"{row.calls:,}"
            figures = (f"{row.size}", calls, unit(row.payload), unit(row.wire))
            table.add_row(name, group_name(row.group), row.op, *figures)
            name = ""
    return table


def group_name(description: str) -> str:
    """Megatron's name of a process group in short."""
    return description.lower().removesuffix("_group").replace("_", " ")


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
    from mindspeed.planner.feature_plans import StageActivationPlans, plan_stage

    budget, cluster = own.plan_activations, _cluster(own)
    stages = range(args.pipeline_model_parallel_size)
    calls = [(args, budget, cluster, stage) for stage in stages]
    chosen = isolated.each(plan_stage, calls, jobs=own.jobs or cores())
    plan = StageActivationPlans(budget, tuple(chosen))
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
    from mindspeed.planner.cluster import one_kind

    what = "--plan-pipeline" if own.plan_pipeline else "--plan-activations"
    return one_kind(own.cluster or "generic", what)


def _data(plan: StageActivationPlans, flags: Sequence[str]) -> dict[str, object]:
    return {
        "budget": plan.budget,
        "fits": plan.fits,
        "peaks": [stage.peak for stage in plan.stages],
        "seconds": [stage.seconds for stage in plan.stages],
        "activation_plan": plan.rules(),
        "flags": list(flags),
    }


def _text(plan: StageActivationPlans, flags: Sequence[str]) -> str:
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
