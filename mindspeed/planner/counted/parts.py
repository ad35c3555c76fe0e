"""Bytes, FLOPs, messages and seconds of the layers of a rank, and of the rest.

    for part in parts(settings.args, load_cluster("h100"), rank=0):
        part.name, part.kept, part.flops, part.sent

One step with the fewest micro-batches that the schedule allows runs on FakeTensors, timed by
:mod:`mindspeed.planner.counted.timed_step`. Figures of layers are per micro-batch. Figures of
gradients, of the optimizer and of data-parallel messages are per step. Layers with equal figures,
and times within 1 %, are grouped.

A layer keeps its input and the tensors saved for backward, but not its output, which is the input
of the next layer. So the bytes of a chunk add up to one micro-batch in flight.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mindspeed.built_model import TrainedModel, unwrap
from mindspeed.device.wrapped_tensors import held
from mindspeed.instruments.clock import TimedCall
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.pipeline.v_shape import flag_of
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.counted.layer_costs import NANOSECOND, Costs, by_layer, joined_names

NEAR = 0.01
"""Relative difference of times of grouped layers: those at the edges of a schedule differ."""


@dataclass(frozen=True)
class Part:
    """Equal layers, or a part of the step outside of layers.

    Attributes:
        name: such as ``chunk 0, layers 1-10``.
        count: number of layers with these figures.
        of_step: whether figures are per step; else per micro-batch.
        parameters: parameters of one layer on this rank.
        kept: bytes that its forward keeps for its backward, including its input; None: nothing, or
            unknown because the schedule does not call its forward.
        flops: executed FLOPs, by phase: ``backward``, ``forward``, ``recompute``.
        calls: number of collectives.
        sent: bytes that this rank sends, by collective.
        seconds: modelled seconds of computation.
        exposed: modelled seconds in which the rank waits for communication.
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


def parts(
    args: argparse.Namespace, cluster: Cluster, rank: int = 0, offsets: Sequence[int] = ()
) -> tuple[Part, ...]:
    """Count the parts of a rank of the job, in the order in which they first run.

    Args:
        args: final values, of a dry run; their features are attached.
        cluster: rates of devices and links.
        rank: global rank.
        offsets: added to the layer numbers of each of its chunks.
    """
    from mindspeed.planner.counted.balanced_routing import planned_rank

    with planned_rank(args, rank) as own:
        return _parts_here(own, cluster, offsets)


def _parts_here(
    args: argparse.Namespace, cluster: Cluster, offsets: Sequence[int]
) -> tuple[Part, ...]:
    from mindspeed.instruments.clock import VirtualClock
    from mindspeed.planner.cluster.rates import DeviceRates
    from mindspeed.planner.counted.loop import StepOfRank
    from mindspeed.planner.counted.timed_step import parts_named

    memory = LiveMemory()
    with memory:
        step = StepOfRank(args, memory, fewest_micro_batches(args))
        step.run()  # a second step is like all later ones
        kept: dict[str, int] = {}
        clock = VirtualClock.of(DeviceRates(cluster))
        with parts_named(clock, step.model), record_kept(memory, step.model, kept), clock:
            step.run()
    parameters = _parameters(step.model)
    sharded = bool(args.use_megatron_fsdp)
    costs = by_layer(_placed(one, sharded) for one in clock.intervals if one.scope)
    groups: list[_Group] = []
    for name, phases in costs.items():
        batches = step.micro_batches if name.startswith("chunk") else None
        one = _part(phases, batches, parameters.get(name, 0), kept.get(name))
        kind = name.partition(", ")[2].rpartition(" ")[0] or name.rpartition(" ")[0]
        for group in groups:
            if group.takes(kind, one):
                break
        else:
            groups.append(group := _Group(kind))
        group.parts[_renumbered(name, offsets)] = one
    return tuple(group.part() for group in groups)


def fewest_micro_batches(args: argparse.Namespace) -> int:
    """Smallest number of micro-batches with which the schedule of the job exists."""
    if flag_of(vars(args)) is not None:
        return 2 * int(args.pipeline_model_parallel_size)
    return args.pipeline_model_parallel_size if args.virtual_pipeline_model_parallel_size else 1


@dataclass
class _Group:
    """Parts with equal figures and nearly equal times, by name."""

    kind: str
    parts: dict[str, Part] = field(default_factory=dict)

    def takes(self, kind: str, one: Part) -> bool:
        """Whether a part belongs to the group."""
        first = next(iter(self.parts.values()))
        times = ((first.seconds, one.seconds), (first.exposed, one.exposed))
        near = all(math.isclose(a, b, rel_tol=NEAR) for a, b in times)
        same = first == replace(one, seconds=first.seconds, exposed=first.exposed)
        return kind == self.kind and near and same

    def part(self) -> Part:
        """Merge the parts into one with mean times."""
        every, names = list(self.parts.values()), list(self.parts)
        return replace(
            every[0],
            name=_joined(names),
            count=len(every),
            seconds=_rounded(sum(one.seconds for one in every) / len(every)),
            exposed=_rounded(sum(one.exposed for one in every) / len(every)),
        )


def _renumbered(name: str, offsets: Sequence[int]) -> str:
    """The name of a layer with its number in the job."""
    from mindspeed.planner.counted.timed_step import chunk_of

    start, _, number = name.rpartition(" ")
    chunk = chunk_of(name)
    if chunk is None or ", " not in name or not offsets:
        return name
    return f"{start} {int(number) + offsets[chunk]}"


def _joined(names: list[str]) -> str:
    """Join ``chunk 0, layer 1``, ``chunk 1, layer 9`` to ``chunks 0-1, layers 1, 9``."""
    chunks = list(dict.fromkeys(name.partition(", ")[0] for name in names))
    layers = [one for name in names if (one := name.partition(", ")[2])]
    return ", ".join(joined_names(part) for part in (chunks, layers) if part)


def _placed(one: TimedCall, sharded: bool) -> TimedCall:
    """Move data-parallel messages out of layers, unless they run in every micro-batch (sharded)."""
    from mindspeed.planner.counted.timed_step import GRADIENTS, OPTIMIZER, chunk_of

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
    """Build the part of one layer, or of a step if ``micro_batches`` is None."""
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
    """Number of parameters by scope."""
    from mindspeed.planner.counted.timed_step import named_layers

    found: dict[str, int] = {}
    for index, chunk in enumerate(model.chunks):
        layers = {scope: _entries(layer) for scope, layer in named_layers(chunk, index)}
        found |= layers | {f"chunk {index}": _entries(chunk) - sum(layers.values())}
    return found


def _entries(module: Any) -> int:
    return sum(one.numel() for p in module.parameters() for one in held(p))


_SENT_ON = "sent on"


@contextmanager
def record_kept(memory: LiveMemory, model: TrainedModel, kept: dict[str, int]) -> Iterator[None]:
    """Record in ``kept`` the bytes alive after the first forward of each chunk, by scope."""
    from mindspeed.planner.counted.timed_step import named_layers

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
    """Hooks that record what the first forward of a chunk keeps; scopes are kinds of memory."""

    memory: LiveMemory
    chunk: Any
    own: str
    kept: dict[str, int]
    before: str | None = None  # kind outside of the chunk, while its first forward runs
    done: bool = False

    def handles(self, layers: Mapping[str, torch.nn.Module]) -> list[Any]:
        """Register hooks of the chunk and its layers, which are given by scope."""
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
        """Exclude hidden states [s, b, h] that are sent to the next rank and released here."""
        (model,) = unwrap([self.chunk])
        if not model.post_process:
            self.memory.claim(output, _SENT_ON)
