"""``--lora-*`` flags of a run: what follows from them, and what contradicts them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator

from mindspeed.errors import MindSpeedError
from mindspeed.job import Precision, Sharding
from mindspeed.lora.config import LoraConfig
from mindspeed.lora.load import config_of
from mindspeed.models.hf_load import is_hf
from mindspeed.pipeline.noop_layers import indices_of
from mindspeed.storage.directory import tracked

# Flag of an adapter -> field of its description.
_DESCRIBED = {
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_r": "r",
    "lora_alpha": "alpha",
    "lora_use_rslora": "use_rslora",
    "lora_use_dora": "use_dora",
    "lora_use_bias": "use_bias",
    "lora_ensure_weight_tying": "ensure_weight_tying",
    "lora_init": "init",
}


def assume_targets(args: argparse.Namespace, given: Collection[str]) -> None:
    """Adapt all linear layers where the user has set an adapter's size and nothing it is for."""
    if {"lora_r", "lora_alpha"} & set(given) and not asked(args):
        args.lora_target_modules = ("all-linear",)


def complete(args: argparse.Namespace) -> Iterator[str]:
    """Fill in the flags of an adapter that is loaded; yields what cannot be."""
    load, save, export = args.load, args.save, args.lora_export
    try:
        if args.auto_resume and tracked(save or "") is not None and asked(args):
            args.lora_load, args.finetune = save, False
        if args.lora_load and not _asked_anew(args):
            described = config_of(args.lora_load)
            for flag, field in _DESCRIBED.items():
                setattr(args, flag, getattr(described, field))
            if described.base_weights:
                args.base_weights = described.base_weights
                args.double_quantization = described.double_quantization
        config = LoraConfig.from_args(args)
    except MindSpeedError as error:
        yield str(error)
        return
    weights = args.base_weights
    if config is None:
        if weights:
            yield (
                f"--base-weights {weights} stores weights that are frozen, and without "
                "adapters all are trained: add --lora-r 16, or drop it"
            )
        if export:
            yield "--lora-export needs --lora-target-modules or --lora-load"
        return
    if load is None and not args.dry_run:
        yield "adapters change a trained model: name it with --load (or --load hf:DIR)"
    if load is not None and load == save:
        yield f"--save {save} is the base model of --load; give the adapter its own directory"
    if export and save is None:
        yield "--lora-export needs --save"
    if indices_of(getattr(args, "noop_layers", None)):
        yield "--noop-layers cannot be combined with adapters: drop one"
    ratio = args.lora_plus_lr_ratio
    if ratio != 1 and {"embed_tokens", "word_embeddings"} & set(config.target_modules):
        yield (
            f"--lora-plus-lr-ratio {ratio:g}: embeddings have a learning rate of "
            "their own in LoRA+; leave out embed_tokens, or the ratio"
        )
    if weights:
        yield from _quantized(args, config)
    if Precision.of(args).products == "fp8":
        yield "--fp8-format cannot be combined with adapters: drop one"


def _quantized(args: argparse.Namespace, config: LoraConfig) -> Iterator[str]:
    """What a base model in fewer bits cannot have."""
    flag = f"--base-weights {config.base_weights}"
    yield from unquantizable(args)
    if Sharding.of(args).fsdp:
        yield f"{flag} cannot be sharded by Megatron-FSDP; use --zero-stage 1"
    if config.from_base:
        yield f"{flag} has no weights that --lora-init {config.init} could change; use kaiming"


def unquantizable(args: argparse.Namespace) -> Iterator[str]:
    """Why the weights of ``--load`` cannot be stored as ``--base-weights`` says."""
    flag, load = f"--base-weights {args.base_weights}", args.load
    if args.transformer_impl != "transformer_engine":
        yield f"{flag} needs the linear layers of --transformer-impl transformer_engine"
    if load is not None and not is_hf(load) and not args.dry_run:
        yield (
            f"{flag} is quantised one tensor at a time, and --load {load} is read whole; "
            "write it for Hugging Face first: mindspeed convert --format hf"
        )


def asked(args: argparse.Namespace) -> bool:
    """Whether a run is to train adapters."""
    return bool(_asked_anew(args) or args.lora_load)


def _asked_anew(args: argparse.Namespace) -> bool:
    return bool(args.lora_target_modules or args.lora_modules_to_save)
