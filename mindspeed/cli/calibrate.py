"""Measure this machine for the planner: matrix products, copies, attention, collectives.

    mindspeed calibrate --out machine.json                             one device, no links
    torchrun --nproc-per-node 8 -m mindspeed calibrate --base h100 --out machine.json
    mindspeed plan --cluster machine.json -- ...
    torchrun --nproc-per-node 8 -m mindspeed calibrate --coc coc.json -- JOB
    torchrun --nproc-per-node 8 -m mindspeed calibrate --experts experts.json -- JOB

Runs alone or on all ranks of a job, which a launcher starts. Collectives are timed at five sizes
inside nodes and between them. Every figure is a median with its spread; what could not be measured
stays that of --base, and the file says so. `mindspeed plan --cluster` reads the result.

--coc times the products of a job whose flags stand behind --, whole, in 2, 4 and 8 parts and fused,
and writes the settings of --coc-cfgs. --experts times its layer of experts by every program, for
`mindspeed moe plan --measured`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mindspeed.errors import ConfigError
from mindspeed.ranges import ABOVE_ZERO, MAX_SIZE, number, whole

if TYPE_CHECKING:
    from mindspeed.planner.cluster import Cluster
    from mindspeed.planner.cluster.calibrate import CalibrationSettings
    from mindspeed.planner.cluster.measured_device import Stopwatch
    from mindspeed.planner.measured_products import Measured

HELP = "measure devices and links of this machine for mindspeed plan --cluster"

SMALL, LARGE = 512, 8192  # matrices on the host's cores, on an accelerator
FIELDS = (
    "memory_gib",
    "memory_gbs",
    "launch_us",
    "cores",
    "gemm_efficiency",
    "attention_efficiency",
    "memory_efficiency",
    "host_gbs",
)
SMALL_MESSAGE, LARGE_MESSAGE = 1 << 20, 1 << 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="cluster file to write, .json")
    add(
        "--coc",
        type=Path,
        metavar="FILE",
        help="settings to write, .json: the job behind -- has its products measured in parts and "
        "fused",
    )
    add(
        "--experts",
        type=Path,
        metavar="FILE",
        help="times to write, .json: the job behind -- has its layer of experts measured by every "
        "program",
    )
    add("--name", metavar="NAME", help="of the cluster (default: that of the file)")
    add(
        "--base",
        metavar="NAME",
        help="preset or file of this hardware: its peaks stay and efficiencies are measured "
        "(default: peaks are the fastest products; what is not measured is that of generic)",
    )
    add(
        "--dtypes",
        default="bf16,fp32",
        metavar="NAMES",
        help="of products, separated by commas; attention has the first",
    )
    add(
        "--largest",
        type=whole(8, 1 << 16),
        metavar="N",
        help=f"rows of the largest matrix, tokens of attention (default: {LARGE}, on the CPU "
        f"{SMALL})",
    )
    add(
        "--largest-message",
        type=whole(4096, MAX_SIZE),
        metavar="BYTES",
        help=f"of collectives (default: {LARGE_MESSAGE}, on the CPU {SMALL_MESSAGE})",
    )
    add(
        "--node-size",
        type=whole(1),
        metavar="N",
        help="ranks of a node (default: those that the launcher started on this host)",
    )
    add("--samples", type=whole(3, 1000), default=7, metavar="N", help="per figure")
    add(
        "--sample-seconds",
        type=number(ABOVE_ZERO),
        default=0.01,
        metavar="S",
        help="that a sample lasts at least",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and write the cluster file on rank 0."""
    from mindspeed import device
    from mindspeed.files import check_path
    from mindspeed.planner.cluster import one_kind
    from mindspeed.planner.cluster.calibrate import CalibrationSettings
    from mindspeed.planner.cluster.measured_device import NAMES

    paths = {"--out": args.out, "--coc": args.coc, "--experts": args.experts}
    given = [path for path in paths.values() if path is not None]
    if not given:
        raise ConfigError(
            "give --out FILE for a cluster, --coc FILE for the products of a job, or --experts FILE"
        )
    for flag, path in paths.items():
        if path is not None and path.suffix != ".json":
            raise ConfigError(f"{flag} {path}: the file must end in .json")
        if path is not None:
            check_path(path, "output")
    base = one_kind(args.base or "generic", "mindspeed calibrate")
    dtypes = tuple(args.dtypes.split(","))
    for name in dtypes:
        if name not in NAMES:
            raise ConfigError(f"--dtypes {name}: allowed are {', '.join(sorted(NAMES))}")
    host = device.current().on_host
    settings = CalibrationSettings(
        name=args.name or given[0].stem,
        dtypes=dtypes,
        largest=args.largest or (SMALL if host else LARGE),
        largest_message=args.largest_message or (SMALL_MESSAGE if host else LARGE_MESSAGE),
        node_size=args.node_size,
        samples=args.samples,
        seconds=args.sample_seconds,
    )
    _measure(settings, base, args)
    return 0


def _measure(settings: CalibrationSettings, base: Cluster, args: argparse.Namespace) -> None:
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.files import atomic_write_text
    from mindspeed.planner.cluster.calibrate import calibrate, watch_of
    from mindspeed.training.fail_together import stop_together
    from mindspeed.training.setup import join_job, leave_job

    with stop_together("calibrate"):
        # Products need a tensor-parallel group of the job only, experts its groups.
        ranks = int(os.environ.get("WORLD_SIZE", "1")) if args.experts else None
        job = job_of(args.flags, ranks) if args.coc or args.experts else None
        join_job()
        if args.out:
            cluster = calibrate(settings, base, keep_peak=args.base is not None)
            if int(os.environ["RANK"]) == 0:
                atomic_write_text(args.out, json.dumps(cluster.to_json(), indent=2) + "\n")
                _print(cluster, args.out)
        if job is not None and args.coc:
            measure_products(job, args, watch_of(settings))
        if job is not None and args.experts:
            measure_experts(job, args, watch_of(settings))
        leave_job()


