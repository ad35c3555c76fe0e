"""Compute, without a device, the results of features that measure a job in its first steps.

    found = plan_stage(args, budget, load_cluster("h100"), stage=0)
    ActivationPlan(budget, (found,)).write(Path("a.json"))  # --activation-plan a.json
    text = plan_pipeline(args, load_cluster("h100"))    # writes --automated-pipeline-file

These features wrap the function that runs the micro-batches of a step (seam ``schedule``). Here the
same wrapper runs on FakeTensors with other instruments: bytes are counted, seconds are modelled.

* ``--adaptive-recompute-device-size`` (:mod:`mindspeed.memory.adaptive`) tries the plans of a
  layer, solves for a fraction of the budget, and adapts the fraction to the bytes of real steps.
* ``--automated-pipeline`` profiles each pipeline rank and searches layers, recomputation and
  schedule; it writes the same files as the feature in a training.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed import device, session
from mindspeed.adaptor.pipeline_profile import (
    STEPS,
    Instruments,
    Profiler,
    RankPart,
    profile_of,
)
from mindspeed.device import Device
from mindspeed.device.base import MemoryStats
from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text
from mindspeed.flags import read
from mindspeed.instruments.clock import VirtualClock
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.job import Parallel
from mindspeed.journal import Journal
from mindspeed.memory.adaptive import SHARES, BudgetSettings
from mindspeed.memory.estimate import Clock
from mindspeed.memory.plan import LayerPlan
from mindspeed.pipeline.automated.profile import Profile
from mindspeed.pipeline.automated.task import ProfiledJob, report
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.cluster.rates import DeviceRates, clock_of
from mindspeed.planner.count.fake_world import fake_world
from mindspeed.planner.count.planned_tensors import PlannedTensors
from mindspeed.planner.shape import FeatureFlags

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class CountedDevice:
    """A device with counted memory.

    Args:
        device: the device of this process, for everything else.
    """

    def __init__(self, device: Device, memory: LiveMemory) -> None:
        self._device, self._memory = device, memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def reset_peak_memory(self) -> None:
        """Set the peak to the bytes alive now."""
        self._memory.restart()

    def memory_stats(self) -> MemoryStats:
        """Counted bytes of tensors."""
        stats = self._device.memory_stats()
        return replace(stats, allocated=self._memory.total, peak=self._memory.peak)


def modelled_clock(cluster: Cluster) -> Clock:
    """Make a function that times another one by the model of a cluster."""

    def seconds(run: Callable[[], object]) -> float:
        with VirtualClock.of(DeviceRates(cluster)) as clock:
            run()
        return clock.now

    return seconds


@contextlib.contextmanager
def fake_rank(args: argparse.Namespace, rank: int) -> Iterator[argparse.Namespace]:
    """Make this process a global rank of the job, on FakeTensors; yields a copy of its values."""
    with fake_world(args, rank) as own, PlannedTensors():
        yield own


def wrapper_of(feature: str, flag: str) -> Wrapper:
    """The function with which a feature wraps the schedule.

    Raises:
        ConfigError: the feature is off.
    """
    for owner, function in session.install().seams.schedule.functions:
        if owner == feature:
            return function
    raise ConfigError(f"{flag} measures nothing in this job: it is off, or has its result already")


@contextlib.contextmanager
def wrapped_by(feature: str, wrapper: Wrapper) -> Iterator[None]:
    """Replace the schedule wrapper of a feature inside the block."""
    seam, journal = session.install().seams.schedule, Journal()
    changed = [
        (owner, wrapper if owner == feature else function) for owner, function in seam.functions
    ]
    journal.set(seam, "functions", changed, owner="planner")
    try:
        yield
    finally:
        journal.undo()


ADAPTIVE, ADAPTIVE_FLAG = "adaptive-memory", "--adaptive-recompute-device-size"
PROFILED = 3
"""Steps before the first plan; the first step creates optimizer states."""


@dataclass(frozen=True)
class StagePlan:
    """The activation plan of one pipeline stage.

    Attributes:
        rank: the counted rank.
        peaks: peak bytes of each step: under the plan that keeps least, then under successive
            plans, up to ``layers``, the last one that fits.
        layers: number of each layer in the model (None: layers of multi-token prediction) and
            actions of its sites. Sites without an action keep their activations.
        seconds: modelled seconds that the plan adds to a micro-batch.
        least: smallest predicted peak of any plan, in bytes.
    """

    rank: int
    peaks: tuple[int, ...]
    layers: tuple[tuple[int | None, LayerPlan], ...]
    seconds: float
    least: int

    @property
    def peak(self) -> int:
        """Peak bytes of a step under the plan."""
        return self.peaks[-1]


@dataclass(frozen=True)
class StageActivationPlans:
    """The activation plans of all stages.

    Attributes:
        budget: bytes of a device for tensors.
        stages: plans in the order of pipeline ranks.
    """

    budget: int
    stages: tuple[StagePlan, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage is within the budget."""
        return all(stage.peak <= self.budget for stage in self.stages)

    def rules(self) -> dict[str, dict[str, str]]:
        """The content of a file for ``--activation-plan``."""
        layers = [layer for stage in self.stages for layer in stage.layers if layer[1]]
        numbered = sorted((n, _words(sites)) for n, sites in layers if n is not None)
        found = {}
        for first, last, sites in _runs(numbered):
            found[str(first) if first == last else f"{first}-{last}"] = sites
        predicting = [sites for number, sites in layers if number is None]
        return found | ({"mtp": _words(predicting[0])} if predicting else {})

    def write(self, path: Path) -> list[str]:
        """Write the file; returns the flags that use it: none if everything is kept."""
        rules = self.rules()
        if not rules:
            return []
        atomic_write_text(path, json.dumps(rules, indent=1) + "\n")
        return ["--activation-plan", str(path)]


