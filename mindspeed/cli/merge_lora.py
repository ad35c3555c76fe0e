"""Merge an adapter into its base model: W + (alpha / r) B A, in fp32, cast back.

mindspeed merge-lora --load CHECKPOINTS --lora-load ADAPTER --save MERGED
mindspeed merge-lora --load hf:Qwen3-8B --lora-load PEFT_DIR --save MERGED --format hf
mindspeed merge-lora --lora-load ADAPTER --save PEFT_DIR --format peft

--load accepts the formats of mindspeed convert, and hf:DIR; --lora-load accepts adapters of
mindspeed finetune and of the peft package. The result is an ordinary checkpoint. With --format peft
nothing is merged: the adapter is written for the peft package. One tensor is in memory at a time;
the output appears only when it is complete.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed.ranges import whole

HELP = "merge an adapter into its base model, or write it for peft"
_FORMATS = ("torch_dist", "hf", "torch", "safetensors", "peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--load", metavar="DIR", help="base model: checkpoints, or hf:DIR")
    add("--lora-load", required=True, metavar="DIR", help="adapter of mindspeed or PEFT")
    add("--save", required=True, metavar="DIR", help="directory to write; must not exist")
    add("--format", choices=_FORMATS, default="torch_dist", help="output format")
    add("--ckpt-step", type=whole(0), help="iteration of --load (default: the latest)")
    add(
        "--hf-config-dir",
        metavar="DIR",
        help="Hugging Face directory that identifies the model of --load; its tokenizer is copied "
        "with the result",
    )


def run(args: argparse.Namespace) -> int:
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.checkpoint.weights.convert import Target, convert, open_weights
    from mindspeed.errors import ConfigError
    from mindspeed.lora.export import export_peft
    from mindspeed.lora.load import iteration_of
    from mindspeed.lora.merge import Merged

    if args.format == "peft":
        export_peft(iteration_of(args.lora_load), args.save)
        print(
            f"wrote {args.save}; load it with peft.PeftModel.from_pretrained(base, {args.save!r})"
        )
        return 0
    if args.load is None:
        raise ConfigError("--load is missing: the base model that the adapter belongs to")
    folder = args.load.removeprefix("hf:")
    like = args.hf_config_dir or (folder if folder != args.load else None)
    source = open_weights(folder, step=args.ckpt_step, like=args.hf_config_dir)
    target = Target(
        args.format,
        vocab_multiple=128 if (Path(folder) / "config.json").is_file() else None,
        like=like,
        progress=sys.stderr.isatty(),
    )
    convert(Merged(source, args.lora_load), args.save, target)
    print(f"merged {args.lora_load} into {args.load}: {args.save}")
    return 0
