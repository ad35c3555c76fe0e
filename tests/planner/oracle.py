"""Bytes of jobs on real ranks beside those of the planner.

python -m tests.planner.oracle                  # all jobs; a table with the seeds
python -m tests.planner.oracle "experts*" 3 7   # names as of a shell, and seeds
"""

from __future__ import annotations

import fnmatch
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.planner import walked
from tests.planner.oracle_jobs import LISTED, SEEDS, Job, draw

SETUP = "tests.support.warm"
ATTEMPTS = 40
"""Most jobs that are drawn for one seed."""


class Answer(NamedTuple):
    """What was compared.

    Attributes:
        job: the job.
        places: places of the step at which bytes were compared, of all compared ranks.
        differences: where real ranks and FakeTensors differ.
        spliced: actions at which spliced bytes were compared; or why they are not spliced.
        wrong: where they differ from those of real ranks.
    """

    job: Job
    places: int
    differences: list[str]
    spliced: int | str
    wrong: list[str]


def count(name: str | int) -> tuple[Job, list[list[walked.Reading]]]:
    """A listed job, or the first of a seed that the planner and the trainer accept.

    Runs in an own process; also returns what the planner counts on its :func:`compared` ranks.
    """
    from mindspeed.errors import MindSpeedError
    from tests.planner.real_and_fake import _args

    drawn = not isinstance(name, str)
    for job in (draw(name, n) for n in range(ATTEMPTS)) if drawn else [LISTED[name]]:
        os.environ["LOCAL_WORLD_SIZE"] = str(job.ranks_per_node or job.world)
        try:
            _args(job.flags, job.world, "--dry-run")
            return job, walked.fake(job.flags, job.world, compared(job), job.imbalance)
        except (MindSpeedError, SystemExit, AssertionError, ValueError) as error:
            if not drawn:
                raise
            print(f"seed {name}: {error}", file=sys.stderr)
    raise AssertionError(f"seed {name} has no valid job")


def stages_of(job: Job) -> int:
    """Pipeline stages of a job."""
    words = job.flags.split()
    sizes = [int(words[i + 1]) for i, word in enumerate(words) if "--pipeline-model-p" in word]
    return max(sizes, default=1)


def compared(job: Job) -> list[int]:
    """The first rank, and the first one of the last stage or the last of all."""
    stages = stages_of(job)
    return [0, job.world - job.world // stages if stages > 1 else job.world - 1]


def ask(pool: Any, name: str | int, *, spliced: bool = True) -> Answer:
    """Compare a job.

    Args:
        pool: runs functions on ranks (fixture ``ranks``).
        name: name of a listed one, or the seed of one that is drawn.
        spliced: compare spliced bytes, too.
    """
    options: dict[str, Any] = {"setup": SETUP, "backend": None, "timeout": 240}
    ((job, counted),) = pool(1, count, name, **options)
    options["env"] = {"LOCAL_WORLD_SIZE": str(job.ranks_per_node or job.world)}
    ranks, stages = compared(job), stages_of(job)
    real = pool(job.world, walked.real, job.flags, counted, ranks, job.imbalance, **options)
    differences = []
    for rank, one in zip(ranks, counted, strict=True):
        assert len(one) >= 4
        differences += [f"rank {rank}: {x}" for x in walked.differences(real[rank], one)]
    found: int | str = "of balanced experts only"
    wrong: list[str] = []
    one_of = dict(zip(ranks, counted, strict=True))
    if spliced and job.imbalance == 1:
        traced = [0, stages - 1] if stages > 1 else [0]
        (said,) = pool(1, walked.spliced, job.flags, job.world, traced, **options)
        found = said if isinstance(said, str) else 0
        if not isinstance(said, str):
            for rank, levels in zip(ranks, said, strict=False):
                pairs = zip(real[rank], one_of[rank], strict=True)
                own = [a.alive - b.host for a, b in pairs if a.place in walked.ACTIONS]
                found += len(levels)
                wrong += [f"rank {rank}: {x}" for x in _unequal(own, levels)]
    places = sum(map(len, counted))
    return Answer(job, places, differences, found, wrong)


def _unequal(own: Sequence[int], levels: Sequence[int]) -> list[str]:
    if len(own) != len(levels):
        return [f"{len(own)} actions, {len(levels)} of them spliced"]
    pairs = enumerate(zip(own, levels, strict=True))
    return [f"action {index}: {a - b:+d}" for index, (a, b) in pairs if a != b]


def main(words: Sequence[str]) -> int:
    """Print the table; the number of jobs that differ."""
    from mindspeed.testing import RankError, RankPool

    patterns = [one for one in words if not one.isdigit()]
    seeds = [int(one) for one in words if one.isdigit()]
    names: list[str | int] = [
        name for name in LISTED if any(fnmatch.fnmatch(name, one) for one in patterns or ["*"])
    ]
    names = [*([] if seeds and not patterns else names), *(seeds or ([] if patterns else SEEDS))]
    sums: Counter[str] = Counter()
    print("| job | ranks | places | real = fake | actions | real = spliced | s |")
    print("|---|---|---|---|---|---|---|")
    with RankPool() as pool:
        for name in names:
            start = time.monotonic()
            label = name if isinstance(name, str) else f"seed {name}"
            try:
                found = ask(pool.run, name)
            except (RankError, AssertionError) as error:
                sums["failed"] += 1
                print(f"| {label} | failed: {str(error)[-400:]!r} |", flush=True)
                continue
            spliced = found.spliced if isinstance(found.spliced, int) else "whole"
            same = "; ".join(found.differences[:3]) or "equal"
            there = "; ".join(found.wrong[:3]) or "equal"
            if spliced == "whole":
                there = str(found.spliced)[:100]
            seconds = time.monotonic() - start
            row = label, found.job.world, found.places, same, spliced, there, f"{seconds:.0f}"
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            if isinstance(name, int):
                print(f"|   {found.job.flags} |", flush=True)
            sums[f"{found.job.world} ranks"] += 1
            sums["places"] += found.places
            sums["differ"] += bool(found.differences)
            sums["spliced"] += isinstance(found.spliced, int)
            sums["spliced differ"] += bool(found.wrong)
    print(", ".join(f"{name}: {count}" for name, count in sums.items()))
    return sums["differ"] + sums["spliced differ"] + sums["failed"]


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
