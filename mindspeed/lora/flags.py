"""``--lora-*`` flags of a run: what follows from them, and what contradicts them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator

from mindspeed.errors import MindSpeedError
from mindspeed.lora.config import LoraConfig
from mindspeed.lora.load import config_of
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
    "lora_init": "init",
}


def assume_targets(args: argparse.Namespace, given: Collection[str]) -> None:
    """Adapt all linear layers where the user has set an adapter's size and nothing it is for."""
    if {"lora_r", "lora_alpha"} & set(given) and not asked(args):
        args.lora_target_modules = ("all-linear",)


def complete(args: argparse.Namespace) -> Iterator[str]:
    """Fill in the flags of an adapter that is loaded; yields what cannot be."""
    try:
        if args.auto_resume and tracked(args.save or "") is not None and asked(args):
            args.lora_load, args.finetune = args.save, False
        if args.lora_load and not _asked_anew(args):
            described = config_of(args.lora_load)
            for flag, field in _DESCRIBED.items():
                setattr(args, flag, getattr(described, field))
        config = LoraConfig.from_args(args)
    except MindSpeedError as error:
        yield str(error)
        return
    if config is None:
        if args.lora_export:
            yield "--lora-export needs --lora-target-modules or --lora-load"
        return
    if args.load is None and not args.dry_run:
        yield "adapters change a trained model: name it with --load (or --load hf:DIR)"
    if args.load is not None and args.load == args.save:
        yield f"--save {args.save} is the base model of --load; give the adapter its own directory"
    if args.lora_export and args.save is None:
        yield "--lora-export needs --save"
    if indices_of(getattr(args, "noop_layers", None)):
        yield "--noop-layers cannot be combined with adapters: drop one"
    if args.fp8:
        yield "--fp8-format cannot be combined with adapters: drop one"


def asked(args: argparse.Namespace) -> bool:
    """Whether a run is to train adapters."""
    return bool(_asked_anew(args) or args.lora_load)


def _asked_anew(args: argparse.Namespace) -> bool:
    return bool(args.lora_target_modules or args.lora_modules_to_save)
