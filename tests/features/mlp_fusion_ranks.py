"""The MLP of Megatron's layers, and two linear layers in the place of its first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn.functional import silu

from mindspeed.instruments import CommLedger
from mindspeed.te.linear_communication import LinearCommunication
from mindspeed.te.linear_function import linear
from tests.support import gpt_ranks


def both_mlps() -> dict[str, Any]:
    """Collectives of the first linear layer, and how far gradients of the two MLPs are apart."""
    import mindspeed

    mindspeed.configure(mlp_layer_fusion=True)
    gpt_ranks.start(2)
    return {
        f"{spec}-{name}": _compare(spec, sequence_parallel)
        for spec in ("te", "local")
        for name, sequence_parallel in (("tp", False), ("sp", True))
    }


def _compare(spec: str, sequence_parallel: bool) -> dict[str, Any]:
    config = gpt_ranks.config(
        "rmsnorm-swiglu-gqa", tensor_model_parallel_size=2, sequence_parallel=sequence_parallel
    )
    mlp = gpt_ranks.build(config, spec).decoder.layers[0].mlp.double()
    weight = mlp.linear_fc1.weight
    found: dict[str, Any] = {"outputs": weight.shape[0]}
    x = torch.randn(4, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gradients = {}
    for name, first in {"one": mlp.linear_fc1, "two": _Two(mlp.linear_fc1)}.items():
        leaf = x.clone().requires_grad_()
        with CommLedger() as ledger:
            gate, up = first(leaf)[0].chunk(2, -1)
            (silu(gate) * up).square().sum().backward()
        found[name] = dict(Counter((event.phase, event.op) for event in ledger.events))
        gradients[name] = (leaf.grad, weight.grad.clone())
        weight.grad = None
    pairs = zip(*gradients.values(), strict=True)
    found["apart"] = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    return found


class _Two:
    """Gate and up projection one after the other, with the weight of the fused layer."""

    def __init__(self, fused: Any) -> None:
        self._fused = fused
        self._how = LinearCommunication(fused.tp_group, "column", fused.sequence_parallel)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        norm = getattr(self._fused, "layer_norm_weight", None)
        if norm is not None:
            x = torch.nn.functional.rms_norm(x, x.shape[-1:], norm, 1e-5)
        parts = self._fused.weight.chunk(2)
        return torch.cat([linear(x, part, None, self._how) for part in parts], -1), None
