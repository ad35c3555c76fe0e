"""Where a rank's bytes, FLOPs, messages and seconds are: by layer and outside of layers.

    for part in parts(settings.args, load_cluster("h100"), rank=0):
        part.name, part.kept, part.flops, part.sent

One step with as few micro-batches as the schedule allows runs on FakeTensors, timed by the model of
:mod:`mindspeed.planner.timed_step`; figures are of one micro-batch. Layers that are alike in every
figure are put together.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mindspeed.built_model import TrainedModel
from mindspeed.planner.cluster import Cluster
from mindspeed.testing.live_memory import LiveMemory
from mindspeed.training.modelled_costs import NANOSECOND, Costs, by_layer, joined_names
from mindspeed.training.modelled_step import fewest_micro_batches


@dataclass(frozen=True)
class Part:
    """A layer, or what is outside of layers, for one micro-batch.

    Attributes:
        name: such as ``chunk 0, layers 1-10``.
        count: layers with these figures.
        parameters: entries of one of them on this rank.
        kept: bytes that its forward keeps for its backward.
        flops: executed, by phase: ``backward``, ``forward``, ``recompute``.
        calls: collectives.
        sent: bytes that this rank sends, by collective.
        seconds: modelled, of computation.
        exposed: modelled, in which the rank waits for communication.
    """

    name: str
    count: int
    parameters: int
    kept: int
    flops: tuple[tuple[str, float], ...]
    calls: float
    sent: tuple[tuple[str, float], ...]
    seconds: float
    exposed: float


def parts(args: argparse.Namespace, cluster: Cluster, rank: int = 0) -> tuple[Part, ...]:
    """The parts of a rank of the job, in the order in which they first run.

    Args:
        args: final values, of a dry run; their features are attached.
        cluster: rates of devices and links.
        rank: global rank.
    """
    from mindspeed.planner.balanced_routing import assumed_routing
    from mindspeed.planner.fake_world import fake_world
    from mindspeed.planner.values import PlannedTensors

    args = copy.copy(args)
    with fake_world(args, rank), PlannedTensors(), assumed_routing(args, 1.0):
        return _parts_here(args, cluster)


def _parts_here(args: argparse.Namespace, cluster: Cluster) -> tuple[Part, ...]:
    from mindspeed.planner.rates import DeviceRates
    from mindspeed.planner.scopes import parts_named
    from mindspeed.planner.step_of_rank import StepOfRank
    from mindspeed.testing.clock import VirtualClock

    memory = LiveMemory()
    with memory:
        step = StepOfRank(args, memory, fewest_micro_batches(args))
        step.run()  # a second step is like all later ones
        kept: dict[str, int] = {}
        clock = VirtualClock.of(DeviceRates(cluster))
        with parts_named(clock, step.model), _kept_noted(memory, step.model, kept), clock:
            step.run()
    parameters = _parameters(step.model)
    costs = by_layer(one for one in clock.intervals if one.scope)
    found: dict[tuple[str, Part], list[str]] = defaultdict(list)
    for name, phases in costs.items():
        one = _part(phases, step.micro_batches, parameters.get(name, 0), kept.get(name, 0))
        found[name.rpartition(" ")[0], one].append(name)
    return tuple(
        replace(one, name=joined_names(names), count=len(names))
        for (_, one), names in found.items()
    )


def _part(phases: Mapping[str, Costs], micro_batches: int, parameters: int, kept: int) -> Part:
    """Of one layer; equal for layers that are alike."""
    sent, flops = Counter[str](), dict[str, float]()
    for phase, costs in phases.items():
        flops[phase] = costs.flops / micro_batches
        sent.update(costs.sent)
    return Part(
        "",
        1,
        parameters,
        kept,
        tuple(sorted((phase, value) for phase, value in flops.items() if value)),
        sum(costs.calls.total() for costs in phases.values()) / micro_batches,
        tuple(sorted((op, value / micro_batches) for op, value in sent.items() if value)),
        _rounded(sum(costs.computing for costs in phases.values()) / micro_batches),
        _rounded(sum(costs.exposed for costs in phases.values()) / micro_batches),
    )


def _rounded(seconds: float) -> float:
    return round(seconds / NANOSECOND) * NANOSECOND


def _parameters(model: TrainedModel) -> dict[str, int]:
    """Entries by scope."""
    from mindspeed.planner.scopes import named_layers

    found: dict[str, int] = {}
    for index, chunk in enumerate(model.chunks):
        layers = {scope: _entries(layer) for scope, layer in named_layers(chunk, index)}
        found |= layers | {f"chunk {index}": _entries(chunk) - sum(layers.values())}
    return found


def _entries(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _kept_noted(memory: LiveMemory, model: TrainedModel, kept: dict[str, int]) -> Iterator[None]:
    """Note how many bytes are alive after each first forward that were not before it."""
    from mindspeed.planner.scopes import named_layers

    handles: list[Any] = []
    before: dict[str, int] = {}

    def watch(module: Any, scope: str) -> None:
        def enter(module: Any, args: Any) -> None:
            before.setdefault(scope, memory.total)

        def leave(module: Any, args: Any, output: Any) -> None:
            kept.setdefault(scope, memory.total - before[scope])

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))

    try:
        for index, chunk in enumerate(model.chunks):
            layers = dict(named_layers(chunk, index))
            for scope, layer in layers.items():
                watch(layer, scope)
            watch(chunk, f"chunk {index}")
        yield
    finally:
        for handle in handles:
            handle.remove()
    for index in range(len(model.chunks)):
        own = f"chunk {index}"
        kept[own] -= sum(kept[scope] for scope in kept if scope.startswith(f"{own}, "))
