"""Is a plan a training step that ends? Says which action is wrong before any has run.

Five rules:

1. Each (stage, micro-batch) has one F, then one B, or one I and later one W; instead of F it may
   have Fc and later R; between I and W one O and later one L. Nothing else, and on its own rank.
2. The micro-batches of a chunk start in ascending order: data iterators are sequential.
3. No rank waits for ever: every rank follows its row, a message arrives after it has been sent.
4. No rank keeps more activations than the memory limit allows.
5. Each chunk has one G, after its last gradient.

Takes time linear in the number of actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.deadlock import follow
from mindspeed.pipeline.schedule.plan import Plan

# The state of the activations of a (stage, micro-batch): op -> {state before: state after}.
_NEW, _INPUT, _KEPT, _PENDING, _AWAY, _BACK, _DONE = range(7)
_AFTER: dict[str, dict[int, int]] = {
    "F": {_NEW: _KEPT},
    "Fc": {_NEW: _INPUT},
    "R": {_INPUT: _KEPT},
    "B": {_KEPT: _DONE},
    "I": {_KEPT: _PENDING},
    "O": {_PENDING: _AWAY},
    "L": {_AWAY: _BACK},
    "W": {_PENDING: _DONE, _BACK: _DONE},
}
_MISSING = {
    _NEW: "F",
    _INPUT: "R",
    _KEPT: "B (or I and W)",
    _PENDING: "W",
    _AWAY: "L",
    _BACK: "W",
}
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Checked:
    """What the checker has counted.

    Attributes:
        peak_memory: for each rank the most activations alive, in A, in the order of its row.
        early_receives: for each rank the most messages that arrive before they are used, if its
            receives are posted ``prefetch`` actions ahead, in the order of their senders.
    """

    peak_memory: tuple[float, ...]
    early_receives: tuple[int, ...]


def check(
    plan: Plan,
    memory_limit: float | None = None,
    costs: Costs | None = None,
    *,
    forward_only: bool = False,
    one_stream_per_pair: bool = False,
    prefetch: int = 2,
) -> Checked:
    """Check ``plan``.

    Args:
        plan: to be executed.
        memory_limit: most activations of a rank, in A.
        costs: the parts of the activations that stages, Fc and W keep.
        forward_only: an evaluation: forwards and nothing else.
        one_stream_per_pair: both directions between two ranks share one stream, which transfers
            in the order of posting on both sides. Each direction has its own otherwise.
        prefetch: receives are posted this many actions ahead.

    Raises:
        ConfigError: the plan breaks a rule; names rank and action.
    """
    name = f"the pipeline schedule {plan.name}".rstrip()
    if plan.sizes is not None and len(plan.sizes) != plan.num_microbatches:
        raise ConfigError(
            f"{name} has {plan.num_microbatches} micro-batches, but {len(plan.sizes)} sizes"
        )
    _check_actions(plan, name, forward_only)
    early = follow(plan, name, prefetch, one_stream_per_pair)
    peaks = tuple(
        _peak(plan, name, rank, costs or Costs(), memory_limit) for rank in range(len(plan.rows))
    )
    return Checked(peaks, early)


def _check_actions(plan: Plan, name: str, forward_only: bool) -> None:
    """Rules 1, 2 and 5."""
    m, stages = plan.num_microbatches, plan.placement.num_stages
    states = [[_NEW] * m for _ in range(stages)]
    unfinished = [m] * stages  # whose gradients are complete
    reduced = [False] * stages
    following = [0] * stages  # the micro-batch that starts next
    if len(plan.rows) != plan.placement.ranks:
        raise ConfigError(f"{name} has {len(plan.rows)} rows for {plan.placement.ranks} ranks")
    for rank, row in enumerate(plan.rows):
        own = frozenset(plan.placement.stages[rank])
        for number, action in enumerate(row, 1):
            op, stage, i = action
            problem = None
            if stage not in own:
                problem = _wrong_stage(plan, stage)
            elif i is None:
                if unfinished[stage]:
                    problem = "comes before the last gradient of its stage"
                elif reduced[stage]:
                    problem = "reduces a second time"
                reduced[stage] = True
            elif not 0 <= i < m:
                problem = f"the micro-batches are 0 to {m - 1}"
            else:
                after = _AFTER[op].get(states[stage][i])
                if after is None:
                    problem = _wrong_order(action, states[stage][i])
                elif op in ("F", "Fc"):
                    if i != following[stage]:
                        problem = f"starts before {stage}F{following[stage]}"
                    following[stage] = i + 1
                if after is not None:
                    states[stage][i] = after
                unfinished[stage] -= after == _DONE
            if problem is not None:
                raise ConfigError(f"{name}: rank {rank}, action {number}, {action}: {problem}")
    _check_complete(plan, name, states, reduced, forward_only)


def _check_complete(
    plan: Plan, name: str, states: list[list[int]], reduced: list[bool], forward_only: bool
) -> None:
    end = _KEPT if forward_only else _DONE
    for stage, found in enumerate(states):
        rank = plan.placement.rank(stage)
        for i, state in enumerate(found):
            if state != end:
                what = _MISSING.get(state, "nothing but a forward")
                raise ConfigError(f"{name}: rank {rank} has no {stage}{what} of micro-batch {i}")
        if not reduced[stage] and not forward_only:
            raise ConfigError(f"{name}: rank {rank} has no {stage}G")


def _wrong_stage(plan: Plan, stage: int) -> str:
    if not 0 <= stage < plan.placement.num_stages:
        return f"the stages are 0 to {plan.placement.num_stages - 1}"
    return f"stage {stage} is on rank {plan.placement.rank(stage)}"


def _wrong_order(action: Action, state: int) -> str:
    op, stage, i = action
    if state == _DONE:
        return "comes after the backward"
    if state == _INPUT:
        return f"needs {stage}R{i} before it"
    before = {"B": "F", "R": "Fc", "I": "F", "W": "I", "O": "I", "L": "O"}.get(op)
    if before is None or state != _NEW:
        return "is there a second time, or another has taken its place"
    return f"needs {stage}{before}{i} before it"


def _peak(plan: Plan, name: str, rank: int, costs: Costs, limit: float | None) -> float:
    """Rule 4."""
    memory = peak = 0.0
    for action, change in _changes(plan, rank, costs):
        memory += change
        if memory > peak:
            peak = memory
            if limit is not None and peak > limit + _ROUNDING:
                raise ConfigError(
                    f"{name}: rank {rank} keeps {peak:g} A of activations at {action}; "
                    f"{limit:g} A are allowed (--pipeline-memory-limit)"
                )
    return peak


def _changes(plan: Plan, rank: int, costs: Costs) -> Iterator[tuple[Action, float]]:
    """How every action of a rank changes its memory, in A."""
    late, kept = costs.weight_share, costs.input_share
    parts = {"F": 1.0, "Fc": kept, "R": 1 - kept, "B": -1.0}
    parts |= {"I": late - 1, "W": -late, "O": -late, "L": late}
    shares = {stage: costs.share(plan, stage) for stage in plan.placement.stages[rank]}
    for action in plan.rows[rank]:
        if action.microbatch is not None:
            size = plan.size(action.microbatch)
            yield action, parts[action.op] * shares[action.stage] * size
