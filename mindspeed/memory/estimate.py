"""What each candidate plan of a layer costs, found by trying it.

A layer is called once under every candidate (:mod:`mindspeed.memory.candidates`): the runtime
counts what autograd would keep, drop and copy, and the second runs that backward would ask for are
timed. The tensors of a trial are freed before the next, so trials need the memory of one layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mindspeed.device import Device
from mindspeed.memory.plan import LayerPlan
from mindspeed.memory.runtime import Runtime
from mindspeed.memory.segment import Segment

Clock = Callable[[Callable[[], object]], float]
"""Runs a function; returns its seconds."""


@dataclass(frozen=True)
class Cost:
    """Cost of one call of a layer under one plan.

    Attributes:
        kept: bytes kept on the device that exist for no other reason.
        transient: bytes that exist while the layer is in backward: the largest second run, and
            what is fetched from the host.
        host: bytes of copies in host memory.
        seconds: of all second runs.
    """

    kept: int
    transient: int
    host: int
    seconds: float


def try_plan(
    runtime: Runtime, layer: str, call: Callable[[], object], plan: LayerPlan, clock: Clock
) -> Cost:
    """Call a layer once under ``plan``."""
    key = object()
    with runtime.trial(layer, plan) as figures, runtime.microbatch(key):
        outputs = call()
        segments = runtime.pending(key)
        seconds = clock(lambda: _materialize(segments)) if segments else 0.0
        del outputs
    rows = figures.by_layer().get(layer, {}).values()
    host = sum(row.host for row in rows)
    return Cost(
        kept=sum(row.kept for row in rows),
        transient=max((row.dropped for row in rows), default=0) + host,
        host=host,
        seconds=seconds,
    )


def _materialize(segments: list[Segment]) -> None:
    for segment in segments:
        segment.materialize()


def like_activations(arguments: Any) -> Any:
    """Arguments of a layer for a trial: the same values, apart from the graph they came from.

    As the output of a layer, a tensor with a gradient is no leaf.
    """

    def detached(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = tensor.detach().requires_grad_()
        return leaf.view_as(leaf)

    return tree_map_only(torch.Tensor, detached, arguments)


def device_clock(device: Device) -> Clock:
    """Wall time between two synchronisations of the device."""

    def seconds(run: Callable[[], object]) -> float:
        device.synchronize()
        start = time.perf_counter()
        run()
        device.synchronize()
        return time.perf_counter() - start

    return seconds
