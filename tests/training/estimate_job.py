"""Bytes that a tiny model really keeps for its backward pass, compared with the estimate."""

from __future__ import annotations

import os
from typing import Any

from tests.support.trainer_job import TINY

FUSED = "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --bias-swiglu-fusion "
FUSED += "--rope-fusion --bias-dropout-fusion --transformer-impl transformer_engine --bf16"


def measured_and_estimated(cases: dict[str, str]) -> dict[str, Any]:
    """For every case: bytes measured and estimated; entries of adapters, and theirs and bytes."""
    found, groups = {}, False
    for name, flags in cases.items():
        found[name] = _case(flags, join=not groups)
        groups = True
    return found


def _case(flags: str, *, join: bool) -> Any:
    import torch

    from mindspeed.lora import LoraConfig, attach
    from mindspeed.testing import saved_for_backward
    from mindspeed.training import setup
    from mindspeed.training.configs import transformer_config
    from mindspeed.training.estimate import estimate
    from mindspeed.training.initialize import prepare
    from mindspeed.training.model import build_modules, gpt_model

    words = [*TINY, *FUSED.split(), "--num-layers", "2", *flags.split()]
    if "--multi-latent-attention" in words:
        at = words.index("--num-query-groups")
        del words[at : at + 2]
        words.remove("--use-fused-rotary-pos-emb")  # latent attention has an embedding of its own
    args = prepare(words, int(os.environ["WORLD_SIZE"])).args
    if join:
        setup.initialize(args)
    (model,) = build_modules(args, transformer_config(args), gpt_model)
    config = LoraConfig.from_args(args)
    base = sum(parameter.numel() for parameter in model.parameters())
    if config is not None:
        attach([model], config)
    shape = (args.micro_batch_size, args.seq_length)
    tokens = torch.randint(900, shape)
    with saved_for_backward(model) as saved:
        model(tokens, torch.arange(shape[1]).expand(shape), None, labels=tokens)
    figures = estimate(args)
    targets, args.lora_target_modules = args.lora_target_modules, ()
    bare = estimate(args)
    args.lora_target_modules = targets
    return {
        "measured": saved.bytes,
        "estimated": figures.activations,
        "again": shape[0] * shape[1] * _computed_again(args),
        "adapters": sum(parameter.numel() for parameter in model.parameters()) - base,
        "estimated adapters": (
            figures.parameters - bare.parameters,
            figures.weights - bare.weights,
        ),
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
