"""Will one configuration fit: the bytes, FLOPs and messages of all its pipeline ranks, counted.

    settings = prepare(["--dry-run", ...])
    found = check(settings.args, memory_limit=60 * 2**30, jobs=2)
    found.fits, found.ranks[0].peak

Every pipeline rank runs one step on FakeTensors (:mod:`mindspeed.planner.counted_step`) as the
first rank of its stage: tensor, context and data parallel ranks of a stage are alike. Ranks whose
figures are equal are put together.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from mindspeed.instruments.ledger import Communication
from mindspeed.planner import isolated
from mindspeed.planner.counted_step import CountedStep, count_step
from mindspeed.training.fake_job import rank_in_stage

Progress = Callable[[int, int], None]
"""Called with how many parts are done, and how many there are."""


@dataclass(frozen=True)
class Traffic:
    """What a rank sends through one process group by one operation, in a step.

    Attributes:
        group: what its creator calls it.
        size: ranks of the group.
        op: such as ``all_gather``, see :mod:`mindspeed.instruments.ledger`.
        calls: number; None: not known.
        payload: bytes of the tensors.
        wire: bytes that this rank sends.
    """

    group: str
    size: int
    op: str
    calls: int | None
    payload: int
    wire: int


@dataclass(frozen=True)
class RankCheck:
    """Pipeline ranks with the same figures.

    Attributes:
        pipeline_ranks: which.
        parameters: entries.
        static: bytes between steps, by kind.
        peak: most bytes alive at once.
        at_peak: these bytes, by kind.
        flops: executed in a step; recomputation is a part of it.
        recomputed: FLOPs of recomputation.
        traffic: by group and operation.
    """

    pipeline_ranks: tuple[int, ...]
    parameters: int
    static: Mapping[str, int]
    peak: int
    at_peak: Mapping[str, int]
    flops: int
    recomputed: int
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True)
class Check:
    """The figures of a configuration.

    Attributes:
        micro_batches: of a step, on one data-parallel rank.
        ranks: all pipeline ranks.
        memory_limit: bytes that the tensors of a rank may take; None: not known.
        composed: of small runs (:mod:`mindspeed.planner.composed`); otherwise counted as a whole.
    """

    micro_batches: int
    ranks: tuple[RankCheck, ...]
    memory_limit: int | None = None
    composed: bool = False

    @property
    def fullest(self) -> RankCheck:
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool | None:
        """Whether every rank stays within the limit; None without a limit."""
        return None if self.memory_limit is None else self.fullest.peak <= self.memory_limit


def check(
    args: argparse.Namespace,
    memory_limit: int | None = None,
    *,
    jobs: int = 1,
    progress: Progress = lambda done, of: None,
) -> Check:
    """Count a step of every pipeline rank.

    Args:
        args: final values, of a dry run; their features are attached.
        memory_limit: bytes that the tensors of a rank may take.
        jobs: processes that count.
        progress: is told how far it is.

    Raises:
        MindSpeedError: the step cannot be counted; says what is in the way.
    """
    steps: list[CountedStep] = []
    stages = args.pipeline_model_parallel_size
    progress(0, stages)
    for step in _count(args, range(stages), jobs):
        if isinstance(step, Exception):
            raise step
        steps.append(step)
        progress(len(steps), stages)
    ranks = [figures_of_step(stage, step) for stage, step in enumerate(steps)]
    return Check(steps[0].micro_batches, tuple(alike(ranks)), memory_limit)


def _count(
    args: argparse.Namespace, stages: Iterable[int], jobs: int
) -> Iterator[CountedStep | Exception]:
    return isolated.map(count_step, [(args, rank_in_stage(args, stage)) for stage in stages], jobs)


def alike(ranks: Iterable[RankCheck]) -> Iterator[RankCheck]:
    """Single pipeline ranks, those with equal figures together."""
    found: list[RankCheck] = []
    for one in ranks:
        for index, other in enumerate(found):
            if replace(other, pipeline_ranks=one.pipeline_ranks) == one:
                numbers = other.pipeline_ranks + one.pipeline_ranks
                found[index] = replace(other, pipeline_ranks=numbers)
                break
        else:
            found.append(one)
    yield from found


def figures_of_step(stage: int, step: CountedStep) -> RankCheck:
    """The figures of a counted step.

    Args:
        stage: pipeline rank.
        step: one of its ranks.
    """
    return RankCheck(
        (stage,),
        step.parameters,
        dict(step.static),
        step.peak,
        dict(step.at_peak),
        step.flops.total,
        step.flops.recompute,
        traffic(step.communications),
    )


def traffic(communications: Iterable[Communication]) -> tuple[Traffic, ...]:
    """Sums by group and operation, the most bytes sent first; groups of one rank are left out."""
    sums: dict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for one in communications:
        if len(one.ranks) > 1:
            found = sums[one.description, len(one.ranks), one.op]
            found[0] += 1
            found[1] += one.payload
            found[2] += one.wire
    rows = [Traffic(*key, *numbers) for key, numbers in sums.items()]
    return tuple(sorted(rows, key=lambda row: (-row.wire, row.group, row.op)))
