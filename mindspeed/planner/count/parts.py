"""Bytes, FLOPs, messages and seconds of the layers of a rank, and of the rest.

    for part in parts(settings.args, load_cluster("h100"), rank=0):
        part.name, part.kept, part.flops, part.sent

One step with the fewest micro-batches that the schedule allows runs on FakeTensors, timed by
:mod:`mindspeed.planner.count.timed_step`. Figures of layers are per micro-batch. Figures of
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
from functools import partial
from typing import Any

import torch

from mindspeed.built_model import TrainedModel, unwrap
from mindspeed.device.wrapped_tensors import held
from mindspeed.instruments.clock import TimedCall, VirtualClock
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.job import Parallel, Sharding
from mindspeed.pipeline.placed_stages import flag_of
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.count.layer_costs import (
    GRADIENTS,
    NANOSECOND,
    OPTIMIZER,
    START,
    Costs,
    Scope,
    by_scope,
    joined,
)

NEAR = 0.01
"""Relative difference of times of grouped layers: those at the edges of a schedule differ."""


@dataclass(frozen=True)
class PartFigures:
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
) -> tuple[PartFigures, ...]:
    """Count the parts of a rank of the job, in the order in which they first run.

    Args:
        args: final values, of a dry run; their features are attached.
        offsets: added to the layer numbers of each of its chunks.
    """
    from mindspeed.planner.cluster.rates import clock_of
    from mindspeed.planner.count.balanced_routing import planned_rank
    from mindspeed.planner.count.loop import StepOfRank
    from mindspeed.planner.count.timed_step import scopes_set

    with planned_rank(args, rank) as args, _KeptMemory() as memory:
        step = StepOfRank(args, memory, fewest_micro_batches(args))
        step.run()  # a second step is like all later ones
        clock = clock_of(cluster, args)
        with scopes_set(clock, step.model), memory.watching(clock, step.model), clock:
            step.run()
        parameters = _parameters(step.model)
    sharded = Sharding.of(args).fsdp
    costs = by_scope(_placed(one, sharded) for one in clock.intervals if one.scope != START)
    groups: list[_Group] = []
    for scope, phases in costs.items():
        batches = None if scope.chunk is None else step.micro_batches
        one = _part(phases, batches, parameters.get(scope, 0), memory.kept.get(scope))
        for group in groups:
            if group.takes(scope.what, one):
                break
        else:
            groups.append(group := _Group(scope.what))
        group.parts[_renumbered(scope, offsets)] = one
    return tuple(group.part() for group in groups)


def fewest_micro_batches(args: argparse.Namespace) -> int:
    """Smallest number of micro-batches with which the schedule of the job exists."""
    parallel = Parallel.of(args)
    if flag_of(vars(args)) is not None:
        return 2 * parallel.pipeline
    return parallel.pipeline if parallel.chunks else 1


@dataclass
class _Group:
    """Parts with equal figures and nearly equal times, by scope."""

    what: str
    parts: dict[Scope, PartFigures] = field(default_factory=dict)

    def takes(self, what: str, one: PartFigures) -> bool:
        """Whether a part belongs to the group."""
        first = next(iter(self.parts.values()))
        times = ((first.seconds, one.seconds), (first.exposed, one.exposed))
        near = all(math.isclose(a, b, rel_tol=NEAR) for a, b in times)
        same = first == replace(one, seconds=first.seconds, exposed=first.exposed)
        return what == self.what and near and same

    def part(self) -> PartFigures:
        """Merge the parts into one with mean times."""
        every = list(self.parts.values())
        return replace(
            every[0],
            name=joined(list(self.parts)),
            count=len(every),
            seconds=_rounded(sum(one.seconds for one in every) / len(every)),
            exposed=_rounded(sum(one.exposed for one in every) / len(every)),
        )


def _renumbered(scope: Scope, offsets: Sequence[int]) -> Scope:
    """A layer with its number in the job."""
    if scope.chunk is None or scope.layer is None or not offsets:
        return scope
    return replace(scope, layer=scope.layer + offsets[scope.chunk])


def _placed(one: TimedCall, sharded: bool) -> TimedCall:
    """Move data-parallel messages out of layers, unless they run in every micro-batch (sharded)."""
    message = one.communication
    if message is None or one.kind != "communication" or sharded or one.scope.chunk is None:
        return one
    if "DATA_PARALLEL" not in message.description:
        return one
    gathers = "gather" in message.op  # --overlap-param-gather
    return replace(one, scope=OPTIMIZER if gathers else GRADIENTS)


def _part(
    phases: Mapping[str, Costs], micro_batches: int | None, parameters: int, kept: int | None
) -> PartFigures:
    """Build the part of one layer, or of a step if ``micro_batches`` is None."""
    sent, flops, batches = Counter[str](), dict[str, float](), micro_batches or 1
    for phase, costs in phases.items():
        flops[phase] = costs.flops / batches
        sent.update(costs.sent)
    return PartFigures(
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


def _parameters(model: TrainedModel) -> dict[Scope, int]:
    """Number of parameters by scope."""
    from mindspeed.planner.count.timed_step import layers_of

    found: dict[Scope, int] = {}
    for index, chunk in enumerate(model.chunks):
        layers = {scope: _entries(layer) for scope, layer in layers_of(chunk, index)}
        found |= layers | {Scope("chunk", index): _entries(chunk) - sum(layers.values())}
    return found


def _entries(module: Any) -> int:
    return sum(one.numel() for p in module.parameters() for one in held(p))


_SENT_ON = "sent on"


class _KeptMemory(LiveMemory):
    """Counts bytes by the part of the step that allocates them.

    Attributes:
        clock: has the part that runs (:func:`mindspeed.planner.count.timed_step.scopes_set`).
        kept: bytes alive after the first forward of each chunk, by part.
    """

    clock: VirtualClock | None = None

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Scope, int] = {}

    def kind_of_new(self) -> str:
        """The part that runs; before the timed step the kind that the step has set."""
        return self.kind if self.clock is None else str(self.clock.scope)

    @contextmanager
    def watching(self, clock: VirtualClock, model: TrainedModel) -> Iterator[None]:
        """Record :attr:`kept` in the steps inside the block."""
        from mindspeed.planner.count.timed_step import layers_of

        self.clock, handles = clock, list[Any]()
        for index, chunk in enumerate(model.chunks):
            own, layers = Scope("chunk", index), dict(layers_of(chunk, index))
            for scope, layer in layers.items():
                enter, leave = partial(self._enter, scope, own), partial(self._leave, own)
                handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(layer.register_forward_hook(leave))
            end = partial(self._end, own, (*layers, own))
            handles.append(chunk.register_forward_hook(end))
        try:
            yield
        finally:
            self.clock = None
            for handle in handles:
                handle.remove()

    def _enter(
        self, scope: Scope, own: Scope, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if own not in self.kept:
            self.claim(
                kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], str(scope)
            )

    def _leave(self, own: Scope, module: Any, args: Any, output: Any) -> None:
        if own not in self.kept:
            self.claim(output[0] if isinstance(output, tuple) else output, str(own))

    def _end(self, own: Scope, scopes: Sequence[Scope], chunk: Any, args: Any, output: Any) -> None:
        if own in self.kept:
            return
        (model,) = unwrap([chunk])
        if isinstance(output, torch.Tensor) and not model.post_process:
            self.claim(output, _SENT_ON)  # hidden states [s, b, h]
        self.kept |= {one: self.now[str(one)] for one in scopes}
