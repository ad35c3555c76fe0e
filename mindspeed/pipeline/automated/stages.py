"""What a choice costs: seconds of every stage, bytes of every rank, by the schedule's simulation.

A rank recomputes a module of its FIRST layers. In backward it needs what they do not keep, one
layer at a time; then the activations of the layers behind are gone already.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed.pipeline.automated.profile import EndLayers, Profile, ProfiledLayer
from mindspeed.pipeline.layout import Layers, stage_layers
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import Simulation, simulate

MOST_ACTIONS = 10_000


@dataclass(frozen=True)
class StageChoice:
    """Variables of the search.

    Attributes:
        layers: of each chunk of each rank.
        recompute: for each rank how many of its first layers recompute the module.
        module: which: one of :data:`.profile.MODULES`.
        kind: of schedule.
        sizes: samples of each micro-batch; None: all equal.
    """

    layers: Layers
    recompute: tuple[int, ...]
    module: str = "layer"
    kind: str = "1f1b"
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Stage:
    """One stage of a choice.

    Attributes:
        forward: seconds.
        backward: seconds, recomputation included.
        kept: bytes of activations that a micro-batch keeps.
        transient: more bytes while it is in backward.
        static: bytes of weights, gradients and optimizer states.
    """

    forward: float
    backward: float
    kept: float
    transient: float
    static: float


def stages_of(profile: Profile, choice: StageChoice) -> tuple[Stage, ...]:
    """The stages of a choice, in the order in which a micro-batch passes them."""
    counts = stage_layers(choice.layers)
    ends = list(itertools.accumulate(counts))
    ranks, left = profile.ranks, list(choice.recompute)
    stages = []
    for stage, (count, end) in enumerate(zip(counts, ends, strict=True)):
        layers = profile.layers[end - count : end]
        again = min(left[stage % ranks], count)
        left[stage % ranks] -= again
        outer = [profile.first] * (stage == 0) + [profile.last] * (stage == len(counts) - 1)
        stages.append(_stage(layers, again, choice.module, outer))
    return tuple(stages)


def _stage(
    layers: Sequence[ProfiledLayer], again: int, module: str, ends: Sequence[EndLayers]
) -> Stage:
    parts: list[EndLayers] = [*layers, *ends]
    savings = [layer.recompute[module] for layer in layers[:again]]
    behind = sum(layer.activations for layer in layers[again:])
    transient = 0.0
    for layer, saving in zip(reversed(layers[:again]), reversed(savings), strict=True):
        transient = max(transient, saving.bytes - behind)
        behind += layer.activations - saving.bytes
    return Stage(
        forward=sum(part.forward for part in parts),
        backward=sum(part.backward for part in parts) + sum(one.seconds for one in savings),
        kept=sum(part.activations for part in parts) - sum(one.bytes for one in savings),
        transient=transient,
        static=sum(part.static for part in parts),
    )


@dataclass(frozen=True)
class StageCosts(Costs):
    """Costs of stages that differ in time and in memory; memory is in bytes.

    Attributes:
        stages: of the plan.
        weight_part: part of a backward that computes weight gradients.
    """

    stages: tuple[Stage, ...] = ()
    weight_part: float = 0.5

    def share(self, plan: Plan, stage: int) -> float:
        """Bytes of activations of ``stage``."""
        return self.stages[stage].kept

    def seconds(self, plan: Plan, action: Action) -> float:
        """Duration of ``action`` on its rank."""
        if action.microbatch is None:
            return 0.0
        stage = self.stages[action.stage]
        part = {"B": 1.0, "I": 1 - self.weight_part, "W": self.weight_part}.get(action.op, 0.0)
        whole = stage.forward if action.op in ("F", "Fc") else stage.backward * part
        return whole * plan.size(action.microbatch)


@dataclass(frozen=True)
class Price:
    """Price of a choice.

    Attributes:
        makespan: seconds of forward and backward of a step.
        peaks: bytes of each rank at its fullest moment.
        activations: bytes of activations of each rank at most.
        bubble: fraction of the step in which the mean rank waits.
    """

    makespan: float
    peaks: tuple[float, ...]
    activations: tuple[float, ...]
    bubble: float

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(self.peaks)


def simulated(
    profile: Profile, choice: StageChoice, stages: tuple[Stage, ...], count: int
) -> Simulation:
    """A step of ``count`` micro-batches, simulated with the costs of the profile."""
    costs = _of_the_filler(profile, stages)
    request = ScheduleRequest(choice.kind, sizes=choice.sizes, costs=costs)
    plan = build_plan(request, profile.ranks, profile.chunks, count)
    return simulate(plan, StageCosts(latency=profile.latency, stages=stages))


def _of_the_filler(profile: Profile, stages: Sequence[Stage]) -> Costs:
    """Costs by which weight gradients are placed: one share of a stage for time and memory."""
    forward = sum(stage.forward for stage in stages) / profile.ranks
    backward = sum(stage.backward for stage in stages) / profile.ranks
    shares = tuple((one.forward + one.backward) / (forward + backward) for one in stages)
    even = len({round(share, 12) for share in shares}) == 1
    return Costs(
        forward=forward,
        input_gradient=backward / 2,
        weight_gradient=backward / 2,
        latency=profile.latency,
        stage_shares=None if even else shares,
    )


def price_of(profile: Profile, choice: StageChoice) -> Price:
    """Makespan and peaks of a choice; long steps repeat the middle of shorter ones."""
    stages, count = stages_of(profile, choice), profile.num_microbatches
    p = profile.ranks
    if choice.sizes is not None or 2 * p * profile.chunks * count <= MOST_ACTIONS:
        simulation = simulated(profile, choice, stages, count)
        return _price(simulation, stages, simulation.makespan, simulation.useful)
    short = min(count, 4 * p + count % p)
    one = simulated(profile, choice, stages, short)
    other = simulated(profile, choice, stages, short + p)
    steps = (count - short) / p
    makespan = one.makespan + steps * (other.makespan - one.makespan)
    return _price(one, stages, makespan, one.useful + steps * (other.useful - one.useful))


def _price(
    simulation: Simulation, stages: Sequence[Stage], makespan: float, useful: float
) -> Price:
    plan = simulation.plan
    largest = max(map(plan.size, range(plan.num_microbatches)))  # relative to the mean
    activations = tuple(
        peak + largest * max(stages[stage].transient for stage in own)
        for peak, own in zip(simulation.peak_memory, plan.placement.stages, strict=True)
    )
    static = [sum(stages[stage].static for stage in own) for own in plan.placement.stages]
    peaks = tuple(a + b for a, b in zip(activations, static, strict=True))
    return Price(makespan, peaks, activations, 1 - useful / makespan)
