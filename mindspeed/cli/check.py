"""Check a job before it runs: does its parallel program compute the gradients of one rank?

    mindspeed check --types --model llama3-8b --bf16 --nproc 64 --tensor-model-parallel-size 8 \\
        --sequence-parallel --seq-length 4096 --micro-batch-size 1 --global-batch-size 64
    mindspeed check --types --devices 64 -- pretrain_gpt.py FLAGS

Builds the model of every pipeline stage as the job builds it, in one process each, without devices
and without the other ranks, and follows the types of its values through one forward pass: which are
equal on all ranks, which are parts, and whose gradients are summed. Takes all flags of ``mindspeed
pretrain``, or a script of Megatron-LM and its flags. The same check runs first in a training that
has --types among its flags.

The status is 0 if the program is accepted, 3 if a line uses a value wrongly, 1 if the job cannot
be checked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from mindspeed.cli.plan import job_parser, read
from mindspeed.cli.plan_run import job_of, progress
from mindspeed.errors import ConfigError
from mindspeed.processes import cores, no_collection
from mindspeed.ranges import MAX_RANKS, whole

HELP = "check before a run that every gradient is summed over the right ranks"
PASS_THROUGH = True
REFUSED = 3
"""Exit status."""


def run(argv: Sequence[str]) -> int:
    """Run the command; flags that are not its own are those of ``mindspeed pretrain``."""
    parser = job_parser("check", __doc__)
    add_arguments(parser)
    own, flags = read(parser, argv)
    if not own.types:
        raise ConfigError("say what to check: --types")
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    with no_collection():
        from mindspeed.type_check import check_types, require_package

        require_package()
        args = job_of(flags).settings(None, own.devices).args
    with progress("checking pipeline stages") as tell:
        verdict = check_types(args, own.jobs or cores(), tell)
    from mindspeed.type_check.report import as_data, describe

    print(json.dumps(as_data(args, verdict), indent=2) if own.json else describe(args, verdict))
    return 0 if verdict.wrong is None else REFUSED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--types", action="store_true", help="follow the types of gradients through the program")
    add("--devices", type=whole(1, MAX_RANKS), metavar="N", help="ranks of the job")
    add("--jobs", type=whole(1, 1024), metavar="N", help="processes (default: one for each core)")
    add("--json", action="store_true", help="print JSON")
