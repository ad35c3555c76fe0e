"""``mindspeed profile --modelled``: bytes, calls, FLOPs and exposed communication of every layer.

    mindspeed profile --modelled --model llama-3-70b --tensor-model-parallel-size 8 \\
        --sequence-parallel --seq-length 8192 --link-bandwidth 200 --plot step.png

Takes all flags of ``mindspeed pretrain``. A step of one rank is executed on FakeTensors in its real
order, with every feature that is on, and timed by a model: no device is needed, and a model with 70
billion parameters takes seconds. It prints the rates and assumptions of the model, then the figures
by layer and phase. Traces of real steps: ``mindspeed pretrain --profile``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.cli.dry_run import settings_of
from mindspeed.errors import ConfigError
from mindspeed.ranges import (
    ABOVE_ZERO,
    MAX_COUNT,
    NOT_NEGATIVE,
    HelpFormatter,
    Parser,
    number,
    whole,
)

if TYPE_CHECKING:
    from mindspeed.training.modelled_step import Cluster, ModelledStep

HELP = "model a training step: bytes, calls, FLOPs and exposed communication by layer"
PASS_THROUGH = True


def run(argv: Sequence[str]) -> int:
    """Run the command; flags that are not its own are those of ``mindspeed pretrain``."""
    parser = _parser()
    own, flags = parser.parse_known_args(argv)
    if not own.modelled:
        raise ConfigError(
            "give --modelled: this command models a step; real steps are traced by "
            "`mindspeed pretrain --profile`"
        )
    _check(own)
    settings = settings_of(flags, "profile")
    stages = settings.args.pipeline_model_parallel_size
    if own.stage >= stages:
        raise ConfigError(f"--stage {own.stage}: there are stages 0 to {stages - 1}")
    from mindspeed.training import modelled_step

    cluster = _cluster(own)
    try:
        step = modelled_step.run(
            settings.args, cluster, stage=own.stage, micro_batches=own.micro_batches
        )
    except modelled_step.NotModelled as error:
        raise ConfigError(f"this job cannot be modelled: {error}") from error
    from mindspeed.cli.profile_table import print_figures

    print_figures(settings.args, cluster, own.stage, step)
    _write(own, cluster, step)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "mindspeed profile",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        epilog="All other flags are those of mindspeed pretrain.",
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command alone."""
    add = parser.add_argument
    rate, latency = number(ABOVE_ZERO), number(NOT_NEGATIVE)
    add("--modelled", action="store_true", help="time the step by a model; required")
    add("--tflops", type=rate, default=300.0, metavar="T", help="TFLOP/s of a device")
    add(
        "--link-bandwidth",
        type=rate,
        default=200.0,
        metavar="GB/s",
        help="gigabytes per second that a rank sends within a node",
    )
    add("--link-latency", type=latency, default=10.0, metavar="US", help="microseconds per call")
    add(
        "--network-bandwidth",
        type=rate,
        default=25.0,
        metavar="GB/s",
        help="gigabytes per second that a rank sends where a group spans nodes",
    )
    add("--network-latency", type=latency, default=20.0, metavar="US", help="microseconds per call")
    add("--node-size", type=whole(1), default=8, metavar="N", help="devices of a node")
    add("--stage", type=whole(0), default=0, metavar="N", help="pipeline stage, counted from 0")
    add(
        "--micro-batches",
        type=whole(1, MAX_COUNT),
        metavar="N",
        help="micro-batches of the step (default: 1; with virtual stages one for each rank of the "
        "pipeline, in a V-shape two)",
    )
    add("--plot", type=Path, metavar="FILE", help="timeline as a picture: .png, .svg or .pdf")
    add("--trace", type=Path, metavar="FILE", help="timeline for chrome://tracing, .json")


def _check(own: argparse.Namespace) -> None:
    from mindspeed.cli.training_plot import check_format, figure_class

    if own.plot is not None:
        check_format("--plot", own.plot)
        figure_class()
    if own.trace is not None and own.trace.suffix != ".json":
        raise ConfigError(f"--trace {own.trace}: the file must end in .json")


def _cluster(own: argparse.Namespace) -> Cluster:
    from mindspeed.instruments.clock import Link
    from mindspeed.training.modelled_step import Cluster

    return Cluster(
        flops_per_second=own.tflops * 1e12,
        link=Link(own.link_bandwidth * 1e9, own.link_latency * 1e-6),
        network=Link(own.network_bandwidth * 1e9, own.network_latency * 1e-6),
        node_size=own.node_size,
    )


def _write(own: argparse.Namespace, cluster: Cluster, step: ModelledStep) -> None:
    from mindspeed.cli.profile_table import rates
    from mindspeed.files import atomic_write_bytes

    title = f"modelled step: {rates(cluster)}"
    if own.plot is not None:
        from mindspeed.cli.profile_picture import draw

        draw(step, own.plot, title)
        print(f"wrote {own.plot}")
    if own.trace is not None:
        from mindspeed.training.modelled_costs import chrome_trace

        text = json.dumps(chrome_trace(step.intervals, title))
        atomic_write_bytes(own.trace, text.encode())
        print(f"wrote {own.trace}")
