"""A training of one rank whose collectives and dispatched rows are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def train(flags: Sequence[str]) -> dict:
    """Train; calls of collectives, and rows by layer and expert that dispatchers were given."""
    import torch
    import torch.distributed as dist
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from mindspeed.training.loop import Stopping
    from tests.training import matrix_job

    calls: Counter[str] = Counter()
    rows: dict[int, list[int]] = {}
    before = {name: getattr(dist, name) for name in OPERATIONS}
    route, reason = MoELayer.route, Stopping.reason

    def counted(name):
        def call(*args, **options):
            calls[name] += 1
            return before[name](*args, **options)

        return call

    def watched(layer, *args, **options):
        probs, routing_map = route(layer, *args, **options)
        if torch.is_grad_enabled():
            had = rows.get(layer.layer_number, [0] * routing_map.shape[1])
            found = routing_map.long().sum(0).tolist()
            rows[layer.layer_number] = [a + b for a, b in zip(had, found, strict=True)]
        return probs, routing_map

    try:
        MoELayer.route = watched
        Stopping.reason = lambda self: None  # ranks vote by the clock
        for name in OPERATIONS:
            setattr(dist, name, counted(name))
        matrix_job.train(flags)
    finally:
        MoELayer.route, Stopping.reason = route, reason
        for name, function in before.items():
            setattr(dist, name, function)
    return {"calls": dict(calls), "rows": rows}
