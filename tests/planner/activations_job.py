"""Plans of activations, made on FakeTensors and by a job that runs.

Both choose between four plans of a layer, those that the command chooses between are many more.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.memory.adaptive_ranks import few_plans
from tests.planner.real_and_fake import _args

FLAGS = (
    "--bf16 --num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 4 --seq-length 64 "
    "--train-iters 30"
)
FEATURE = " --adaptive-recompute-device-size 8"
CLUSTER = "h100"


def plan_activations(args: Any, budget: int) -> Any:
    """The plans of all stages."""
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.feature_plans import StageActivationPlans, plan_stage

    stages = range(args.pipeline_model_parallel_size)
    cluster = load_cluster(CLUSTER)
    return StageActivationPlans(
        budget, tuple(plan_stage(args, budget, cluster, one) for one in stages)
    )


def planned(budgets: list[int], world: int, folder: str) -> list[Any]:
    """For each budget the stages' plans, and bytes that each stage needs with the written file."""
    from mindspeed.errors import TrainingError
    from mindspeed.planner.count.counted_step import count_step

    args = _args(FLAGS + FEATURE, world, "--dry-run")
    results: list[Any] = []
    for budget in budgets:
        try:
            with few_plans():
                plan = plan_activations(args, budget)
        except TrainingError as error:
            results.append(str(error))
            continue
        flags = plan.write(Path(folder) / f"{budget}.json")
        results.append((plan, flags))
    for at, found in enumerate(results):
        if not isinstance(found, str):
            plan, flags = found
            own = _args(" ".join([FLAGS, *flags]), world, "--dry-run")
            peaks = [count_step(own, stage.rank).peak for stage in plan.stages]
            results[at] = plan, flags, peaks
    return results


def chosen_by_the_feature(budget: int) -> Any:
    """The choice of this rank of a job whose tensors are real."""
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.feature_plans import plan_here
    from mindspeed.training import setup

    args = _args(FLAGS + FEATURE, int(os.environ["WORLD_SIZE"]))
    args.check_for_nan_in_loss_and_grad = False
    setup.initialize(args)
    with few_plans():
        return plan_here(args, budget, load_cluster(CLUSTER), int(os.environ["RANK"]))


def refused(flags: str) -> str:
    """What is said of flags with which nothing can be planned."""
    from mindspeed.errors import ConfigError

    args = _args(FLAGS + flags, 2, "--dry-run")
    try:
        plan_activations(args, 2**30)
    except ConfigError as error:
        return str(error)
    return ""
