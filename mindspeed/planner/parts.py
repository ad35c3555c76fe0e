"""Where a rank's bytes, FLOPs, messages and seconds are: by layer and outside of layers.

    for part in parts(settings.args, load_cluster("h100"), rank=0):
        part.name, part.kept, part.flops, part.sent

One step with as few micro-batches as the schedule allows runs on FakeTensors, timed by the model of
:mod:`mindspeed.planner.timed_step`. Figures of layers are of one micro-batch; those of gradients,
of the optimizer and of the messages of data-parallel groups are of a step, however many
micro-batches it has. Layers that are alike in every figure are put together.

A layer keeps its input and what it makes for its backward, not its output: that is the input of
what comes next. So figures of a chunk add up to what one more micro-batch in flight takes.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed.built_model import TrainedModel, unwrap
from mindspeed.planner.cluster import Cluster
from mindspeed.testing.clock import Interval
from mindspeed.testing.live_memory import LiveMemory
from mindspeed.training.modelled_costs import NANOSECOND, Costs, by_layer, joined_names
from mindspeed.training.modelled_step import fewest_micro_batches

_SENT_ON = "sent on"


@dataclass(frozen=True)
class Part:
    """A layer, or what is outside of layers.

    Attributes:
        name: such as ``chunk 0, layers 1-10``.
        count: layers with these figures.
        of_step: figures are of a step; else of one micro-batch.
        parameters: entries of one of them on this rank.
        kept: bytes that its forward keeps for its backward, its input among them; None: nothing
            is, or it is not known because the schedule does not call its forward.
        flops: executed, by phase: ``backward``, ``forward``, ``recompute``.
        calls: collectives.
        sent: bytes that this rank sends, by collective.
        seconds: modelled, of computation.
        exposed: modelled, in which the rank waits for communication.
    """

    name: str
    count: int
    of_step: bool
    parameters: int
    kept: int | None
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
        with parts_named(clock, step.model), kept_noted(memory, step.model, kept), clock:
            step.run()
    parameters = _parameters(step.model)
    sharded = bool(args.use_megatron_fsdp)
    costs = by_layer(_placed(one, sharded) for one in clock.intervals if one.scope)
    found: dict[tuple[str, Part], list[str]] = defaultdict(list)
    for name, phases in costs.items():
        batches = step.micro_batches if name.startswith("chunk") else None
        one = _part(phases, batches, parameters.get(name, 0), kept.get(name))
        found[name.rpartition(" ")[0], one].append(name)
    return tuple(
        replace(one, name=joined_names(names), count=len(names))
        for (_, one), names in found.items()
    )


def _placed(one: Interval, sharded: bool) -> Interval:
    """With its messages of data-parallel groups, once a step, outside of layers.

    Args:
        one: interval of the clock.
        sharded: parameters are gathered for every micro-batch.
    """
    from mindspeed.planner.scopes import GRADIENTS, OPTIMIZER, chunk_of

    message = one.communication
    if message is None or one.kind != "communication" or sharded or chunk_of(one.scope) is None:
        return one
    if "DATA_PARALLEL" not in message.description:
        return one
    gathers = "gather" in message.op  # --overlap-param-gather
    return replace(one, scope=OPTIMIZER if gathers else GRADIENTS)


def _part(
    phases: Mapping[str, Costs], micro_batches: int | None, parameters: int, kept: int | None
) -> Part:
    """Of one layer, or of a step where there is no number of micro-batches."""
    sent, flops, batches = Counter[str](), dict[str, float](), micro_batches or 1
    for phase, costs in phases.items():
        flops[phase] = costs.flops / batches
        sent.update(costs.sent)
    return Part(
        "",
        1,
        micro_batches is None,
        parameters,
        kept,
        tuple(sorted((phase, value) for phase, value in flops.items() if value)),
        sum(costs.calls.total() for costs in phases.values()) / batches,
        tuple(sorted((op, value / batches) for op, value in sent.items() if value)),
        _rounded(sum(costs.computing for costs in phases.values()) / batches),
        _rounded(sum(costs.exposed for costs in phases.values()) / batches),
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
def kept_noted(memory: LiveMemory, model: TrainedModel, kept: dict[str, int]) -> Iterator[None]:
    """Note what of the first forward of each chunk is alive after it.

    Args:
        memory: counts.
        model: whose forwards run.
        kept: is filled, bytes by scope (:mod:`mindspeed.planner.scopes`).
    """
    from mindspeed.planner.scopes import named_layers

    handles: list[Any] = []
    try:
        for index, chunk in enumerate(model.chunks):
            handles += _Kept(memory, chunk, f"chunk {index}", kept).handles(
                dict(named_layers(chunk, index))
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Kept:
    """Notes what the first forward of a chunk keeps, as kinds of memory."""

    memory: LiveMemory
    chunk: Any
    own: str
    kept: dict[str, int]
    before: str | None = None  # kind outside of the chunk, while its first forward runs
    done: bool = False

    def handles(self, layers: Mapping[str, torch.nn.Module]) -> list[Any]:
        """Hooks of the chunk and its layers, by scope."""
        handles: list[Any] = []

        def enter(module: Any, args: Any) -> None:
            if not self.done:
                self.before, self.memory.kind = self.memory.kind, self.own

        def leave(module: Any, args: Any, output: Any) -> None:
            if self.before is None:
                return
            self.memory.kind, self.before, self.done = self.before, None, True
            if isinstance(output, torch.Tensor):
                self._sent_on(output)
            self.kept.update({scope: self.memory.now[scope] for scope in (*layers, self.own)})

        handles.append(self.chunk.register_forward_pre_hook(enter))
        for scope, layer in layers.items():
            handles += self._of_layer(scope, layer)
        handles.append(self.chunk.register_forward_hook(leave))
        return handles

    def _of_layer(self, scope: str, layer: torch.nn.Module) -> list[Any]:
        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.before is not None:
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                self.memory.claim(hidden, scope)
                self.memory.kind = scope

        def leave(module: Any, args: Any, output: Any) -> None:
            if self.before is not None:
                hidden = output[0] if isinstance(output, tuple) else output
                self.memory.claim(hidden, self.own)
                self.memory.kind = self.own

        return [
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave),
        ]

    def _sent_on(self, output: torch.Tensor) -> None:
        """Hidden states [s, b, h] that the next rank gets are dropped here."""
        (model,) = unwrap([self.chunk])
        if not model.post_process:
            self.memory.claim(output, _SENT_ON)
