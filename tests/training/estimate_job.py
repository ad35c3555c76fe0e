"""Bytes that a tiny model really keeps for its backward pass, compared with the estimate."""

from __future__ import annotations

import os
from typing import Any

from tests.support.trainer_job import TINY

FUSED = "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --bias-swiglu-fusion "
FUSED += "--rope-fusion --bias-dropout-fusion --transformer-impl transformer_engine --bf16"


def measured_and_estimated(cases: dict[str, str]) -> dict[str, Any]:
    """For every case: bytes measured and estimated; entries of adapters, and theirs and bytes."""
    from mindspeed.training import setup

    estimated = {name: _estimated(flags) for name, flags in cases.items()}
    found = {}
    for name, flags in cases.items():
        args = _prepared(flags)
        if not found:
            setup.initialize(args)
        found[name] = estimated[name] | _measured(args)
    return found


def measured(flags: str) -> float:
    """Bytes that the model of this rank of a job keeps."""
    from mindspeed.training import setup

    args = _prepared(flags)
    setup.initialize(args)
    return float(_measured(args)["measured"])


def estimated(flags: str, ranks: int) -> float:
    """Bytes that the model of a rank keeps, by formula."""
    from mindspeed.training.estimate import estimate

    return estimate(_prepared(f"{flags} --dry-run", ranks)).activations


def _prepared(flags: str, ranks: int | None = None) -> Any:
    from mindspeed.training.initialize import prepare

    words = [*TINY, *FUSED.split(), "--num-layers", "2", *flags.split()]
    if "--multi-latent-attention" in words:
        at = words.index("--num-query-groups")
        del words[at : at + 2]
        words.remove("--use-fused-rotary-pos-emb")  # latent attention has an embedding of its own
    return prepare(words, ranks or int(os.environ["WORLD_SIZE"])).args


def _estimated(flags: str) -> dict[str, Any]:
    from mindspeed.training.estimate import estimate

    args = _prepared(flags)
    figures = estimate(args)
    targets, args.lora_target_modules = args.lora_target_modules, ()
    bare = estimate(args)
    args.lora_target_modules = targets
    tokens = args.micro_batch_size * args.seq_length
    return {
        "estimated": figures.activations,
        "again": tokens * _computed_again(args),
        "estimated adapters": (
            figures.parameters - bare.parameters,
            figures.weights - bare.weights,
        ),
    }


def _measured(args: Any) -> dict[str, Any]:
    import torch

    from mindspeed.instruments import saved_for_backward
    from mindspeed.lora import LoraConfig, attach
    from mindspeed.training.configs import transformer_config
    from mindspeed.training.model import build_modules, gpt_model

    (model,) = build_modules(args, transformer_config(args), gpt_model)
    config = LoraConfig.from_args(args)
    base = sum(parameter.numel() for parameter in model.parameters())
    if config is not None:
        attach([model], config)
    shape = (args.micro_batch_size, args.seq_length)
    tokens = torch.randint(900, shape)
    with saved_for_backward(model) as saved:
        model(tokens, torch.arange(shape[1]).expand(shape), None, labels=tokens)
    return {
        "measured": saved.bytes,
        "adapters": sum(parameter.numel() for parameter in model.parameters()) - base,
    }


def _computed_again(args: Any) -> float:
    """Bytes of one token that the backward of one layer makes anew."""
    from mindspeed.training.activations import layer_bytes, policy_of

    if not args.num_experts:
        return 0.0
    kept = layer_bytes(args, experts=True, policy=policy_of(args, 0))
    return layer_bytes(args, experts=True) - kept


def activations(cases: dict[str, str]) -> dict[str, tuple[float, int]]:
    """For every case: bytes by formula, and those of the inputs of all layers."""
    from mindspeed.training.estimate import estimate
    from mindspeed.training.initialize import prepare

    found = {}
    for name, flags in cases.items():
        args = prepare([*TINY, *FUSED.split(), "--dry-run", *flags.split()], 1).args
        inputs = 2 * args.num_layers * args.hidden_size * args.seq_length * args.micro_batch_size
        found[name] = estimate(args).activations, inputs
    return found
