"""What each candidate plan of a layer costs, found by trying it.

A layer is called once under every candidate (:mod:`mindspeed.memory.candidates`): the runtime
counts what autograd would keep, drop and copy, and the second runs that backward would ask for are
timed. The tensors of a trial are freed before the next, so trials need the memory of one layer.

With real tensors the clock is that of the device; with FakeTensors the roofline model is: each
operator takes as long as its FLOPs at the peak rate, or its bytes at the bandwidth of the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mindspeed.device import Device
from mindspeed.device.wrapped_tensors import any_wraps
from mindspeed.instruments.flops import formula_of
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


@dataclass(frozen=True)
class Rates:
    """Rates of a device per second: FLOPs of its widest 16-bit format, bytes of its memory."""

    flops: float
    bandwidth: float


_RATES = {  # data sheets, dense
    "H200": Rates(989e12, 4.8e12),
    "H100": Rates(989e12, 3.35e12),
    "A100": Rates(312e12, 2.0e12),
    "910B": Rates(376e12, 1.6e12),
}
_OTHER = Rates(100e12, 1e12)  # only proportions matter where nothing is copied to the host


def rates_of(device: Device) -> Rates:
    """Rates by the device's name; its own peak rate if it tells it."""
    properties = device.properties()
    rates = next((known for name, known in _RATES.items() if name in properties.name), _OTHER)
    return Rates(properties.peak_flops or rates.flops, rates.bandwidth)


class _Roofline(TorchDispatchMode):
    """Adds up the seconds of every operator."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self._rates, self.seconds = rates, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any_wraps(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        computes = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
        if not computes or getattr(func, "is_view", False):
            return result
        leaves = tree_leaves((args, kwargs, result))
        moved = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        count = formula_of(getattr(func, "overloadpacket", None))
        flops = count(*args, **kwargs, out_val=result) if count is not None else 0
        self.seconds += max(flops / self._rates.flops, moved / self._rates.bandwidth)
        return result


def roofline_clock(rates: Rates) -> Clock:
    """Seconds by the roofline model, for FakeTensors and devices without a clock."""

    def seconds(run: Callable[[], object]) -> float:
        with _Roofline(rates) as mode:
            run()
        return mode.seconds

    return seconds
