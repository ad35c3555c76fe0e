"""Convert weights between Hugging Face and Megatron.

mindspeed convert --input DIR_WITH_CONFIG_JSON --output CHECKPOINTS     to Megatron (torch_dist)
mindspeed convert --input CHECKPOINTS --output NEW_DIR                  to Hugging Face

A torch_dist checkpoint fits any tensor, pipeline, virtual pipeline and expert parallel size, so
none is asked for. One tensor is in memory at a time; nothing appears before everything is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "convert weights between Hugging Face and Megatron"
_DTYPES = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``mindspeed convert``."""
    parser.add_argument("--input", required=True, metavar="DIR", help="what to convert")
    parser.add_argument("--output", required=True, metavar="DIR", help="where to write")
    parser.add_argument(
        "--to", choices=("hf", "megatron"), help="default: megatron if --input has a config.json"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="type of the weights (default: as read)")
    to_megatron = parser.add_argument_group("to Megatron")
    to_megatron.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="layer spec; models with experts have other names in each",
    )
    to_megatron.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        help="pad the vocabulary to a multiple of this; times the tensor-parallel size to come",
    )
    add_export_arguments(parser.add_argument_group("to Hugging Face"))


def add_export_arguments(group: argparse._ArgumentGroup) -> None:
    """The options that ``mindspeed export`` has, too."""
    group.add_argument("--ckpt-step", type=int, help="iteration (default: the latest)")
    group.add_argument(
        "--hf-config-dir",
        metavar="DIR",
        help="directory whose further config keys, tokenizer and generation settings to copy",
    )
    group.add_argument(
        "--max-shard-size", type=float, default=5.0, metavar="GB", help="size of a file (default 5)"
    )


def run(args: argparse.Namespace) -> int:
    """Convert."""
    to = args.to or ("megatron" if (Path(args.input) / "config.json").is_file() else "hf")
    if to == "hf":
        return export(args.input, args)
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.checkpoint.hf import Target, import_hf
    from mindspeed.training.flag_types import DTYPES

    dtype = DTYPES[args.dtype] if args.dtype else None
    target = Target(args.transformer_impl, args.make_vocab_size_divisible_by, dtype)
    unused = import_hf(args.input, args.output, target)
    if unused:
        print(f"not part of the model: {', '.join(unused)}")
    print(f"wrote {Path(args.output) / 'release'}; load it with --load {args.output}")
    return 0


def export(checkpoints: str, args: argparse.Namespace) -> int:
    """Write the latest checkpoint of a run as a Hugging Face directory."""
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.checkpoint.hf import export_hf
    from mindspeed.checkpoint.load import latest, saved_args
    from mindspeed.training.flag_types import DTYPES

    family = export_hf(
        latest(checkpoints, args.ckpt_step),
        saved_args(checkpoints, args.ckpt_step),
        args.output,
        like=args.hf_config_dir,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        max_shard_bytes=int(args.max_shard_size * 1e9),
    )
    print(f"wrote {args.output} as {family.name} ({family.architecture})")
    return 0
