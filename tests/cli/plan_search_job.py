"""``mindspeed plan`` with an invented result of its search."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from mindspeed.planner.layout import Layout, Recompute
from mindspeed.planner.search.result import Candidate, SearchResult
from tests.support import commands_job

GIB = 2**30


@dataclass(frozen=True)
class Rank:
    static: dict[str, int]
    activations: int


@dataclass(frozen=True)
class Priced:
    seconds: float
    peak_bytes: int
    exposed: dict[str, float] = field(default_factory=dict)
    ranks: tuple[Rank, ...] = (Rank({"weights": GIB, "optimizer": 2 * GIB}, GIB),) * 2
    bubble: float = 0.125
    mfu: float = 0.4321
    tokens_per_second_per_device: float = 1234.4
    limit: str = "matrix products"
    parts: dict[str, float] = field(default_factory=dict)
    picture: Any = None
    uneven_seconds: float = 0.0


FLAGS = ("--model", "llama2-7b", "--bf16", "--tensor-model-parallel-size", "2",
         "--global-batch-size", "16", "--train-iters", "1", "--lr", "1e-4")  # fmt: skip
BEST = Layout(16, 16, tp=2, pp=2)
SLOW = Layout(16, 16, tp=4, recompute=Recompute(layers=-1))
CANDIDATES = (
    Candidate(BEST, Priced(1.5, 30 * GIB), FLAGS),
    Candidate(SLOW, Priced(1.53, 31 * GIB), FLAGS, estimated=True),
    Candidate(replace(BEST, pp=4), Priced(1.9, 20 * GIB), FLAGS),
)
FOUND = SearchResult("h100", 16, 77 * GIB, 1000, {"need more": 600, "no divisor": 300}, 100, 7,
             CANDIDATES, (CANDIDATES[0], CANDIDATES[2]), wall_seconds=12.3,
             assumed="one document each")  # fmt: skip


def invented(found: SearchResult = FOUND) -> tuple[Any, list[Any]]:
    """A module in the place of the search, and what it is called with."""
    calls: list[Any] = []

    def plan(flags: list[str], cluster: str, **options: Any) -> SearchResult:
        calls.append((flags, cluster, options))
        return replace(found, devices=options["devices"] or found.devices)

    return SimpleNamespace(plan=plan), calls


def run(words: list[str], directory: str) -> tuple[int, str, str]:
    """Run the command in a directory."""
    sys.modules["mindspeed.planner.search.plan"] = invented()[0]
    return commands_job.run(["plan", *words, *FLAGS], directory)
