"""Write a trained model for other programs.

mindspeed export --hf --load CHECKPOINTS --output DIR    for transformers: from_pretrained(DIR)
"""

from __future__ import annotations

import argparse

from mindspeed.cli.convert import add_export_arguments, export

HELP = "write a trained model for transformers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``mindspeed export``."""
    parser.add_argument("--hf", action="store_true", required=True, help="as Hugging Face has it")
    parser.add_argument("--load", required=True, metavar="DIR", help="directory of checkpoints")
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: as trained")
    add_export_arguments(parser.add_argument_group("details"))


def run(args: argparse.Namespace) -> int:
    """Export."""
    return export(args.load, args)
