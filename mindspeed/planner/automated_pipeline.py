"""The result of ``--automated-pipeline`` without a device: layers, recomputation and schedule.

    text = plan_pipeline(args, load_cluster("h100"))    # writes --automated-pipeline-file

``args`` are of a job with the flag, and that feature measures and searches: its profiler runs in
every pipeline rank on FakeTensors, where bytes are counted and seconds are those of the model of
time; profile and result are the files that it would have written.
"""

from __future__ import annotations

import argparse

from mindspeed.adaptor.pipeline_profile import (
    STEPS,
    Instruments,
    Profiler,
    RankPart,
    profile_of,
)
from mindspeed.features.automated_pipeline import AutomatedPipeline
from mindspeed.instruments.clock import VirtualClock
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.pipeline.automated.profile import Profile
from mindspeed.pipeline.automated.task import Task, report
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.feature_run import fake_rank, modelled_clock, wrapped_by, wrapper_of
from mindspeed.planner.rates import DeviceRates

FLAG = "--automated-pipeline"


def plan_pipeline(args: argparse.Namespace, cluster: Cluster) -> str:
    """Profile the job, search, and write both files; returns what to tell users.

    Args:
        args: final values, of a dry run of a job with the feature.
        cluster: rates of the model of time.

    Raises:
        ConfigError: the feature is off, or its result exists.
    """
    task, profile = profile_job(args, cluster)
    return report(task, profile).replace("measured", "counted and modelled", 1)


def profile_job(args: argparse.Namespace, cluster: Cluster) -> tuple[Task, Profile]:
    """What the feature is to find, and its profile; see :func:`plan_pipeline`."""
    attached = getattr(wrapper_of(AutomatedPipeline.name, FLAG), "__self__", None)
    assert isinstance(attached, Profiler)
    stages = range(args.pipeline_model_parallel_size)
    parts = [_part_of(args, cluster, attached.task, stage) for stage in stages]
    return attached.task, profile_of(parts, attached.task)


def _part_of(args: argparse.Namespace, cluster: Cluster, task: Task, stage: int) -> RankPart:
    """The figures of a pipeline rank."""
    from mindspeed.planner.step_of_rank import StepOfRank
    from mindspeed.training.fake_job import rank_in_stage

    ends = [rank_in_stage(args, number) for number in (0, 1)]
    clock = VirtualClock.of(DeviceRates(cluster))
    parts: list[RankPart] = []
    latency = cluster.collective_seconds("send", 4, ends)
    instruments = Instruments(lambda: clock.now, modelled_clock(cluster), latency, parts.append)
    with fake_rank(args, rank_in_stage(args, stage)) as own:
        profiler = Profiler(task, instruments)
        with wrapped_by(AutomatedPipeline.name, profiler.with_schedule):
            step = StepOfRank(own, LiveMemory())
            with clock:
                for _ in range(STEPS):
                    step.run()
    return parts[0]
