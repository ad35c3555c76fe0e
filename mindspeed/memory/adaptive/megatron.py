"""Chooses the activation plan of a Megatron model while it trains.

The controller wraps the function that runs the micro-batches of a step, so it reaches every
training loop. Plans change between steps only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.utils import get_model_config, unwrap_model

from mindspeed.device import Device
from mindspeed.errors import TrainingError
from mindspeed.journal import Journal, replace_method
from mindspeed.memory import agreement
from mindspeed.memory.adaptive import Adaptation, BudgetSettings
from mindspeed.memory.adaptive.profile import (
    FORWARD,
    FRONT,
    HEAD,
    LayerKind,
    Sections,
    StepReplay,
    agree,
    on_gradient,
)
from mindspeed.memory.estimate import (
    ALL_ON_HOST,
    KEEP_ALL,
    LEAST,
    Clock,
    device_clock,
    name_of,
    plans_for,
)
from mindspeed.memory.in_flight import most_held
from mindspeed.memory.megatron import (
    install,
    layers_of,
    remember_state,
    sites_of,
    stage_groups,
    wrap,
)
from mindspeed.memory.megatron_in_flight import held_by_stage
from mindspeed.memory.plan import ChunkPlan, LayerPlan
from mindspeed.memory.runtime import Runtime
from mindspeed.memory.solver import (
    Budget,
    LayerCosts,
    NothingFits,
    PlanCandidate,
    Solution,
    smallest_peak,
)

_MIB = 2**20
_OUT_OF_MEMORY = torch.OutOfMemoryError


@dataclass(frozen=True)
class _Layer:
    """A layer of this rank; ``kind`` is a key of the controller's kinds."""

    chunk: int
    name: str
    kind: Any
    runtime: Runtime


