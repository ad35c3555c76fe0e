"""The plans of a layer between which the solver chooses, and what each costs: found by trying it.

What is cheap to compute again per byte it frees comes apart: norms, activation functions, core
attention; then attention and MLP as wholes, and the layer. With offloading, attention and MLP may
also wait in host memory.

A layer is called once under every candidate: the runtime counts what autograd would keep, drop and
copy, and the second runs that backward would ask for are timed. The tensors of a trial are freed
before the next, so trials need the memory of one layer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mindspeed.device import Device
from mindspeed.memory.plan import LAYER, LayerPlan, SiteAction
from mindspeed.memory.runtime import Runtime
from mindspeed.memory.segment import Segment

Clock = Callable[[Callable[[], object]], float]
"""Runs a function; returns its seconds."""


@dataclass(frozen=True)
class PlanCost:
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
) -> PlanCost:
    """Call a layer once under ``plan``."""
    key = object()
    with runtime.trial(layer, plan) as figures, runtime.microbatch(key):
        outputs = call()
        segments = runtime.pending(key)
        seconds = clock(lambda: _materialize(segments)) if segments else 0.0
        del outputs
    rows = figures.by_layer().get(layer, {}).values()
    host = sum(row.host for row in rows)
    return PlanCost(
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


KEEP_ALL: LayerPlan = {LAYER: SiteAction.KEEP}
LEAST: LayerPlan = {LAYER: SiteAction.RECOMPUTE}
"""Keeps nothing but the layer's input: training is possible with it if it is at all."""
ALL_ON_HOST: LayerPlan = {LAYER: SiteAction.OFFLOAD}
_ATTENTION, _MLP = "self_attention", "mlp"
_NORMS = ("input_layernorm", "pre_mlp_layernorm")
_INSIDE_ATTENTION = f"{_ATTENTION}.core_attention"
_INSIDE_MLP = (f"{_MLP}.activation", f"{_MLP}.experts.activation")


def plans_for(sites: Collection[str], *, offload: bool, rescue: bool) -> list[LayerPlan]:
    """Candidate plans of a layer, at most 66; the first keeps everything, the last is LEAST."""
    wholes = [SiteAction.RECOMPUTE, SiteAction.OFFLOAD] if offload else [SiteAction.RECOMPUTE]
    inside = [(site, SiteAction.RECOMPUTE_OUTPUT) for site in _INSIDE_MLP]
    attention = [(_INSIDE_ATTENTION, SiteAction.RECOMPUTE), *((_ATTENTION, one) for one in wholes)]
    mlp = [*inside, *((_MLP, one) for one in wholes)]
    norms = [[(norm, SiteAction.RECOMPUTE_OUTPUT)] for norm in _NORMS]
    choices = [_optional(options, sites) for options in (attention, mlp, *norms)]
    found = [dict(filter(None, chosen)) for chosen in itertools.product(*choices)]
    extra = [ALL_ON_HOST] if offload or rescue else []
    return [KEEP_ALL, *found[1:], *extra, LEAST]


def name_of(plan: LayerPlan) -> str:
    """``recompute mlp + recompute_output input_layernorm``."""
    return " + ".join(f"{action.value} {site}" for site, action in sorted(plan.items()))


def _optional(
    options: Iterable[tuple[str, SiteAction]], sites: Collection[str]
) -> list[tuple[str, SiteAction] | None]:
    return [None, *(option for option in options if option[0] in sites)]
