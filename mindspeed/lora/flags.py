"""``--lora-*`` flags of a run: what follows from them, and what contradicts them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from mindspeed.built_model import unwrap
from mindspeed.errors import CheckpointError, ConfigError, MindSpeedError
from mindspeed.job import Precision, Sharding
from mindspeed.lora import peft
from mindspeed.lora.attach import attach
from mindspeed.lora.config import LoraConfig
from mindspeed.lora.hf_names import saved_modules
from mindspeed.lora.load import config_of, config_of_peft, is_peft
from mindspeed.models.families import family_or_gpt
from mindspeed.models.hf_load import is_hf
from mindspeed.models.shape import shape_of
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
        config = adapters_of(args)
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


def adapters_of(args: argparse.Namespace) -> LoraConfig | None:
    """The adapters of ``--lora-*`` flags; None without such flags.

    Args:
        args: flags; those of a checkpoint may lack some.
    """
    value = lambda name, default: getattr(args, f"lora_{name}", default)  # noqa: E731
    targets, saved = value("target_modules", ()), value("modules_to_save", ())
    if not targets and not saved:
        return None
    return LoraConfig(
        target_modules=tuple(targets or ()),
        r=args.lora_r,
        alpha=args.lora_alpha,
        dropout=args.lora_dropout,
        modules_to_save=tuple(saved or ()),
        init=args.lora_init,
        use_rslora=args.lora_use_rslora,
        use_dora=bool(value("use_dora", False)),
        use_bias=bool(value("use_bias", False)),
        ensure_weight_tying=bool(value("ensure_weight_tying", False)),
        adapter_name=args.lora_adapter_name,
        base_weights=getattr(args, "base_weights", None) or "",
        double_quantization=bool(getattr(args, "double_quantization", True)),
        forward_hooks=tuple(args.lora_register_forward_hook or ()),
        seed=args.seed,
    )


def attach_by_flags(chunks: Iterable[Any], args: argparse.Namespace) -> None:
    """Attach the adapters of ``--lora-*`` flags, if there are any; those of ``--lora-load``, too.

    Args:
        chunks: This rank's pipeline stages, wrapped for precision or not.
        args: Final values.

    Raises:
        CheckpointError: The adapter can only be merged, or belongs to another model.
    """
    config, modules = config_by_flags(args), unwrap(chunks)
    if config is None:
        return
    if args.lora_load and is_peft(args.lora_load):
        with _disable_current_modes():  # of a planned job, whose tensors have no values
            described = config_of_peft(peft.read(args.lora_load), modules)
        saved = described.modules_to_save
        config = replace(config, modules=described.modules, modules_to_save=saved)
    elif args.lora_load:
        config = replace(config, modules=config_of(args.lora_load).modules)
    attach(modules, config)


def config_by_flags(args: argparse.Namespace) -> LoraConfig | None:
    """The adapters of flags; modules that are trained whole by Megatron's names."""
    config = adapters_of(args)
    if config is None or not config.modules_to_save:
        return config
    try:
        names = saved_modules(config.modules_to_save, family_or_gpt(args), shape_of(args))
    except CheckpointError as error:
        raise ConfigError(f"--lora-modules-to-save: {error}") from None
    return replace(config, modules_to_save=names)


def base_model(args: argparse.Namespace) -> str:
    """Name or directory of the model under the adapters, from a checkpoint's record."""
    return getattr(args, "model", None) or (args.load or "").removeprefix("hf:")
