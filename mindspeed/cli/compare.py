"""Where do two runs part? Compare recordings of trainings with other layouts, devices or flags.

    mindspeed pretrain FLAGS --record runs/a     # or any Megatron script with our import line
    mindspeed pretrain FLAGS --record runs/b --tensor-model-parallel-size 2
    mindspeed compare runs/a runs/b

Names the first tensor of B that differs from A's by more than rounding explains, and what enters
it. What rounding explains is measured where runs/a/noise-1 ... exist, recordings of the same run
with --record-noise 1 ...; else it is estimated. The exit status is 1 if a tensor differs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text

HELP = "find the first tensor in which two recorded trainings differ"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="DIR", help="A, the trusted run, and B")
    add(
        "--noise",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="recordings of A with --record-noise (default: noise-* in A)",
    )
    add("--json", type=Path, metavar="FILE", help="write all tensors as JSON")


def run(args: argparse.Namespace) -> int:
    """Compare two recordings; print the page."""
    if len(args.runs) != 2:
        raise ConfigError("give two recordings: mindspeed compare A B")
    from mindspeed.compare import page
    from mindspeed.compare.recording import read
    from mindspeed.compare.walk import compare

    a, b = map(read, args.runs)
    noise = args.noise if args.noise is not None else sorted(a.directory.glob("noise-*"))
    result = compare(a, b, [read(path) for path in noise])
    print("\n".join(page.lines(result, a, b)))
    if args.json:
        atomic_write_text(args.json, json.dumps(page.as_data(result), indent=1) + "\n")
    return 0 if result.equal else 1
