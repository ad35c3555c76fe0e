"""Activations within a memory budget, without a device: what is kept, recomputed or offloaded.

    plan = plan_activations(args, 60 * 2**30, load_cluster("h100"))
    plan.write(Path("activations.json"))     # --activation-plan activations.json

``args`` are of a job with ``--adaptive-recompute-device-size``, and that feature chooses
(:mod:`mindspeed.memory.adaptive`): it tries the plans of a layer, solves for a part of the budget,
and comes closer to it by what steps really need. Here these steps run on FakeTensors: what they
need is counted to the byte, what second runs take is modelled.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed import device
from mindspeed.errors import ConfigError
from mindspeed.features.adaptive_memory import AdaptiveMemory
from mindspeed.files import atomic_write_text
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.journal import Journal
from mindspeed.memory.adaptive import SHARES
from mindspeed.memory.adaptive.settings import Settings
from mindspeed.memory.plan import LayerPlan
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.feature_run import (
    CountedDevice,
    fake_rank,
    modelled_clock,
    wrapped_by,
    wrapper_of,
)

FLAG = "--adaptive-recompute-device-size"
PROFILED = 3
"""Steps before the first plan: the first one makes the optimizer's states."""


@dataclass(frozen=True)
class StagePlan:
    """The choice for one pipeline stage.

    Attributes:
        rank: the one that was counted.
        peaks: bytes of tensors in each step: under the plan that keeps least, then under one plan
            after the other; the last one is that of ``layers``.
        layers: number of each layer in the model -> actions of its sites; None: the layers of
            multi-token prediction. Sites without one keep their activations.
        seconds: modelled time that is added to a micro-batch.
        least: bytes of the smallest peak that is predicted of any plan.
    """

    rank: int
    peaks: tuple[int, ...]
    layers: tuple[tuple[int | None, LayerPlan], ...]
    seconds: float
    least: int

    @property
    def peak(self) -> int:
        """Bytes of tensors at the fullest moment of a step under the plan."""
        return self.peaks[-1]


@dataclass(frozen=True)
class ActivationPlan:
    """The choice for all stages.

    Attributes:
        budget: bytes.
        stages: in the order of the pipeline's ranks.
    """

    budget: int
    stages: tuple[StagePlan, ...]

    @property
    def fits(self) -> bool:
        """No stage needs more than the budget."""
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
        """Write the file; returns the flags that take it: none where everything is kept."""
        rules = self.rules()
        if not rules:
            return []
        atomic_write_text(path, json.dumps(rules, indent=1) + "\n")
        return ["--activation-plan", str(path)]


def plan_activations(args: argparse.Namespace, budget: int, cluster: Cluster) -> ActivationPlan:
    """Choose for every pipeline stage, one after the other.

    Args:
        args: final values, of a dry run of a job with the feature.
        budget: bytes of a device for tensors.
        cluster: rates for the model of time.

    Raises:
        ConfigError: the feature is off.
        TrainingError: no plan fits; has the smallest peak.
    """
    stages = range(args.pipeline_model_parallel_size)
    return ActivationPlan(
        budget, tuple(plan_stage(args, budget, cluster, stage) for stage in stages)
    )


def plan_stage(args: argparse.Namespace, budget: int, cluster: Cluster, stage: int) -> StagePlan:
    """Choose for one pipeline stage; see :func:`plan_activations`."""
    from mindspeed.training.fake_job import rank_in_stage

    wrapper_of(AdaptiveMemory.name, FLAG)
    rank = rank_in_stage(args, stage)
    with fake_rank(args, rank) as own:
        return plan_here(own, budget, cluster, rank)


def plan_here(args: argparse.Namespace, budget: int, cluster: Cluster, rank: int) -> StagePlan:
    """Choose for the stage of this process, whose process groups exist."""
    from mindspeed.memory.adaptive.megatron import Controller
    from mindspeed.memory.megatron import chunk_layers
    from mindspeed.planner.step_of_rank import StepOfRank

    settings, journal = _settings(args, budget), Journal()
    peaks: list[int] = []
    with LiveMemory() as memory:
        here: Any = CountedDevice(device.current(), memory)
        controller = Controller(settings, here, journal, lambda _: None, modelled_clock(cluster))
        with wrapped_by(AdaptiveMemory.name, controller.with_schedule):
            step = StepOfRank(args, memory)
            for _ in range(PROFILED + len(SHARES)):
                step.run()
                peaks.append(max(controller.peak, memory.peak))
        chunks = controller.chunks
        numbers = [
            chunk_layers(chunk, step.model.config, at if len(chunks) > 1 else None).numbers
            for at, chunk in enumerate(chunks)
        ]
        layers = tuple(
            (numbers[at][path], dict(sites))
            for at, found in enumerate(controller.plans())
            for path, sites in found.items()
        )
        chosen, smallest = controller.solution, controller.smallest_peak()
        journal.undo()
    assert chosen is not None and smallest is not None  # else an error was raised
    return StagePlan(rank, tuple(peaks), layers, chosen.seconds, smallest.peak)


def _settings(args: argparse.Namespace, budget: int) -> Settings:
    if args.adaptive_memory_optimization or args.adaptive_recompute_device_swap:
        raise ConfigError(
            "--adaptive-memory-optimization and --adaptive-recompute-device-swap choose by the "
            "speed of copies to the host, which is measured, not modelled: plan without them"
        )
    return Settings(FLAG, budget, 0, PROFILED)


def _words(sites: LayerPlan) -> dict[str, str]:
    return {site: action.value for site, action in sorted(sites.items())}


def _runs(layers: list[tuple[int, dict[str, str]]]) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Neighbours with equal actions: first and last number."""

    def together(at: tuple[int, tuple[int, dict[str, str]]]) -> Any:
        place, (number, sites) = at
        return number - place, sites

    for _, group in itertools.groupby(enumerate(layers), together):
        numbers = [layer for _, layer in group]
        yield numbers[0][0], numbers[-1][0], numbers[0][1]
