"""``mindspeed calibrate --coc FILE --experts FILE -- JOB``: the fastest ways, measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mindspeed.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed.planner.measured_products import Measured, Watch


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


def measure_products(job: argparse.Namespace, args: argparse.Namespace, watch: Watch) -> None:
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
    from mindspeed.tensor_parallel.coc_settings import MeasuredOn

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
        _print(measured, where.device)
        flags = products.flags_of(settings, measured, args.coc)
        print(f"written: {args.coc}")
        print(f"train with {flags}" if flags else "whole products are fastest: train without CoC")


def _print(measured: Sequence[Measured], device: str) -> None:
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


def measure_experts(job: argparse.Namespace, args: argparse.Namespace, watch: Watch) -> None:
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
