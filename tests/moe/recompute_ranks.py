"""GPT models with experts that are computed again without the way back of their results."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch

from mindspeed.instruments import CommLedger, VirtualClock
from tests.memory.memory_ranks import differences
from tests.support import gpt_ranks
from tests.tensor_parallel import region_ranks

PEAK = 1e12


def compared(
    spec: str, flags: dict[str, Any], ways: dict[str, dict[str, Any]], overrides: dict[str, Any]
) -> dict[str, Any]:
    """What differs from a model that keeps everything, bytes, collectives and FLOPs.

    Args:
        spec: Of its layers.
        flags: Of the programs.
        ways: Arguments of recomputation by title.
        overrides: Options of the transformer config; ``hooked``: a module by path that has a
            forward hook.

    Returns:
        By title ``differ``; by phase ``calls``, ``sent`` (bytes of each all-to-all) and ``flops``.
    """
    options = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 2, **overrides}
    hooked = options.pop("hooked", None)
    _groups(options)
    found: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for title, values in {"kept": {}, **ways}.items():
        with region_ranks.configured({**flags, **values}) as arguments:
            torch.manual_seed(3)
            config = gpt_ranks.config("moe-grouped", **options, **arguments)
            model = gpt_ranks.build(config, spec)
            if hooked:
                model.get_submodule(hooked).register_forward_hook(lambda *args: None)
            ours, again = _step(model)
        plain = plain or ours
        found[title] = {"differ": differences(ours, plain), **again}
    return found


def _step(model: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed(123)
    torch.manual_seed(5)
    tokens, positions, labels = gpt_ranks.batch()
    with VirtualClock(PEAK, region_ranks.LINK) as clock, CommLedger() as ledger:
        loss = model(tokens, positions, None, labels=labels)
        loss.sum().backward()
    grads = {name: p.grad for name, p in gpt_ranks.weights_of(model).items()}
    states = {**random.get_cuda_rng_tracker().get_states(), "default": torch.get_rng_state()}
    calls, flops, sent = Counter[Any](), Counter[str](), defaultdict[str, list[int]](list)
    for event in ledger.events:
        calls[event.phase, event.op] += 1
        if event.op == "all_to_all":
            sent[event.phase].append(event.wire)
    for interval in clock.select("compute"):
        flops[interval.phase] += round(interval.seconds * PEAK)
    return {"loss": loss.detach(), **grads, **states}, {
        "calls": dict(calls), "sent": dict(sent), "flops": dict(flops)
    }  # fmt: skip


def _groups(options: dict[str, Any]) -> None:
    from megatron.core import parallel_state, tensor_parallel

    names = ("tensor_model_parallel_size", "expert_model_parallel_size")
    tensor, expert = (options[name] for name in names)
    parallel_state.initialize_model_parallel(
        tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=options.get("expert_tensor_parallel_size", 1),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(123)
