"""Time one training step of one rank by a model, and break its seconds down.

    step = time_step(settings.args, load_cluster("h100"), rank=0)
    step.chunks[0].forward, step.optimizer_seconds, step.exposed["TENSOR_MODEL_PARALLEL_GROUP"]

The step is that of :mod:`mindspeed.planner.count.counted_step`, on FakeTensors and in its real
order. Operators and communications take the seconds of
:class:`~mindspeed.planner.cluster.rates.DeviceRates`. Communication that the program waits for is
exposed; computation is slower while communication runs. Counts are exact, times are a model.

The rank never waits for a slower one, so there is no pipeline bubble: the simulator of
:mod:`mindspeed.pipeline.schedule` adds it. Operators are timed as the kernels of a device
(:mod:`mindspeed.planner.cluster.operations`).

While :func:`scopes_set` is active, ``clock.scope`` is the part of the step that runs: ``START``
before the first chunk runs, a layer in forward, recomputation or backward, the rest of a chunk,
``GRADIENTS`` for reductions after the last backward, ``OPTIMIZER`` for its step and the gather of
parameters that follows. Backward of a layer begins when the gradient of its output is complete and
ends when that of its input is. Where the parts of layers run one by one, beside those of another
micro-batch, scopes are the parts of a chunk (:data:`PARTS`), all layers together.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.built_model import TrainedModel
from mindspeed.instruments.clock import TimedCall, VirtualClock
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.journal import Journal
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.cluster.rates import clock_of
from mindspeed.planner.count.layer_costs import GRADIENTS, OPTIMIZER, PHASES, START, Scope
from mindspeed.planner.count.recording import Message


def layers_of(chunk: torch.nn.Module, index: int) -> Iterator[tuple[Scope, Any]]:
    """Yield the scopes and modules of the transformer layers of a chunk."""
    from megatron.core.transformer import TransformerLayer

    for name, module in chunk.named_modules():
        if isinstance(module, TransformerLayer):
            kind = "prediction layer" if ".mtp." in name else "layer"
            yield Scope(kind, index, module.layer_number), module


@contextlib.contextmanager
def scopes_set(clock: VirtualClock, model: TrainedModel) -> Iterator[None]:
    """Set ``clock.scope`` while steps of the model run."""
    journal, handles = Journal(), []
    clock.scope = START
    try:
        for index, chunk in enumerate(model.chunks):
            rest = Scope("chunk", index)
            handles += _chunk_hooks(clock, chunk, rest)
            for scope, module in layers_of(chunk, index):
                handles += _layer_hooks(clock, module, scope, rest)
        config = model.chunks[0].config
        if config.overlap_moe_expert_parallel_comm:
            _watch_parts(clock, model, journal)
        for holder, name, scope in (
            (config, "finalize_model_grads_func", GRADIENTS),
            (model.optimizer, "step", OPTIMIZER),
        ):
            if getattr(holder, name, None) is not None:
                journal.set(
                    holder, name, _within(clock, getattr(holder, name), scope), owner="scopes"
                )
        yield
    finally:
        journal.undo()
        for handle in handles:
            handle.remove()


EXCHANGES = ("moe_dispatch", "moe_combine")
"""Parts of a layer that communicate with experts, by Megatron's names."""
PARTS = ("attn", "mlp", *EXCHANGES)
WEIGHTS = "weight gradients"
"""Those that the parts delay."""


def _watch_parts(clock: VirtualClock, model: TrainedModel, journal: Journal) -> None:
    from mindspeed.adaptor.watched_calls import model_of_part, parts_of_layers

    chunks = {id(one): index for index, chunk in enumerate(model.chunks) for one in chunk.modules()}
    every, of_layers = parts_of_layers()

    def watched(method: Callable[..., Any], weights: bool) -> Callable[..., Any]:
        def run(part: Any, *args: Any) -> Any:
            own = model_of_part(part)
            chunk = clock.scope.chunk if own is None else chunks[id(own)]
            what = part.name if part.name in PARTS else "chunk"
            clock.scope = Scope(WEIGHTS if weights else what, chunk)
            try:
                return method(part, *args)
            finally:
                clock.scope = Scope("chunk", chunk)

        return run

    for owner, name in ((every, "_forward"), (every, "_backward"), (of_layers, "backward_dw")):
        method = watched(getattr(owner, name), name == "backward_dw")
        journal.set(owner, name, method, owner="scopes")


def _within(clock: VirtualClock, run: Callable[..., Any], scope: Scope) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        clock.scope = scope
        return run(*args, **kwargs)

    return wrapped


def _chunk_hooks(clock: VirtualClock, chunk: Any, scope: Scope) -> list[Any]:
    def enter(module: Any, args: Any) -> None:
        clock.scope = scope

    def leave(module: Any, args: Any, output: Any) -> None:
        clock.scope = scope
        if not getattr(output, "_layer_output", False):  # a chunk that ends with a layer
            _when_gradient_is_known(clock, output, scope)

    return [chunk.register_forward_pre_hook(enter), chunk.register_forward_hook(leave)]


