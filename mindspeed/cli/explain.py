"""Explain a training job on one page: where its bytes, FLOPs, messages and seconds are.

    mindspeed explain --cluster h100 -- --model llama3-8b --bf16 --nproc 8 --seq-length 8192

For every pipeline rank the bytes by kind, the FLOPs and what it sends; for its layers the same of
one micro-batch; where the time of a step goes; and the three changes that would help most, each
with the figures that are predicted for the changed job, which fits. Takes all flags of ``mindspeed
pretrain``, or a script of Megatron-LM and its flags. No device is needed.

    mindspeed explain --timeline --cluster h100 --plot step.png -- --model llama3-8b ...

shows one step of one rank instead, as a modelled clock sees it: by layer and phase what it sends,
computes and waits for, with communication in its real order.

The status is 0, also for a job that does not fit, or 130 after Ctrl-C and 143 after SIGTERM,
which print what was found until then.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from mindspeed.cli.plan import add_job_arguments, read
from mindspeed.cli.plan_check import memory_limit
from mindspeed.cli.plan_interrupt import interruptible
from mindspeed.cli.plan_program import job_of, launch_words
from mindspeed.cli.plan_progress import named_progress
from mindspeed.errors import ConfigError
from mindspeed.ranges import MAX_COUNT, MAX_RANKS, HelpFormatter, Parser, whole

HELP = "explain a job: where bytes, FLOPs, messages and bubbles are, and what would help"
PASS_THROUGH = True


def run(argv: Sequence[str]) -> int:
    """Run the command; flags that are not its own are those of ``mindspeed pretrain``."""
    parser = Parser(
        "mindspeed explain",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        epilog="All other flags are those of mindspeed pretrain.",
    )
    add_arguments(parser)
    own, flags = read(parser, argv)
    if own.cluster is None:
        raise ConfigError(
            "--cluster is missing: times need a preset (generic, a100, h100, ...) or FILE.json"
        )
    if own.timeline:
        from mindspeed.cli import explain_timeline

        explain_timeline.check(own)
    else:
        _refuse_without_timeline(own)
    limit, origin = memory_limit(own)
    assert limit is not None
    job = job_of(flags)
    args = job.settings(None, own.devices).args
    from mindspeed.cli.explain_text import Commands, as_data, print_page
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.explain import explain
    from mindspeed.planner.layout import layout_of

    cluster = load_cluster(own.cluster)
    if own.timeline:
        explain_timeline.run_timeline(own, args, cluster)
        return 0
    with interruptible() as stop, named_progress() as tell:
        found = explain(job, args, cluster, limit, jobs=own.jobs, cache=own.cache, progress=tell)
    launch = launch_words(None, own.cluster, args.world_size)
    commands = Commands(job, flags, layout_of(args), launch)
    if own.json:
        print(json.dumps(as_data(args, found, commands), indent=2))
    else:
        print_page(args, found, cluster, origin, commands)
    return stop.status if found.interrupted else 0


def _refuse_without_timeline(own: argparse.Namespace) -> None:
    for name in ("stage", "micro_batches", "plot", "trace"):
        if getattr(own, name):
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --timeline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command alone."""
    add_job_arguments(parser)
    add = parser.add_argument
    add("--devices", type=whole(1, MAX_RANKS), metavar="N", help="ranks (default: --nproc)")
    add("--cache", type=Path, metavar="DIR", help="of counts, for later calls and searches")
    add("--timeline", action="store_true", help="show one step of a rank, layer by layer")
    add(
        "--stage",
        type=whole(0),
        default=0,
        metavar="N",
        help="of --timeline: pipeline stage whose first rank is shown, counted from 0",
    )
    add(
        "--micro-batches",
        type=whole(1, MAX_COUNT),
        metavar="N",
        help="of --timeline: micro-batches of the step (default: 1; with virtual stages one for "
        "each rank of the pipeline, in a V-shape two)",
    )
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="of --timeline: draw it, .png, .svg or .pdf",
    )
    add("--trace", type=Path, metavar="FILE", help="of --timeline: for chrome://tracing, .json")
