"""Measures a pipelined job in its first steps, and searches a better division of its layers.

Steps, from 0: (0) warm-up, (1) bytes that a chunk keeps, (2) bytes and time of recomputing modules
of a layer, (3, 4) seconds of every layer and of both ends. Then rank 0 gathers the pipeline's
figures, writes the profile, searches (:mod:`mindspeed.pipeline.automated`) and writes the result.
Training goes on unchanged; all that was wrapped is restored.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.journal import Journal, replace_method
from mindspeed.memory import agreement
from mindspeed.memory.adaptive.profile import LayerKind
from mindspeed.memory.estimate import KEEP_ALL, Clock, device_clock
from mindspeed.memory.plan import LAYER, ChunkPlan, LayerPlan, SiteAction
from mindspeed.pipeline.automated.profile import (
    MODULES,
    EndLayers,
    Profile,
    ProfiledLayer,
    RecomputedModule,
)
from mindspeed.pipeline.automated.task import ProfiledJob, report

SITES = {"mlp": "mlp", "attention": "self_attention", "layer": LAYER}
"""Module of a profile -> site of a layer."""
BYTES, RECOMPUTE, FIRST_TIMED, STEPS = 1, 2, 3, 5
_PLANS: list[LayerPlan] = [KEEP_ALL, *({SITES[name]: SiteAction.RECOMPUTE} for name in MODULES)]


@dataclass
class _Figures:
    """Measurements of this rank; seconds are lists of single calls."""

    forward: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    chunk_forward: list[float] = field(default_factory=list)
    head_backward: list[float] = field(default_factory=list)
    outside: dict[int, int] = field(default_factory=dict)  # chunk -> bytes


@dataclass(frozen=True)
class Instruments:
    """Clocks that replace those of the device, and the receiver of the figures.

    Attributes:
        now: seconds.
        clock: seconds of a function.
        latency: seconds of a small message from the first rank of a pipeline to the second.
        deliver: gets :class:`RankPart` after the last step.
    """

    now: Callable[[], float]
    clock: Clock
    latency: float
    deliver: Callable[[RankPart], None]


@dataclass(frozen=True)
class RankPart:
    """Measurements of one rank of a pipeline.

    Attributes:
        layers: by their number in the model.
        end: what it computes outside of layers; at both ends of the pipeline it counts.
        latency: seconds of a small message.
        chunks: of the rank.
        num_microbatches: of a step.
    """

    layers: Mapping[int, ProfiledLayer]
    end: EndLayers
    latency: float
    chunks: int
    num_microbatches: int


def profile_of(parts: Sequence[RankPart], task: ProfiledJob) -> Profile:
    """The profile of a job from all ranks of a pipeline, in their order."""
    layers = {number: layer for part in parts for number, layer in part.layers.items()}
    return Profile(
        layers=tuple(layers[number] for number in sorted(layers)),
        first=parts[0].end,
        last=parts[-1].end,
        ranks=len(parts),
        num_microbatches=parts[0].num_microbatches,
        chunks=parts[0].chunks,
        micro_batch_size=task.megatron.get("micro_batch_size") or 1,
        latency=max(part.latency for part in parts),
        job=task.job,
    )


class Profiler:
    """One process's part."""

    def __init__(self, task: ProfiledJob, instruments: Instruments | None = None) -> None:
        self.task, self._here, self._journal = task, device.current(), Journal()
        self._instruments = instruments
        self._clock = instruments.clock if instruments else device_clock(self._here)
        self._step, self._micro_batches = 0, 1
        self._layers: dict[int, tuple[LayerKind, torch.nn.Module]] = {}
        self._chunks: list[Any] = []
        self._figures = _Figures()
        self._gradient_of_output: float | None = None
        self._in_layers = 0.0

    def with_schedule(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap for the seam ``schedule``: ``function`` runs the micro-batches of a step."""

        @functools.wraps(function)
        def run(**options: Any) -> Any:
            if options.get("forward_only") or self._step >= STEPS:
                return function(**options)
            if not self._chunks:
                self._begin(options["model"], options["num_microbatches"])
            result = function(**options)
            self._step += 1
            if self._step == STEPS:
                self._journal.undo()
                self._finish()
            return result

        return run

    # What is wrapped

    def _begin(self, model: Any, micro_batches: int) -> None:
        from megatron.core.utils import unwrap_model

        from mindspeed.memory.megatron import install, layers_of, sites_of, wrap

        self._chunks = unwrap_model(model if isinstance(model, list) else [model])
        self._micro_batches = micro_batches
        kinds: dict[Any, LayerKind] = {}
        for index, chunk in enumerate(self._chunks):
            layers = {
                name: layer for name, layer in layers_of(chunk).items() if name.startswith("decod")
            }
            runtime = install(chunk, ChunkPlan(dict.fromkeys(layers, KEEP_ALL)), self._journal)
            for name, layer in layers.items():
                kind = tuple((tuple(p.shape), p.requires_grad) for p in layer.parameters())
                new = kind not in kinds
                kinds.setdefault(kind, LayerKind(_PLANS))
                self._layers[layer.layer_number - 1] = kinds[kind], layer
                known = sites_of(layer)
                wrap(
                    runtime,
                    name,
                    layer,
                    [one for one in SITES.values() if one in known],
                    self._journal,
                )
                self._time(layer)
                if new:
                    self._try(runtime, name, layer, kinds[kind])
            self._watch(index, chunk, layers)

    def _try(self, runtime: Any, name: str, layer: Any, kind: LayerKind) -> None:
        """Recompute each module of ``layer`` once, in one step."""

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def run(*args: Any, **kwargs: Any) -> Any:
                if self._step == RECOMPUTE and not kind.costs and torch.is_grad_enabled():
                    kind.try_all(runtime, name, forward, (args, kwargs), self._clock)
                return forward(*args, **kwargs)

            return run

        replace_method(layer, "forward", make, self._journal)

    def _time(self, layer: Any) -> None:
        number = layer.layer_number - 1

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def run(*args: Any, **kwargs: Any) -> Any:
                if self._step < FIRST_TIMED or not torch.is_grad_enabled():
                    return forward(*args, **kwargs)
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                start = self._now()
                output = forward(*args, **kwargs)
                seconds = self._now() - start
                self._figures.forward[number].append(seconds)
                self._in_layers += seconds
                self._time_backward(number, hidden, output)
                return output

            return run

        replace_method(layer, "forward", make, self._journal)

    def _time_backward(self, number: int, hidden: Any, output: Any) -> None:
        started: list[float] = []

        def begin(gradient: Any) -> None:
            now = self._now()
            if self._gradient_of_output is not None:
                self._figures.head_backward.append(now - self._gradient_of_output)
                self._gradient_of_output = None
            started.append(now)

        def end(gradient: Any) -> None:
            if started:
                self._figures.backward[number].append(self._now() - started[-1])

        result = output[0] if isinstance(output, tuple) else output
        if result.requires_grad:
            result.register_hook(begin)
        if hidden.requires_grad:
            hidden.register_hook(end)

    def _watch(self, index: int, chunk: Any, layers: Mapping[str, Any]) -> None:
        """Bytes and seconds of what is outside of layers."""

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def run(*args: Any, **kwargs: Any) -> Any:
                if not torch.is_grad_enabled():
                    return forward(*args, **kwargs)
                if self._step == BYTES and index not in self._figures.outside:
                    return self._counted(index, chunk, layers, forward, args, kwargs)
                if self._step < FIRST_TIMED:
                    return forward(*args, **kwargs)
                self._in_layers, start = 0.0, self._now()
                output = forward(*args, **kwargs)
                self._figures.chunk_forward.append(self._now() - start - self._in_layers)
                if chunk.post_process and output.requires_grad:
                    output.register_hook(self._output_gradient)
                return output

            return run

        replace_method(chunk, "forward", make, self._journal)

    def _output_gradient(self, gradient: Any) -> None:
        self._gradient_of_output = self._now()

    def _counted(
        self, index: int, chunk: Any, layers: Mapping[str, Any], forward: Any, args: Any, kw: Any
    ) -> Any:
        from mindspeed.instruments import saved_for_backward

        with saved_for_backward(chunk) as saved:
            output = forward(*args, **kw)
            by_module = saved.by_module()
        inside = tuple(f"{name}." for name in layers)
        self._figures.outside[index] = sum(
            nbytes
            for name, nbytes in by_module.items()
            if name not in layers and not name.startswith(inside)
        )
        return output

    def _now(self) -> float:
        if self._instruments is not None:
            return self._instruments.now()
        self._here.synchronize()
        return time.perf_counter()

    # What becomes of it

    def _finish(self) -> None:
        from megatron.core import parallel_state

        group, given = parallel_state.get_pipeline_model_parallel_group(), self._instruments
        latency = given.latency if given else self._latency(group)
        own = RankPart(
            self._own_layers(), self._ends(), latency, len(self._chunks), self._micro_batches
        )
        if given is not None:
            given.deliver(own)
            return
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, own, group=group)
        if dist.get_rank() == 0:
            print(report(self.task, profile_of(parts, self.task)), flush=True)

    def _own_layers(self) -> dict[int, ProfiledLayer]:
        found = {}
        for number, (kind, layer) in self._layers.items():
            keep, *others = kind.costs[0]
            forward = statistics.median(self._figures.forward[number])
            backward = self._figures.backward.get(number)
            found[number] = ProfiledLayer(
                forward=forward,
                backward=statistics.median(backward) if backward else 2 * forward,
                activations=float(keep.kept),
                static=self._static(layer),
                recompute={
                    name: RecomputedModule(cost.seconds, float(max(keep.kept - cost.kept, 0)))
                    for name, cost in zip(MODULES, others, strict=True)
                },
            )
        return found

    def _ends(self) -> EndLayers:
        """Measurements outside of layers; at both ends of the pipeline it counts."""
        seconds = statistics.median(self._figures.chunk_forward)
        backward = self._figures.head_backward
        in_layers = sum(self._static(layer) for _, layer in self._layers.values())
        whole = sum(self._static(chunk) for chunk in self._chunks)
        return EndLayers(
            forward=max(seconds, 0.0) * len(self._chunks),
            backward=statistics.median(backward) if backward else max(seconds, 0.0),
            activations=float(sum(self._figures.outside.values())),
            static=whole - in_layers,
        )

    def _static(self, module: Any) -> float:
        """Bytes of weights, gradients and optimizer states."""
        megatron = self.task.megatron
        shared = 1
        if megatron.get("use_distributed_optimizer"):
            shared = megatron.get("data_parallel_size") or 1
        total = 0.0
        for parameter in module.parameters():
            width = parameter.element_size()
            states = 8 + (4 if width == 2 else 0)
            trained = (4 + states / shared) if parameter.requires_grad else 0
            total += parameter.numel() * (width + trained)
        return total

    def _latency(self, group: Any) -> float:
        """Seconds of a small message from the first pipeline rank to the second."""
        ranks = dist.get_process_group_ranks(group)
        here, tensor = self._here.torch_device(), torch.zeros(1)
        tensor, found = tensor.to(here), []
        if dist.get_rank() not in ranks[:2]:
            return 0.0
        for _ in range(5):
            start = time.perf_counter()
            if dist.get_rank() == ranks[0]:
                dist.send(tensor, ranks[1], group=group)
                dist.recv(tensor, ranks[1], group=group)
            else:
                dist.recv(tensor, ranks[0], group=group)
                dist.send(tensor, ranks[0], group=group)
            self._here.synchronize()
            found.append((time.perf_counter() - start) / 2)
        return min(found)


def refuse_different_files(digest: str, path: str) -> None:
    """Collective: all ranks must see the same result, or none."""
    agreement.refuse_different(
        digest, [dist.group.WORLD], device.current().torch_device(), f"the file {path}"
    )


def pipeline_rank() -> int:
    """This rank's place in the pipeline."""
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_rank()  # type: ignore[no-any-return]
