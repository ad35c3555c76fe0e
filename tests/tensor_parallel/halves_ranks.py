"""Models in two halves of a micro-batch, inside rank processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from mindspeed.instruments import CommLedger
from tests.support import gpt_ranks
from tests.tensor_parallel.region_ranks import configured

OFF: dict[str, Any] = {}
ON = {"half_batch_overlap": True}


def _results(model: torch.nn.Module, samples: int, passes: int, dropout: bool) -> dict[str, Any]:
    """Loss, gradients, and collectives by phase with their bytes."""
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed(123)
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(7)
    size = (passes, samples, gpt_ranks.SEQUENCE)
    tokens = torch.randint(gpt_ranks.VOCABULARY, size, generator=generator)
    positions = torch.arange(gpt_ranks.SEQUENCE).expand(size[1:])
    with CommLedger() as ledger:
        losses = [model(one, positions, None, labels=one.roll(-1, 1)) for one in tokens]
        for loss in losses:
            loss.mean().backward()
    grads = {name: p.grad for name, p in gpt_ranks.weights_of(model).items()}
    calls = Counter((event.phase, event.op) for event in ledger.events)
    return {
        "values": {"loss": torch.stack(losses).detach(), **grads},
        "calls": calls,
        "bytes": ledger.wire_bytes(),
    }


def compared(
    name: str, spec: str, overrides: dict[str, Any], more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Largest difference from a model that runs whole, and the collectives of both.

    Args:
        name: Of the model's configuration.
        spec: Of its layers.
        overrides: Options of the transformer config.
        more: ``samples`` of a micro-batch; ``passes``: forwards before their backwards; ``frozen``:
            parameters with this in their names are not trained.
    """
    import torch.distributed as dist

    more = more or {}
    gpt_ranks.start(dist.get_world_size())
    found = []
    for values in (OFF, ON):
        with configured(values):
            options = {"tensor_model_parallel_size": dist.get_world_size(), **overrides}
            model = gpt_ranks.build(gpt_ranks.config(name, **options), spec)
            for path, parameter in model.named_parameters():
                frozen = more.get("frozen")
                parameter.requires_grad_(not frozen or frozen not in path)
            found.append(_results(model, more.get("samples", 2), more.get("passes", 1), False))
    plain, ours = found
    return {
        "differ": differing(ours["values"], plain["values"]),
        "calls": [one["calls"] for one in found],
        "bytes": [one["bytes"] for one in found],
    }


def differing(ours: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """Names of tensors that differ by more than 1e-6 of the largest element, and how much."""
    found = {}
    for name, expected in plain.items():
        got = ours[name]
        if (got is None) != (expected is None):
            found[name] = float("nan")
        elif expected is not None:
            error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
            if not error <= 1e-6:
                found[name] = error
    return found
