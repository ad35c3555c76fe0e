"""Counts steps of jobs, each in a forked process: ``python -m tests.planner.count_doors JSON``.

A job is (script or null for our trainer, flags, world size, rank).
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from typing import Any

import mindspeed.megatron_adaptor
from mindspeed.errors import ConfigError


def count(job: tuple[str | None, list[str], int, int]) -> dict[str, Any]:
    from mindspeed.planner.count.counted_step import count_step
    from mindspeed.planner.scripts import ScriptedJob
    from mindspeed.training.initialize import prepare

    script, flags, world_size, rank = job
    try:
        if script is None:
            args = prepare(["--dry-run", *flags], world_size).args
        else:
            args = ScriptedJob(script, flags).settings({}, world_size).args
        step = count_step(args, rank)
    except ConfigError as error:
        return {"error": str(error)}
    return {
        "micro_batches": step.micro_batches,
        "parameters": step.parameters,
        "static": dict(step.static),
        "peak": step.peak,
        "flops": (step.flops.total, step.flops.recompute),
        "communications": [
            (e.op, e.description, str(e.ranks), e.payload) for e in step.communications
        ],
    }


if __name__ == "__main__":
    import megatron.training  # shared by all processes

    assert mindspeed.megatron_adaptor and megatron.training
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        answers = pool.map(count, json.loads(sys.argv[1]), chunksize=1)
    print(json.dumps(answers, default=list))
