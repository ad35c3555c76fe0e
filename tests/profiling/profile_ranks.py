"""Profiled loops with collectives, run inside rank processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.instruments import CommLedger
from mindspeed.profiling import ProfileOptions, profile


def loop(options: ProfileOptions, steps: int) -> list[int]:
    """Collectives per step, counted by the ledger in a first, unprofiled pass."""
    os.umask(0)
    group = dist.new_group(group_desc="TENSOR_MODEL_PARALLEL_GROUP")

    def step_of(number: int) -> None:
        for _ in range(number):
            dist.all_reduce(torch.ones(4), group=group)

    counts = []
    for number in range(1, steps + 1):
        with CommLedger() as ledger:
            step_of(number)
        counts.append(ledger.calls())
    with profile(options) as p:
        for number in range(1, steps + 1):
            step_of(number)
            p.step()
    return counts


def events(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace."""
    return json.loads(path.read_text())["traceEvents"]
