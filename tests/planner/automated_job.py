"""Results of an automated pipeline, made without a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.planner.real_and_fake import _args

FLAGS = (
    "--bf16 --num-layers 6 --pipeline-model-parallel-size 2 --global-batch-size 8 "
    "--seq-length 64 --train-iters 30"
)


def planned(flags: str, folder: str) -> dict[str, Any]:
    """Plan; then resolve the same flags, which find the result."""
    from mindspeed.errors import ConfigError
    from mindspeed.pipeline.automated.profile import read_profile
    from mindspeed.pipeline.automated.result import read_result
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.feature_plans import plan_pipeline

    path = Path(folder) / "plan.json"
    command = f"{FLAGS} {flags} --automated-pipeline-file {path}"
    text = plan_pipeline(_args(command, 2, "--dry-run"), load_cluster("h100"))
    again = ""
    started = _args(command, 2, "--dry-run")
    try:
        plan_pipeline(started, load_cluster("h100"))
    except ConfigError as error:
        again = str(error)
    return {
        "text": text,
        "profile": read_profile(path.with_suffix(".profile.json")),
        "result": read_result(path),
        "again": again,
        "list": started.recompute_module_list,
    }
