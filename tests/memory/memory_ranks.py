"""Plans on GPT models, run inside rank processes."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.journal import Journal
from mindspeed.memory.megatron import install, layers_of, sites_of
from mindspeed.memory.plan import Action, Plan
from mindspeed.testing import saved_for_backward
from tests.support import gpt_ranks


def _step(model: torch.nn.Module) -> dict[str, Any]:
    """Loss, gradients, and the random states afterwards."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    get_moe_layer_wise_logging_tracker().clear()
    random.model_parallel_cuda_manual_seed(123)
    torch.manual_seed(5)
    with saved_for_backward(model) as saved:
        tokens, positions, labels = gpt_ranks.batch()
        loss = model(tokens, positions, None, labels=labels)
        kept, host, dropped = saved.live_bytes, saved.live_host_bytes, saved.dropped_bytes
    loss.sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    losses = {
        name: entry["values"].clone()
        for name, entry in get_moe_layer_wise_logging_tracker().items()
    }
    states = {**random.get_cuda_rng_tracker().get_states(), "default": torch.get_rng_state()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {
        "results": {"loss": loss.detach(), **grads, **losses, **states, **buffers},
        "bytes": (kept, host, dropped, saved.live_bytes, saved.live_host_bytes),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not equal bit for bit."""
    if one.keys() != other.keys():
        return [f"keys {sorted(one.keys() ^ other.keys())}"]
    return [
        name
        for name, value in one.items()
        if (value is None) != (other[name] is None)
        or (value is not None and not torch.equal(value, other[name]))
    ]


def under_plans(
    name: str, spec: str, plans: dict[str, dict[str, str]], overrides: dict[str, Any]
) -> dict[str, Any]:
    """Bytes of each plan (the same sites in all layers), and what differs from no plan."""
    import torch.distributed as dist

    size = dist.get_world_size()
    gpt_ranks.start(size)
    cfg = gpt_ranks.config(name, tensor_model_parallel_size=size, **overrides)
    model = gpt_ranks.build(cfg, spec)
    plain = _step(model)
    found: dict[str, Any] = {"no plan": plain["bytes"]}
    for title, sites in plans.items():
        journal = Journal()
        actions = {site: Action(action) for site, action in sites.items()}
        layers = layers_of(model)
        plan = Plan(
            {
                path: {site: act for site, act in actions.items() if site in sites_of(layer)}
                for path, layer in layers.items()
            }
        )
        runtime = install(model, plan, journal, min_bytes=0)
        ours = _step(model)
        figures = runtime.figures.total()
        journal.undo()
        found[title] = {
            "differ": differences(ours["results"], plain["results"]),
            "bytes": ours["bytes"],
            "figures": figures,
            "planned": sum(len(sites) for sites in plan.layers.values()),
        }
    found["again"] = differences(_step(model)["results"], plain["results"])
    return found
