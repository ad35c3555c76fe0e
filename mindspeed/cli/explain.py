"""Explain a training job on one page: where its bytes, FLOPs, messages and seconds are.

    mindspeed explain --cluster h100 -- --model llama3-8b --bf16 --nproc 8 --seq-length 8192

For every pipeline rank the bytes by kind, the FLOPs and what it sends; for its layers the same of
one micro-batch; where the time of a step goes; and the three changes that would help most, each
with the figures that are predicted for the changed job, which fits. Takes all flags of ``mindspeed
pretrain``, or a script of Megatron-LM and its flags. No device is needed.

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
from mindspeed.ranges import MAX_RANKS, HelpFormatter, Parser, whole

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
    limit, origin = memory_limit(own)
    assert limit is not None
    job = job_of(flags)
    args = job.settings(None, own.devices).args
    from mindspeed.cli.explain_text import Commands, as_data, print_page
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.explain import explain
    from mindspeed.planner.layout import layout_of

    cluster = load_cluster(own.cluster)
    with interruptible() as stop, named_progress() as tell:
        found = explain(job, args, cluster, limit, jobs=own.jobs, cache=own.cache, progress=tell)
    launch = launch_words(None, own.cluster, args.world_size)
    commands = Commands(job, flags, layout_of(args), launch)
    if own.json:
        print(json.dumps(as_data(args, found, commands), indent=2))
    else:
        print_page(args, found, cluster, origin, commands)
    return stop.status if found.interrupted else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command alone."""
    add_job_arguments(parser)
    parser.add_argument(
        "--devices", type=whole(1, MAX_RANKS), metavar="N", help="ranks (default: --nproc)"
    )
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="of counts, for later calls and searches"
    )
