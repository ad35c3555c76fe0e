"""``mindspeed pipeline search``: layers, recomputation and schedule for a measured profile.

    mindspeed pipeline search --profile automated_pipeline.profile.json --out plan.json
    mindspeed pipeline search --profile P.json --out plan.json --mode perf

The profile is what a start with ``--automated-pipeline`` wrote. The result is what later starts
read (``--automated-pipeline-file``), and its flags are printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed.errors import ConfigError
from mindspeed.pipeline.automated.profile import MODULES, read_profile
from mindspeed.pipeline.automated.result import write_result
from mindspeed.pipeline.automated.search import search
from mindspeed.pipeline.automated.stages import Price
from mindspeed.ranges import Range, number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the action ``search``."""
    add = parser.add_argument_group("search").add_argument
    add("--profile", type=Path, metavar="FILE", help="what a start measured")
    add("--out", type=Path, metavar="FILE", help="result, for --automated-pipeline-file")
    add("--mode", choices=["memory", "perf"], default="memory", help="(default: memory)")
    ratio = number(Range(0, 1, above=True))
    add("--save-memory-ratio", type=ratio, default=0.2, metavar="R", help="(default: 0.2)")
    add(
        "--recompute-type",
        choices=range(len(MODULES)),
        type=int,
        default=2,
        help="0 MLP, 1 attention, 2 layer (default: 2)",
    )
    add(
        "--memory",
        type=number(Range(0, 1e9, above=True)),
        metavar="GIB",
        help="of a rank, instead of a part of what the default needs",
    )


def run(args: argparse.Namespace) -> int:
    """Search and write the result."""
    for name in ("profile", "out"):
        if getattr(args, name) is None:
            raise ConfigError(f"mindspeed pipeline search: --{name} is missing")
    profile = read_profile(args.profile)
    found = search(
        profile,
        args.mode,
        ratio=args.save_memory_ratio,
        module=MODULES[args.recompute_type],
        memory_limit=None if args.memory is None else args.memory * 2**30,
    )
    result = write_result(args.out, found, profile.job)
    print(f"before  {_row(found.before)}\nafter   {_row(found.after)}")
    print(f"flags   {' '.join(result.flags())}\nwrote {args.out}")
    return 0


def _row(price: Price) -> str:
    return (
        f"{1e3 * price.makespan:12,.3f} ms {price.peak / 2**20:12,.1f} MiB on the fullest rank "
        f"{100 * price.bubble:6.1f} % bubble"
    )