def plan_stage(args: argparse.Namespace, budget: int, cluster: Cluster, stage: int) -> StagePlan:
    """Choose the activation plan of one pipeline stage.

    Args:
        args: final values, of a dry run of a job with the feature.
        budget: bytes of a device for tensors.

    Raises:
        ConfigError: the feature is off.
        TrainingError: no plan fits; has the smallest peak.
    """
    from mindspeed.training.fake_job import rank_in_stage

    wrapper_of(ADAPTIVE, ADAPTIVE_FLAG)
    rank = rank_in_stage(args, stage)
    with fake_rank(args, rank) as own:
        return plan_here(own, budget, cluster, rank)


def plan_here(args: argparse.Namespace, budget: int, cluster: Cluster, rank: int) -> StagePlan:
    """Choose the plan of the stage of this process, whose process groups exist."""
    from mindspeed.memory.adaptive.megatron import Controller
    from mindspeed.memory.megatron import chunk_layers
    from mindspeed.planner.count.loop import StepOfRank

    settings, journal = _settings(args, budget), Journal()
    peaks: list[int] = []
    with LiveMemory() as memory:
        here: Any = CountedDevice(device.current(), memory)
        controller = Controller(settings, here, journal, lambda _: None, modelled_clock(cluster))
        with wrapped_by(ADAPTIVE, controller.with_schedule):
            step = StepOfRank(args, memory)
            tried = []
            for number in range(PROFILED + len(SHARES)):
                solution, plans = controller.solution, controller.plans()
                step.run()
                peaks.append(max(controller.peak, memory.peak))
                if solution is not None:
                    tried.append((number, solution, plans))
        # The last plan is for all of the budget by prediction, of which a step may need a bit more.
        fitting = [one for one in tried if peaks[one[0]] <= budget]
        last, chosen, plans = (fitting or tried)[-1]
        chunks = controller.chunks
        numbers = [
            chunk_layers(chunk, step.model.config, at if len(chunks) > 1 else None).numbers
            for at, chunk in enumerate(chunks)
        ]
        layers = tuple(
            (numbers[at][path], dict(sites))
            for at, found in enumerate(plans)
            for path, sites in found.items()
        )
        smallest = controller.smallest_peak()
        journal.undo()
    assert smallest is not None  # else an error was raised
    return StagePlan(rank, tuple(peaks[: last + 1]), layers, chosen.seconds, smallest.peak)


def _settings(args: argparse.Namespace, budget: int) -> BudgetSettings:
    flags = read(FeatureFlags, args)
    if flags.adaptive_memory_optimization or flags.adaptive_recompute_device_swap:
        raise ConfigError(
            "--adaptive-memory-optimization and --adaptive-recompute-device-swap choose by the "
            "speed of copies to the host, which is measured, not modelled: plan without them"
        )
    return BudgetSettings(ADAPTIVE_FLAG, budget, 0, PROFILED)


def _words(sites: LayerPlan) -> dict[str, str]:
    return {site: action.value for site, action in sorted(sites.items())}


def _runs(layers: list[tuple[int, dict[str, str]]]) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Group consecutive layers with equal actions: first and last number, and actions."""

    def run_key(item: tuple[int, tuple[int, dict[str, str]]]) -> Any:
        index, (number, sites) = item
        return number - index, sites

    for _, group in itertools.groupby(enumerate(layers), run_key):
        numbers = [layer for _, layer in group]
        yield numbers[0][0], numbers[-1][0], numbers[0][1]


AUTOMATED, AUTOMATED_FLAG = "automated-pipeline", "--automated-pipeline"


def plan_pipeline(args: argparse.Namespace, cluster: Cluster) -> str:
    """Profile the job, search, and write both files; returns a report for users.

    Args:
        args: final values, of a dry run of a job with the feature.

    Raises:
        ConfigError: the feature is off, or its result exists.
    """
    task, profile = profile_job(args, cluster)
    return report(task, profile).replace("measured", "counted and modelled", 1)


def profile_job(args: argparse.Namespace, cluster: Cluster) -> tuple[ProfiledJob, Profile]:
    """The feature's task and the profile of the job; see :func:`plan_pipeline`."""
    attached = getattr(wrapper_of(AUTOMATED, AUTOMATED_FLAG), "__self__", None)
    assert isinstance(attached, Profiler)
    stages = range(Parallel.of(args).pipeline)
    parts = [_part_of(args, cluster, attached.task, stage) for stage in stages]
    return attached.task, profile_of(parts, attached.task)


def _part_of(args: argparse.Namespace, cluster: Cluster, task: ProfiledJob, stage: int) -> RankPart:
    """Profile a pipeline rank."""
    from mindspeed.planner.count.loop import StepOfRank
    from mindspeed.training.fake_job import rank_in_stage

    ends = [rank_in_stage(args, number) for number in (0, 1)]
    clock = clock_of(cluster, args)
    parts: list[RankPart] = []
    latency = cluster.collective_seconds("send", 4, ends)
    instruments = Instruments(lambda: clock.now, modelled_clock(cluster), latency, parts.append)
    with fake_rank(args, rank_in_stage(args, stage)) as own:
        profiler = Profiler(task, instruments)
        with wrapped_by(AUTOMATED, profiler.with_schedule):
            step = StepOfRank(own, LiveMemory())
            with clock:
                for _ in range(STEPS):
                    step.run()
    return parts[0]
