"""Convert weights between Hugging Face and Megatron, and between Megatron's formats and layouts.

mindspeed convert --input Qwen3-8B --output CHECKPOINTS                     for any layout
mindspeed convert --input Qwen3-8B --output LEGACY --format torch --tp 2    one file per rank
mindspeed convert --input LEGACY --output NEW --format torch --tp 4 --pp 2  another layout
mindspeed convert --input CHECKPOINTS --output NEW_DIR --to hf              for transformers

The format of --input is detected from its files: a Hugging Face directory, or the latest checkpoint
in torch_dist, legacy (mp_rank_XX, also DeepSpeed's) or safetensors format. One tensor is in memory
at a time (one file of a torch_dist checkpoint); the output appears only when it is complete.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.ranges import ABOVE_ZERO, MAX_RANKS, MAX_SIZE, number, whole

if TYPE_CHECKING:
    from mindspeed.checkpoint.weights.convert import Format, Target

HELP = "convert weights between Hugging Face and Megatron"
_DTYPES = ("fp32", "bf16", "fp16")
_MEGATRON = ("torch_dist", "torch", "deepspeed", "safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", required=True, metavar="DIR", help="directory to convert")
    add("--output", required=True, metavar="DIR", help="directory to write")
    add(
        "--to",
        choices=("hf", "megatron"),
        help="default: megatron if --input has a config.json or --format is given, otherwise hf",
    )
    add_common_arguments(parser)
    _add_megatron_arguments(parser.add_argument_group("to Megatron"))


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options shared with ``mindspeed export``."""
    add = parser.add_argument
    add("--dtype", choices=_DTYPES, help="dtype of the weights (default: as read)")
    add("--verify", action="store_true", help="read the output back and compare every byte")
    add(
        "--added-token-num",
        type=whole(0, 10_000_000),
        default=0,
        metavar="N",
        help="extend the vocabulary by N tokens, set to the mean of the others",
    )
    add("--ckpt-step", type=whole(0), help="iteration (default: the latest)")
    add(
        "--hf-config-dir",
        metavar="DIR",
        help="Hugging Face directory that identifies the model of a checkpoint; its other config "
        "keys, tokenizer and generation settings are copied to an exported model",
    )
    add(
        "--max-shard-size",
        type=number(ABOVE_ZERO),
        metavar="GB",
        help="maximum size of a file (default: 5; torch_dist: 1)",
    )


def _add_megatron_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--format",
        "--ckpt-format",
        choices=_MEGATRON,
        help="torch: legacy, one file per rank; deepspeed: the same with DeepSpeed's file names; "
        "safetensors: full tensors with Megatron's names (default: torch_dist)",
    )
    add(
        "--mtp-num-layers",
        type=whole(0, 100_000),
        metavar="N",
        help="convert N multi-token prediction layers of a Hugging Face model (default: none)",
    )
    layout = (
        ("--tp", "--tensor-model-parallel-size", "tensor-parallel size"),
        ("--pp", "--pipeline-model-parallel-size", "pipeline-parallel size"),
        ("--vpp", "--num-virtual-stages-per-pipeline-rank", "virtual pipeline stages per rank"),
        ("--ep", "--expert-model-parallel-size", "expert-parallel size"),
    )
    for short, long, text in layout:
        text += "; legacy formats"
        add(short, long, type=whole(1, MAX_RANKS), default=1, metavar="N", help=text)
    add(
        "--layers-per-stage",
        type=_numbers,
        metavar="N,N,...",
        help="layers of each pipeline stage, if not equal; legacy formats",
    )
    add(
        "--moe-grouped-gemm",
        action="store_true",
        help="weights for grouped experts; legacy formats with transformer_engine",
    )
    add(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        help="layer spec (default: as read; transformer_engine for a Hugging Face model)",
    )
    add(
        "--make-vocab-size-divisible-by",
        type=whole(1, MAX_SIZE),
        metavar="N",
        help="pad the vocabulary to a multiple of N times --tp (default: as read, or 128)",
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def run(args: argparse.Namespace) -> int:
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.checkpoint.weights.convert import Target
    from mindspeed.errors import ConfigError
    from mindspeed.models.parallel_sizes import ParallelSizes

    from_hf = (Path(args.input) / "config.json").is_file()
    to_hf = args.to == "hf" or not (args.to or args.format or from_hf)
    form: Format = "hf" if to_hf else args.format or "torch_dist"
    layout = ParallelSizes(args.tp, args.pp, args.vpp, args.ep, args.layers_per_stage)
    if layout != ParallelSizes() and form not in ("torch", "deepspeed"):
        raise ConfigError(
            "--tp, --pp, --vpp, --ep and --layers-per-stage are for --format torch and deepspeed; "
            f"{form} loads into any layout, so leave them out"
        )
    target = Target(
        form,
        layout,
        transformer_impl=args.transformer_impl,
        grouped=args.moe_grouped_gemm,
        vocab_multiple=args.make_vocab_size_divisible_by or (128 if from_hf else None),
        **common_values(args),
    )
    return convert(args, target)


def common_values(args: argparse.Namespace) -> dict[str, Any]:
    """The shared options as fields of a target."""
    from mindspeed.errors import ConfigError
    from mindspeed.training.flag_types import DTYPES

    if args.added_token_num < 0:
        raise ConfigError(f"--added-token-num {args.added_token_num} is negative")
    return {
        "dtype": DTYPES[args.dtype] if args.dtype else None,
        "added_tokens": args.added_token_num,
        "like": args.hf_config_dir,
        "max_file_bytes": int(args.max_shard_size * 1e9) if args.max_shard_size else None,
        "progress": sys.stderr.isatty(),
    }


def convert(args: argparse.Namespace, target: Target) -> int:
    """Convert and print what was written."""
    from mindspeed.checkpoint.weights import convert as formats

    source = formats.open_weights(
        args.input,
        step=args.ckpt_step,
        like=args.hf_config_dir,
        mtp_num_layers=getattr(args, "mtp_num_layers", None),
    )
    if source.unused:
        print(f"not part of the model: {', '.join(source.unused)}")
    written = formats.convert(source, args.output, target)
    if args.verify:
        count = formats.verify(written, args.output, like=args.hf_config_dir)
        print(f"verified {count} parameters byte for byte")
    if target.format == "hf":
        family = written.family
        print(f"wrote {args.output} as {family.name} ({family.architecture})")
        if family.has_mtp and not written.shape["mtp"]:
            print("the model has no layer of multi-token prediction: num_nextn_predict_layers is 0")
    else:
        print(f"wrote {Path(args.output) / 'release'}; load it with --load {args.output}")
    return 0
