"""Pipeline schedules as csv files: a line per rank, a cell per action.

    0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3
    1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3

Cells are written as in :mod:`actions`; empty cells are skipped. ``0F5&3B1`` is a pair
(:mod:`.pairs`). The ``compute_only`` files of torch.distributed.pipelining are read, and written
where they can say it: ``(0F5;3B1)OVERLAP_F_B`` is a pair, ``0REDUCE_GRAD`` is 0G. If there is no G
at all, each chunk gets one after its last gradient; where a plan has them there anyway, they are
not written, so that torch reads our files of F, I, W and B.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text
from mindspeed.parsing import read_text
from mindspeed.pipeline.schedule.actions import FORWARDS, REDUCE, Action
from mindspeed.pipeline.schedule.fill import with_reductions
from mindspeed.pipeline.schedule.pairs import problem_of
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan

_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_REDUCTION = re.compile(r"(\d+)REDUCE_GRAD")
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|(SEND|RECV)_[FB])\d*")


def write_plan(path: Path, plan: Plan) -> None:
    """Write the actions of ``plan`` in one step."""
    bare = _without_reductions(plan)
    rows = bare.rows if with_reductions(bare).rows == plan.rows else plan.rows
    written = replace(plan, rows=rows)
    text = (map(_cell, written.entries(rank)) for rank in range(len(rows)))
    atomic_write_text(path, "".join(",".join(row) + "\n" for row in text))


def read_plan(
    path: Path,
    *,
    ranks: int | None = None,
    chunks: int | None = None,
    num_microbatches: int | None = None,
) -> Plan:
    """The plan in a file; the placement of the stages follows from the actions.

    Args:
        path: csv file.
        ranks: p of the job, if the file has to have it.
        chunks: v of the job.
        num_microbatches: m of the job.

    Raises:
        ConfigError: the file cannot be read, a cell is no action, a stage is on no or two ranks,
            or the file is for another p, v or m.
    """
    rows, pairs = _rows(path)
    if not rows or not any(rows):
        raise ConfigError(f"{path}: no action in the file")
    placement = _placement(path, rows)
    microbatches = {a.microbatch for row in rows for a in row if a.microbatch is not None}
    if not microbatches:
        raise ConfigError(f"{path}: no micro-batch in the file")
    count = max(microbatches) + 1
    _compare(path, "pipeline ranks (lines)", placement.ranks, ranks)
    for rank, stages in enumerate(placement.stages):
        _compare(path, f"stages on rank {rank}", len(stages), chunks)
    _compare(path, "micro-batches", count, num_microbatches)
    plan = Plan(placement, tuple(rows), count, name=path.name, paired=frozenset(pairs))
    return plan if any(a.op == REDUCE for _, a in plan) else with_reductions(plan)


def _cell(members: tuple[Action, ...]) -> str:
    if len(members) == 1:
        return str(members[0])
    return f"({';'.join(map(str, members))})OVERLAP_F_B"


def _rows(path: Path) -> tuple[list[tuple[Action, ...]], set[Action]]:
    """The rows of a file, and the forwards of its pairs."""
    text = read_text(path, f"pipeline schedule {path}")
    try:
        lines = list(csv.reader(text.splitlines()))
    except csv.Error as error:
        raise ConfigError(f"{path}: not a csv file: {error}") from error
    while lines and not any(map(str.strip, lines[-1])):
        lines.pop()
    rows: list[tuple[Action, ...]] = []
    pairs: set[Action] = set()
    for number, line in enumerate(lines, 1):
        row: list[Action] = []
        for column, cell in enumerate(line, 1):
            try:
                found = _actions(cell.strip())
                row += found
                pairs.update(found[:1] if len(found) == 2 else ())
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}, column {column}: {error}") from error
        rows.append(tuple(row))
    return rows, pairs


def _actions(cell: str) -> list[Action]:
    if not cell:
        return []
    overlapped = _OVERLAPPED.fullmatch(cell)
    if overlapped is not None or "&" in cell:
        parts = overlapped[1].split(";") if overlapped else cell.split("&")
        return _pair(cell, [Action.parse(part.strip()) for part in parts])
    reduction = _REDUCTION.fullmatch(cell)
    if reduction is not None:
        return [Action(REDUCE, int(reduction[1]))]
    if _COMMUNICATION.fullmatch(cell):
        raise ValueError(
            f"{cell!r} is communication of torch's; write the file with format='compute_only'"
        )
    return [Action.parse(cell)]


def _pair(cell: str, members: list[Action]) -> list[Action]:
    members = sorted(members, key=lambda one: one.op not in FORWARDS)
    problem = "a pair has two members" if len(members) != 2 else problem_of(*members)
    if problem is not None:
        raise ValueError(f"{cell!r}: {problem}")
    return members


def _placement(path: Path, rows: list[tuple[Action, ...]]) -> Placement:
    where: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for stage in sorted({action.stage for action in row}):
            if where.setdefault(stage, rank) != rank:
                raise ConfigError(
                    f"{path}: stage {stage} is on rank {where[stage]} (line {where[stage] + 1}) "
                    f"and on rank {rank} (line {rank + 1})"
                )
    missing = sorted(set(range(max(where) + 1)) - set(where))[:1]
    if missing:
        raise ConfigError(
            f"{path}: stage {missing[0]} is on no rank, though there is a stage {max(where)}"
        )
    return Placement(
        tuple(tuple(s for s in sorted(where) if where[s] == rank) for rank in range(len(rows)))
    )


def _compare(path: Path, what: str, found: int, wanted: int | None) -> None:
    if wanted is not None and found != wanted:
        raise ConfigError(f"{path}: the schedule has {found} {what}, the job {wanted}")


def _without_reductions(plan: Plan) -> Plan:
    rows = (tuple(a for a in row if a.op != REDUCE) for row in plan.rows)
    return replace(plan, rows=tuple(rows))