def _layer_hooks(clock: VirtualClock, layer: Any, scope: Scope, outside: Scope) -> list[Any]:
    """Register hooks that set the scope of the clock while a transformer layer runs.

    Args:
        scope: scope inside the layer.
        outside: scope after it, and before the backward of the last layer.
    """

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if not getattr(hidden, "_layer_output", False):
            _when_gradient_is_known(clock, hidden, outside)
        clock.scope = scope

    def leave(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        _when_gradient_is_known(clock, hidden, scope)
        hidden._layer_output = True
        clock.scope = outside

    return [
        layer.register_forward_pre_hook(enter, with_kwargs=True),
        layer.register_forward_hook(leave),
    ]


def _when_gradient_is_known(clock: VirtualClock, tensor: Any, scope: Scope) -> None:
    """Set the scope in backward as soon as the gradient of ``tensor`` is complete."""

    def hook(gradient: torch.Tensor) -> None:
        clock.scope = scope

    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        tensor.register_hook(hook)


BETWEEN_CHUNKS = (
    *("PIPELINE_MODEL_PARALLEL", "PIPELINE_UPWARD", "PIPELINE_DOWNWARD"),
    *("DATA_PARALLEL", "INTRA_PARTIAL", "INTER_PARTIAL"),
)
"""Substrings of the descriptions of groups that communicate between chunks or once in a step."""


@dataclass(frozen=True)
class TimedStep:
    """Modelled seconds of one rank.

    Attributes:
        seconds: duration of the step, if no other rank is ever late.
        intervals: timed calls, with times from the start of the step.
        chunks: mean seconds of each model chunk for one micro-batch by phase (``forward``,
            ``backward``, ``recompute``), including waits for tensor-, context- and expert-parallel
            groups, but not for pipeline and data parallelism.
        gradient_seconds: seconds after the last backward: reductions that were not hidden.
        optimizer_seconds: seconds of the optimizer step, including its gather of parameters.
        exposed: seconds of waiting for communication, by description of the group.
        routed: seconds of products of experts, and of waits for their exchanges.
    """

    micro_batches: int
    seconds: float
    intervals: tuple[TimedCall, ...]
    chunks: tuple[Mapping[str, float], ...]
    gradient_seconds: float
    optimizer_seconds: float
    exposed: Mapping[str, float]
    routed: float


def time_step(
    args: argparse.Namespace,
    cluster: Cluster,
    rank: int = 0,
    *,
    micro_batches: int | None = None,
) -> TimedStep:
    """Time one step of a rank of the job, on FakeTensors.

    Args:
        args: final values, of a dry run.
        micro_batches: micro-batches of the step; default: those of the job.
    """
    from mindspeed.planner.count.balanced_routing import planned_rank
    from mindspeed.planner.count.loop import StepOfRank

    with planned_rank(args, rank) as own:
        step = StepOfRank(own, LiveMemory(), micro_batches)
        step.run()  # creates optimizer states, as later steps find them
        clock = clock_of(cluster, own)
        with scopes_set(clock, step.model), clock:
            step.run()
        exposed = exposed_by_group(clock.intervals)
        return TimedStep(
            step.micro_batches,
            clock.now,
            tuple(clock.intervals),
            _by_chunk(clock.intervals, len(step.model.chunks), step.micro_batches),
            _seconds(clock.intervals, GRADIENTS),
            _seconds(clock.intervals, OPTIMIZER),
            exposed,
            clock.routed + sum(t for name, t in exposed.items() if Message(name, 0, "").routed),
        )


def exposed_by_group(intervals: Iterable[TimedCall]) -> dict[str, float]:
    """Seconds waited for communication, by description of the group."""
    found: dict[str, float] = defaultdict(float)
    for interval in intervals:
        if interval.kind == "wait" and interval.communication is not None:
            found[interval.communication.description] += interval.seconds
    return dict(found)


def between_chunks(interval: TimedCall) -> bool:
    """Whether an interval is a wait for pipeline or data parallelism."""
    if interval.kind != "wait" or interval.communication is None:
        return False
    return any(part in interval.communication.description for part in BETWEEN_CHUNKS)


def _seconds(intervals: Iterable[TimedCall], scope: Scope) -> float:
    return sum(
        interval.seconds
        for interval in intervals
        if interval.kind != "communication" and interval.scope == scope
    )


def _by_chunk(
    intervals: Iterable[TimedCall], count: int, micro_batches: int
) -> tuple[dict[str, float], ...]:
    """Seconds of each chunk by phase, per micro-batch."""
    found = tuple(dict.fromkeys(PHASES, 0.0) for _ in range(count))
    for one in intervals:
        chunk = one.scope.chunk
        if one.kind != "communication" and chunk is not None and not between_chunks(one):
            found[chunk][one.phase] += one.seconds / micro_batches
    return found
