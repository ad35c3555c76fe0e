"""Bytes saved for backward, with the values copied and as views of the qkv projection."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.instruments import saved_for_backward
from mindspeed.te import core_attention
from tests.support import gpt_ranks


def kept(name: str, spec: str) -> dict[str, Any]:
    """Bytes as the library does it, and with the values left where they are; equal results."""
    gpt_ranks.start(1)
    plain = core_attention.own_value
    results = {}
    for kind in ("own", "view"):
        if kind == "view":
            core_attention.own_value = lambda q, k, v, config: v
        model = gpt_ranks.build(gpt_ranks.config(name), spec)
        tokens = torch.arange(gpt_ranks.BATCH * gpt_ranks.SEQUENCE) % gpt_ranks.VOCABULARY
        tokens = tokens.view(gpt_ranks.BATCH, gpt_ranks.SEQUENCE)
        positions = torch.arange(gpt_ranks.SEQUENCE).expand_as(tokens)
        with saved_for_backward(model) as saved:
            loss = model(tokens, positions, None, labels=tokens).sum()
        loss.backward()
        results[kind] = (saved.bytes, loss.item(), [p.grad for p in model.parameters()])
    core_attention.own_value = plain
    (own, loss, grads), (view, same_loss, same_grads) = results["own"], results["view"]
    equal = loss == same_loss and all(map(torch.equal, grads, same_grads))
    return {"own": own, "view": view, "equal": equal}
