"""The real layer under the event log and the virtual clock, with the routing that it chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.moe import layer_ranks

FLOPS, BYTES, LATENCY = 1e9, 1e7, 1e-4
# So slow that any stage hides any communication, but not the few bytes of the glue between stages.
SLOW = {"flops_per_second": 1e6, "memory_bytes_per_second": 1e6}


@dataclass
class Watched:
    """One forward and backward on one rank."""

    log: Any
    intervals: list[Any]  # of the clock
    now: float
    hidden: Any  # intervals of a second run, where computing takes long
    choices: list[list[list[int]]]  # experts of every token of every rank
    rank: int


def watch(
    spec: str,
    layout: dict[str, int],
    overrides: dict[str, Any],
    variants: list[dict[str, Any]],
    tokens: int = layer_ranks.TOKENS,
) -> list[Watched]:
    """Run a layer once for each variant of ``LayerRequest``; arguments are those of ``compare``."""
    from mindspeed.journal import Journal
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change

    layer_ranks.start(**layout)
    parallel = {
        "expert_model_parallel_size": layout.get("expert", 1),
        "tensor_model_parallel_size": layout.get("tensor", 1),
        "expert_tensor_parallel_size": layout.get("expert_tensor", 1),
        "sequence_parallel": layout.get("tensor", 1) > 1,
    }
    layer = layer_ranks.layer_of(spec, **parallel, **overrides)
    found = []
    for changes in variants:
        journal = Journal()
        change(layer, journal, **changes)
        layer.forward.log = EventLog()
        found.append(_watched(layer, tokens))
        journal.undo()
    return found


def watch_bounded(
    layout: dict[str, int], variants: list[dict[str, Any]], symmetric: bool
) -> tuple[list[Watched], list[int]]:
    """Run a layer whose sizes stay on the device, and the rows of each call of the emulator."""
    from mindspeed.moe.symmetric_memory import SymmetricMemory
    from tests.moe import symmetric_emulator

    if not symmetric:
        return watch("te", layout, {}, variants), []
    with symmetric_emulator.emulated():
        by_rows = [{**one, "row_exchange": SymmetricMemory()} for one in variants]
        return watch("te", layout, {}, by_rows), list(symmetric_emulator.ROWS)


def watch_megatrons(
    layout: dict[str, int], variants: list[dict[str, Any]], tokens: int = layer_ranks.TOKENS
) -> list[Watched]:
    """Run Megatron's own layer once for each variant of its configuration."""
    layer_ranks.start(**layout)
    found = []
    for overrides in variants:
        layer = layer_ranks.layer_of("te", **layer_ranks.parallel_of(layout), **overrides)
        layer.forward = _Logged(layer.forward)
        found.append(_watched(layer, tokens))
    return found


def watch_chunks(
    layout: dict[str, int], overrides: dict[str, Any], degree: int
) -> tuple[Any, list[list[Any]], int]:
    """Run a transformer layer in chunks: its log, the experts of [chunk][rank], and this rank."""
    import torch.distributed as dist

    from mindspeed.journal import Journal
    from mindspeed.moe.ampipe.megatron import attach
    from mindspeed.moe.events import EventLog
    from tests.moe import ampipe_ranks

    layer_ranks.start(**layout)
    layer = ampipe_ranks.transformer_layer("te", **layer_ranks.parallel_of(layout), **overrides)
    attach(layer, degree, Journal())
    layer.forward.log = EventLog()
    routed: list[Any] = []
    layer.mlp.router.register_forward_hook(lambda module, given, out: routed.append(out[1]))
    ampipe_ranks.run(layer)
    own = [[row.nonzero().flatten().tolist() for row in chunk] for chunk in routed]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return layer.forward.log, [list(chunk) for chunk in zip(*every, strict=True)], dist.get_rank()


@dataclass
class _Logged:
    """A forward whose log stays empty."""

    run: Any
    log: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _watched(layer: Any, tokens: int) -> Watched:
    import torch.distributed as dist

    from mindspeed.instruments.clock import Link, VirtualClock

    routed: list[torch.Tensor] = []
    hook = layer.router.register_forward_hook(lambda module, given, out: routed.append(out[1]))
    link = Link(BYTES, LATENCY)
    with VirtualClock(FLOPS, link) as clock:
        layer_ranks.run(layer, tokens=tokens)
    hook.remove()
    log, layer.forward.log = layer.forward.log, None
    with VirtualClock(link=link, **SLOW) as slow:
        slow._compute = _without_copies(slow._compute)
        layer_ranks.run(layer, tokens=tokens)
    own = [row.nonzero().flatten().tolist() for row in routed[0]]
    choices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(choices, own)
    return Watched(log, clock.intervals, clock.now, slow.intervals, choices, dist.get_rank())


def _without_copies(compute: Any) -> Any:
    """Copies in place belong to a collective: they bring its result where it was asked for."""

    def chosen(name: str, call: Any) -> None:
        if call.func._schema.name != "aten::copy_":
            compute(name, call)

    return chosen