def _print(cluster: Cluster, out: Path) -> None:
    """The figures with their sources."""
    found, console = cluster.device, Console(highlight=False)
    table = Table(title=f"{cluster.name}: {found.name}", title_justify="left")
    for heading in ("figure", "value", "source"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    peaks = ", ".join(f"{name} {value:.4g}" for name, value in sorted(found.peak_tflops.items()))
    rows: list[tuple[str, str, str]] = [("peak, TFLOP/s", peaks, "peak_tflops")]
    for field in FIELDS:
        rows.append((field, f"{getattr(found, field):.4g}", field))
    for name, value, field in rows:
        table.add_row(name, value, found.source.get(field, ""))
    for level in cluster.levels:
        name = f"{level.name}, {level.size or 'all'} devices"
        value = f"{level.bytes_per_second / 1e9:.4g} GB/s, {level.latency_us:.3g} us"
        table.add_row(name, value, level.source)
    for name in ("collective_us", "overlap_slowdown"):
        value = f"{getattr(cluster, name):.4g}"
        table.add_row(name, value, cluster.source.get(name, ""))
    console.print(table)
    if cluster.note:
        console.print(cluster.note)
    console.print(f"written: {out}")


def job_of(words: Sequence[str], ranks: int | None) -> argparse.Namespace:
    """Final values of the job behind ``--``, without what is chosen by measuring.

    Args:
        words: its flags.
        ranks: of the job; None: as few as its flags allow.

    Raises:
        ConfigError: no job is given, or it cannot start.
    """
    from mindspeed.features.registry import all_features
    from mindspeed.flags import flags_of
    from mindspeed.planner.job import Job

    if not words:
        raise ConfigError("--coc and --experts measure a job: give its flags behind --")
    (chosen_later,) = (flags_of(feature) for feature in all_features() if feature.name == "coc")
    return Job(words).settings({one.name: None for one in chosen_later}, ranks).args


def measure_products(job: argparse.Namespace, args: argparse.Namespace, watch: Stopwatch) -> None:
    """Measure the products of a job on the ranks of this process's job, and write the file.

    Args:
        job: final values.
        args: flags of the command.
        watch: times a function on all ranks.

    Raises:
        ConfigError: the ranks are no whole tensor-parallel groups.
    """
    from mindspeed import device
    from mindspeed.job import Parallel, Precision
    from mindspeed.planner import measured_products as products
    from mindspeed.tensor_parallel.strategy import MeasuredOn

    found = products.products_of(job)
    ranks, world = Parallel.of(job).tensor, dist.get_world_size()
    if world % ranks:
        raise ConfigError(
            f"--coc: {world} ranks are no whole tensor-parallel groups of {ranks}; start as many "
            f"with torchrun --nproc-per-node {ranks} -m mindspeed calibrate"
        )
    groups = [dist.new_group(range(first, first + ranks)) for first in range(0, world, ranks)]
    group = groups[dist.get_rank() // ranks]
    where = MeasuredOn(device.current().properties().name, Precision.of(job).name, ranks)
    measured = products.measure(found, where.dtype, group, watch)
    if dist.get_rank() == 0:
        settings = products.settings_of(measured, where)
        products.write(args.coc, settings)
        _print_products(measured, where.device)
        flags = products.flags_of(settings, measured, args.coc)
        print(f"written: {args.coc}")
        print(f"train with {flags}" if flags else "whole products are fastest: train without CoC")


def _print_products(measured: Sequence[Measured], device: str) -> None:
    ways = list(dict.fromkeys(way for one in measured for way in one.seconds))
    table = Table(title=f"microseconds on {device}", title_justify="left")
    table.add_column("product")
    for way in ways:
        table.add_column("whole" if way == 1 else str(way), justify="right")
    for one in measured:
        cells = [
            f"{one.seconds[way] * 1e6:.1f}{' *' if way == one.best else ''}"
            if way in one.seconds
            else ""
            for way in ways
        ]
        table.add_row(str(one.product), *cells)
    Console(highlight=False).print(table)


def measure_experts(job: argparse.Namespace, args: argparse.Namespace, watch: Stopwatch) -> None:
    """Measure the programs of a job's layer of experts, and write the file.

    Args:
        job: final values.
        args: flags of the command.
        watch: times a function on all ranks.
    """
    from mindspeed.moe.comparison import ENTRIES
    from mindspeed.planner import megatron_experts as experts
    from mindspeed.training.setup import parallel_groups, seed_everything

    experts.sizes_of(job)  # refused before groups are made
    parallel_groups(job)
    seed_everything(job)
    found = experts.measure(job, watch)
    if dist.get_rank() == 0:
        experts.write(args.experts, found)
        best = min(found.seconds, key=lambda name: found.seconds[name])
        for name, seconds in sorted(found.seconds.items(), key=lambda one: one[1]):
            print(f"{seconds * 1e3:10.3f} ms  {name}: {ENTRIES[name].flags}")
        print(f"written: {args.experts}; fastest on {found.device}: {ENTRIES[best].flags}")