class Controller:
    """One process's part: all chunks of its pipeline stage.

    Args:
        settings: what the user asked for.
        device: whose peaks are measured.
        journal: restores the layers.
        show: gets messages; called on every rank.
        clock: times second runs; default: that of the device.
    """

    def __init__(
        self,
        settings: BudgetSettings,
        device: Device,
        journal: Journal,
        show: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self._settings, self._device, self._journal, self._show = settings, device, journal, show
        self._clock = clock or device_clock(device)
        self._chunks: list[Any] = []
        self._layers: list[_Layer] = []
        self._kinds: dict[Any, LayerKind] = {}
        self._plans: dict[str, LayerPlan] = {}
        self._in_force = LEAST
        self._steps, self._micro_batches = 0, 1
        self._sections = Sections(device)
        self._measured, self._most_measured = 0, 1
        self._adaptation: Adaptation | None = None
        self._solution: Solution | None = None

    def with_schedule(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap for the seam ``schedule``: ``function`` runs the micro-batches of a step."""

        @functools.wraps(function)
        def run(**options: Any) -> Any:
            if options.get("forward_only"):
                return function(**options)
            if not self._chunks:
                self._begin(options["model"], options["num_microbatches"])
            result = self._run(function, options)
            self._after_step(self._sections.peak())
            return result

        return run

    @property
    def peak(self) -> int:
        """The most bytes since the latest step began."""
        return self._sections.peak()

    @property
    def profiled_steps(self) -> int:
        """Steps before the first plan is chosen."""
        return self._settings.profiled_steps

    @property
    def chunks(self) -> list[Any]:
        """The model's, without wrappers; none before the first step."""
        return self._chunks

    @property
    def solution(self) -> Solution | None:
        """The plan in force, as it was predicted; None before the first is chosen."""
        return self._solution

    def smallest_peak(self) -> Solution | None:
        """The plan with the smallest peak that is predicted; None before plans are chosen."""
        known = self._adaptation
        return None if known is None else smallest_peak(known.layers, known.budget)

    def plans(self) -> list[dict[str, LayerPlan]]:
        """Actions of the sites of all layers by path, of each chunk."""
        found: list[dict[str, LayerPlan]] = [{} for _ in self._chunks]
        for layer in self._layers:
            found[layer.chunk][layer.name] = layer.runtime.plan.layers.get(layer.name, {})
        return found

    # The first step

    def _begin(self, model: Any, micro_batches: int) -> None:
        self._chunks, self._micro_batches = unwrap_model(_as_list(model)), micro_batches
        tried: dict[Any, Any] = {}  # the last layer: the first may have an input without gradient
        for index, chunk in enumerate(self._chunks):
            layers = layers_of(chunk)
            least = ChunkPlan({name: LEAST for name in layers})
            runtime = install(chunk, least, self._journal, min_bytes=self._settings.min_bytes)
            for name, layer in layers.items():
                sites = list(sites_of(layer))
                weights = tuple((tuple(p.shape), p.requires_grad) for p in layer.parameters())
                kind = (tuple(sites), weights)
                plans = plans_for(
                    sites, offload=self._settings.offload, rescue=self._settings.rescue
                )
                self._plans |= {name_of(plan): plan for plan in plans}
                wrap(runtime, name, layer, {s for plan in plans for s in plan}, self._journal)
                self._kinds.setdefault(kind, LayerKind(plans))
                tried[kind] = runtime, name, layer
                self._layers.append(_Layer(index, name, kind, runtime))
        for kind, (runtime, name, layer) in tried.items():
            self._try_in(runtime, name, layer, self._kinds[kind])
        for index, chunk in enumerate(self._chunks):  # around trials, which are no part of a step
            self._watch(index, layers_of(chunk))
        self._agree_on([(one.chunk, one.name, *one.kind[0]) for one in self._layers])

    def _try_in(self, runtime: Runtime, name: str, layer: Any, kind: LayerKind) -> None:
        """Try the candidates once in every profiled step, from the layer's second call on.

        By then all tensors that layers share exist, such as the rotary table.
        """
        called, tried = False, -1

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal called, tried
                # The last one shows what steps need without trials.
                profiled = tried < self._steps < max(1, self._settings.profiled_steps - 1)
                if called and profiled and torch.is_grad_enabled():
                    tried = self._steps
                    kind.try_all(runtime, name, forward, (args, kwargs), self._clock)
                called = True
                return forward(*args, **kwargs)

            return run

        replace_method(layer, "forward", make, self._journal)

    def _watch(self, chunk: int, layers: dict[str, Any]) -> None:
        """Measure the sections of profiled steps, some layers under other plans than LEAST."""
        watched = [one for one in self._layers if one.chunk == chunk]
        for one in watched:
            first, last = one is watched[0], one is watched[-1]
            make = functools.partial(self._measuring, one, first=first, last=last)
            replace_method(layers[one.name], "forward", make, self._journal)

    def _measuring(
        self, layer: _Layer, forward: Callable[..., Any], *, first: bool, last: bool
    ) -> Callable[..., Any]:
        cold = True  # gradients and other tensors that stay are made in the first backward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal cold
            if self._steps >= self._settings.profiled_steps or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            inputs = kwargs.get("hidden_states", args[0] if args else None)
            if first:
                self._sections.enter(FORWARD)
                on_gradient(inputs, lambda: self._sections.enter(FRONT))
            if cold:
                outputs, measured = forward(*args, **kwargs), None
            else:
                with self._another_plan(layer) as measured:
                    outputs = forward(*args, **kwargs)
            cold = False

            def ended(nbytes: int) -> None:
                if measured is not None:
                    plan, done = measured
                    done()
                    self._kinds[layer.kind].needed(plan, nbytes)

            on_gradient(outputs, lambda: self._sections.enter("layer", ended, first))
            if last:
                self._sections.enter(HEAD)
            return outputs

        return run

    @contextlib.contextmanager
    def _another_plan(self, layer: _Layer) -> Iterator[tuple[str, Callable[[], None]]]:
        """The plan of a call, so that its backward is measured; the last step has one for all.

        Ranks choose alike: by the calls that they made, not by their memory.
        """
        last = self._steps >= self._settings.profiled_steps - 1
        if last or self._in_force is not LEAST or self._measured >= self._most_measured:
            yield name_of(self._in_force), lambda: None
            return
        plan, runtime = self._kinds[layer.kind].next_plan(), layer.runtime
        self._measured += 1

        def done() -> None:
            self._measured -= 1

        before, runtime.plan = runtime.plan, ChunkPlan({**runtime.plan.layers, layer.name: plan})
        try:
            yield name_of(plan), done
        finally:
            runtime.plan = before

    # Out of memory

    def _run(self, function: Callable[..., Any], options: dict[str, Any]) -> Any:
        """Run a step, again with a smaller plan where memory is exhausted and no rank waits."""
        if dist.get_world_size() > 1:
            try:
                return self._try(function, options)
            except _OUT_OF_MEMORY as error:
                raise self._exhausted(error, "only a run of one rank can repeat a step") from error
        data = StepReplay(options["data_iterator"])
        states = random._get_all_rng_states()
        chunks = _as_list(options["model"])
        while True:
            restore = remember_state(chunks)
            try:
                return self._try(function, {**options, "data_iterator": data.from_the_start()})
            except _OUT_OF_MEMORY as error:
                reason = str(error)
                self._reduce(error)
            self._show(f"activations: step {self._steps + 1} is repeated: {reason}")
            restore()
            for chunk in chunks:
                _zero_gradients(chunk)
            random._set_all_rng_states(*states)
            self._device.empty_cache()

    def _try(self, function: Callable[..., Any], options: dict[str, Any]) -> Any:
        self._sections.begin_step()
        self._measured = 0
        return function(**options)

    def _reduce(self, error: BaseException) -> None:
        """Install a plan that needs less, or raise."""
        if self._adaptation is not None:
            try:
                self._install(self._adaptation.after_out_of_memory(), "memory is exhausted")
            except NothingFits as nothing:
                raise self._exhausted(error, str(nothing)) from error
        elif self._settings.rescue and self._in_force is LEAST:
            self._in_force = ALL_ON_HOST
            for layer in self._layers:
                layer.runtime.plan = ChunkPlan(
                    {name: ALL_ON_HOST for name in layer.runtime.plan.layers}
                )
        else:
            hint = "--adaptive-recompute-device-swap moves activations to the host"
            raise self._exhausted(error, hint) from error

    def _exhausted(self, error: BaseException, hint: str) -> TrainingError:
        stats = self._device.memory_stats()
        return TrainingError(
            f"{self._settings.flag}: out of memory in step {self._steps + 1} "
            f"({stats.allocated / _MIB:,.0f} of {stats.total / _MIB:,.0f} MiB allocated, budget "
            f"{self._settings.device_bytes / _MIB:,.0f} MiB): {error}; {hint}"
        )

    # Between steps

    def _after_step(self, peak: int) -> None:
        self._steps += 1
        settings, adaptation = self._settings, self._adaptation
        if self._steps < settings.profiled_steps:
            self._measure_as_many_as_fit(peak)
            return
        if adaptation and adaptation.finished:
            return
        (peak,) = agreement.largest([peak], stage_groups(), self._device.torch_device())
        reason = f"step {self._steps} needed {peak / _MIB:,.1f} MiB"
        if adaptation is None:
            adaptation = self._adaptation = self._profiled()
        try:
            solution = adaptation.next(peak)
        except NothingFits as error:
            raise TrainingError(f"{settings.flag}: {error}; {reason}") from None
        self._install(solution, reason)

    def _measure_as_many_as_fit(self, peak: int) -> None:
        """Calls of layers that may be held under other plans at once, as all ranks have room."""
        costs = [one for kind in self._kinds.values() for one in (kind.costs or [[]])[0]]
        most = max((one.kept + one.transient for one in costs), default=0)
        room = (self._settings.device_bytes - peak) // most if most else 1
        (least,) = agreement.largest([-room], stage_groups(), self._device.torch_device())
        self._most_measured = max(1, -least)

    def _profiled(self) -> Adaptation:
        """The largest costs of all ranks of the stage, as the solver takes them."""
        if any(not kind.costs for kind in self._kinds.values()):
            raise TrainingError(
                f"{self._settings.flag}: a layer was called less than twice in "
                f"{self._settings.profiled_steps} steps; raise --adaptive-recompute-profiling-step"
            )
        copies = self._settings.offload or self._settings.rescue
        kinds = list(self._kinds.values())
        measured = agree(kinds, stage_groups(), self._device, self._clock, copies=copies)
        candidates = dict(zip(self._kinds, measured.candidates, strict=True))
        bounds = dict(zip(self._kinds, measured.bounds, strict=True))
        forward = dict(zip(self._kinds, measured.forward, strict=True))
        moments = self._held()
        held = most_held(moments)
        layers = [
            LayerCosts(candidates[one.kind], held[one.chunk], one.chunk) for one in self._layers
        ]
        name = name_of(self._in_force)
        in_force = [one for layer in layers for one in layer.candidates if one.plan == name]
        static, head, front = self._beside_layers(in_force, moments)
        budget = Budget(
            device=self._settings.device_bytes,
            static=static,
            head=head,
            front=front,
            host=self._settings.host_bytes,
            seconds_per_host_byte=measured.seconds_per_host_byte,
            hidden_seconds=3 * sum(forward[one.kind] for one in self._layers),
        )
        least = [
            replace(layer, candidates=bounds[one.kind])
            for layer, one in zip(layers, self._layers, strict=True)
        ]
        return Adaptation(layers, budget, in_force, least)

    def _beside_layers(
        self, in_force: list[PlanCandidate], moments: frozenset[tuple[int, ...]]
    ) -> tuple[int, int, int]:
        """Static bytes, and what head and front need beyond what layers keep then."""
        peaks = self._sections.peaks
        groups, device = stage_groups(), self._device.torch_device()
        begins, head, front = agreement.largest(
            [peaks.begins, peaks.head, peaks.front], groups, device
        )
        one, later = Counter[int](), Counter[int]()  # of a micro-batch, and without first layers
        for layer, candidate in zip(self._layers, in_force, strict=True):
            later[layer.chunk] += candidate.kept if layer.chunk in one else 0
            one[layer.chunk] += candidate.kept
        kept = max(sum(n * one[chunk] for chunk, n in enumerate(held)) for held in moments)
        static = begins - kept + min(later.values())
        through = one[0] if len(one) == 1 else 0
        return static, max(0, head - static - kept), max(0, front - static - kept + through)

    def _held(self) -> frozenset[tuple[int, ...]]:
        config = get_model_config(self._chunks[0])
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return held_by_stage(stage, self._micro_batches, config)

    def _install(self, solution: Solution, reason: str) -> None:
        """Put the plans in force; refused if ranks of the stage chose different ones."""
        self._agree_on([one.plan for one in solution.chosen])
        plans: dict[int, dict[str, LayerPlan]] = {one.chunk: {} for one in self._layers}
        for layer, chosen in zip(self._layers, solution.chosen, strict=True):
            plan = self._plans[chosen.plan]
            plans[layer.chunk][layer.name] = {} if plan == KEEP_ALL else plan
        for layer in self._layers:
            layer.runtime.plan = ChunkPlan(plans[layer.chunk])
        self._solution = solution
        rows = "".join(f"\n  {count:>4} x {plan}" for count, plan in solution.runs())
        self._show(
            f"activations: {reason}; next plan: {solution.peak / _MIB:,.1f} MiB, "
            f"{solution.host / _MIB:,.1f} MiB on the host, "
            f"{1e3 * solution.seconds:,.2f} ms more per micro-batch{rows}"
        )

    def _agree_on(self, what: Any) -> None:
        digest = hashlib.sha256(repr(what).encode()).hexdigest()
        device = self._device.torch_device()
        agreement.refuse_different(digest, stage_groups(), device, "the activation plan")


def _zero_gradients(chunk: Any) -> None:
    if hasattr(chunk, "zero_grad_buffer"):
        chunk.zero_grad_buffer()
    chunk.zero_grad()


def _as_list(model: Any) -> list[Any]:
    return model if isinstance(model, list) else [model]
