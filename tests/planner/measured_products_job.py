"""Measures the products of a tiny job on the ranks of a pool, by an injected clock."""

from __future__ import annotations

import os
from types import SimpleNamespace


class Clock:
    """Four parts take least; on the second rank two parts take longest. Each way runs once."""

    def __init__(self, rank: int) -> None:
        self._seconds = [4.0, 9.0 if rank else 1.0, 2.0, 3.0]
        self._calls = 0

    def time(self, run) -> SimpleNamespace:
        run()
        self._calls += 1
        return SimpleNamespace(seconds=self._seconds[(self._calls - 1) % 4])


def run(out: str) -> None:
    """Run the command on this rank."""
    from mindspeed.cli import main
    from mindspeed.planner.cluster import calibrate
    from tests.support.trainer_job import TINY

    before = calibrate.watch_of
    calibrate.watch_of = lambda settings: Clock(int(os.environ["RANK"]))
    model = [word for word in TINY if word != "--num-query-groups=2"]
    job = [*model, "--num-query-groups", "4", "--group-query-attention"]
    job += ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16"]
    try:
        assert main.dispatch("calibrate", ["--coc", out, "--", *job]) == 0
    finally:
        calibrate.watch_of = before
