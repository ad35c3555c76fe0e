"""What ranks do with a base model in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.lora import lora_ranks


def compared(folder: str, adapter: str, flags: Sequence[str], form: str) -> dict[str, Any]:
    """Losses and gradients of a quantised base, and of a plain model with its values.

    The plain model is built by the same flags without ``--base-weights``, and gets what the codes
    of this rank mean, so that both have the same collectives.
    """
    from mindspeed import lora
    from mindspeed.models.hf_load import load_hf
    from mindspeed.te.quantized_weight import QuantizedWeight
    from mindspeed.training.model import build

    args, model = lora_ranks.built(folder, [*flags, f"--base-weights={form}"])
    lora.load(model.chunks, adapter)
    found = lora_ranks.run(args, model), lora_ranks.parts(model)
    values, bits, weights = [], 0, 0
    for module in model.modules:
        for parameter in module.parameters():
            if isinstance(parameter, QuantizedWeight):
                values.append(parameter.dense(parameter.dtype))
                bits += 8 * sum(part.nbytes for part in parameter.parts)
                weights += parameter.numel()
    trained = sum(p.numel() for m in model.modules for p in m.parameters() if p.requires_grad)
    gradients = sum(buffer.numel for chunk in model.chunks for buffer in chunk.buffers)
    args.base_weights = None
    plain = build(args)
    load_hf(args, plain.modules, folder)
    lora.load(plain.chunks, adapter)
    given = iter(values)
    with torch.no_grad():
        for module, other in zip(plain.modules, model.modules, strict=True):
            for parameter, own in zip(module.parameters(), other.parameters(), strict=True):
                if isinstance(own, QuantizedWeight):
                    value = next(given)
                    error = (parameter - value).abs().max() / parameter.abs().max()
                    assert 0 < error < 0.15, error
                    parameter.copy_(value)
    expected = lora_ranks.run(args, plain), lora_ranks.parts(plain)
    return {
        "found": found,
        "expected": expected,
        "bits": bits / weights if weights else 0.0,
        "elements of gradients": gradients,
        "trained": trained,
    }


def configured(folder: str, flags: Sequence[str], size: int) -> None:
    """Check the flags of a job of ``size`` ranks, those of features, too."""
    from mindspeed import session

    session.install().configure(lora_ranks.resolved(folder, flags, size))


def inference_logits(folder: str, adapter: str, form: str | None = None) -> torch.Tensor:
    """Logits ``[b, s, v]`` of a model loaded for inference, with an adapter."""
    from mindspeed.inference.decoder import Decoder
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.parallel_groups import ModelParallelGroups

    stage = load_model(Source(f"hf:{folder}", lora=adapter, base_weights=form), 1).stage
    tokens, _ = lora_ranks.batch()
    decoder = Decoder(stage, ModelParallelGroups.of_megatron(), *tokens.shape)
    with torch.inference_mode():
        found = decoder.all_positions(tokens)
    assert found is not None
    return found[..., : lora_ranks.VOCAB]
