"""Write a trained model for other programs.

mindspeed export --hf --load CHECKPOINTS --output DIR    for transformers: from_pretrained(DIR)
"""

from __future__ import annotations

import argparse

from mindspeed.cli.convert import add_common_arguments, common_values, convert

HELP = "write a trained model for transformers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hf", action="store_true", required=True, help="in Hugging Face format")
    add("--load", required=True, metavar="DIR", dest="input", help="directory of checkpoints")
    add("--output", required=True, metavar="DIR", help="directory to write; must not exist")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.checkpoint.weights.convert import Target

    return convert(args, Target("hf", **common_values(args)))
