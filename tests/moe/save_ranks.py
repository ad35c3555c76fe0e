"""Bytes that one mixture-of-experts layer keeps for backward, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.moe import layer_ranks


def saved_bytes(
    spec: str,
    layout: dict[str, int],
    overrides: dict[str, Any],
    variants: Sequence[dict[str, Any] | None],
    tokens: int,
) -> tuple[list[int], list[list[str]]]:
    """Unique bytes kept beside parameters and the layer's input, and the events of each variant.

    Args:
        spec: "te" or "local".
        layout: Arguments of ``layer_ranks.start``.
        overrides: Of the transformer config.
        variants: Fields of ``LayerRequest`` each; None: Megatron's own forward.
        tokens: Of each rank.
    """
    import torch.distributed as dist

    from mindspeed.journal import Journal
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change
    from mindspeed.testing.saved import saved_for_backward

    layer_ranks.start(**layout)
    layer = layer_ranks.layer_of(spec, **_parallel(layout), **overrides)
    width = layer.config.hidden_size
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    x = torch.randn(tokens, 1, width, generator=generator).requires_grad_()
    kept, events = [], []
    for changes in variants:
        journal, log = Journal(), EventLog()
        if changes is not None:
            change(layer, journal, **changes)
            layer.forward.log = log
        with saved_for_backward(layer) as saved:
            output, _ = layer(x)
            kept.append(saved.live_bytes - x.nbytes)
            output.sum().backward()
            assert saved.live_bytes == 0, (changes, saved.by_site())
        events.append([str(event) for event in log.of("backward")])
        journal.undo()
    return kept, events


def _parallel(layout: dict[str, int]) -> dict[str, Any]:
    return {
        "expert_model_parallel_size": layout.get("expert", 1),
        "tensor_model_parallel_size": layout.get("tensor", 1),
        "expert_tensor_parallel_size": layout.get("expert_tensor", 1),
        "sequence_parallel": layout.get("tensor", 1) > 1,
    }
