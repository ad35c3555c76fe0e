"""Check that a plan is a training step that ends; names the wrong action before any has run.

Five rules:

1. Each (stage, micro-batch) has one F, then one B, or one I and later one W; instead of F it may
   have Fc and later R; between I and W one O and later one L. Nothing else, and on its own rank.
2. The micro-batches of a chunk start in ascending order: data iterators are sequential.
3. No rank waits for ever: every rank follows its row, a message arrives after it has been sent.
   A pair starts when the inputs of both members are there, and both results are there at its end.
4. No rank keeps more activations than the memory limit allows.
5. Each chunk has one G, after its last gradient.

Takes time linear in the number of actions.

Rule 3 follows the rows without times until all ranks are at their end or none can go on. A rank
goes on when the input of its next action is there. Inputs of another rank are messages. A message
has arrived once it has been sent; with one stream for both directions of a pair of ranks it also
has to be the first that both ranks have posted and not finished: a rank posts a send when it has
computed it, and its receives some actions ahead.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import BACKWARDS, FORWARDS, Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.pairs import problem_of
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
    """Counts of the checker.

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
            if action in plan.paired:
                problem = problem_of(action, row[number] if number < len(row) else None)
            if problem is not None:
                pass
            elif stage not in own:
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
    """Change of a rank's memory by each action, in A."""
    late, kept = costs.weight_share, costs.input_share
    parts = {"F": 1.0, "Fc": kept, "R": 1 - kept, "B": -1.0}
    parts |= {"I": late - 1, "W": -late, "O": -late, "L": late}
    shares = {stage: costs.share(plan, stage) for stage in plan.placement.stages[rank]}
    for action in plan.rows[rank]:
        if action.microbatch is not None:
            size = plan.size(action.microbatch)
            yield action, parts[action.op] * shares[action.stage] * size


_Message = tuple[bool, int, int]  # forward, stage that receives, micro-batch


def follow(plan: Plan, name: str, prefetch: int, one_stream_per_pair: bool) -> tuple[int, ...]:
    """Run all rows; for each rank the most messages that it receives early.

    Raises:
        ConfigError: ranks wait for each other; with the chain of actions.
    """
    run = _Followed(plan, prefetch, one_stream_per_pair)
    ready = deque(range(len(plan.rows)))
    while ready:
        ready += run.advance(ready.popleft())
    for rank, row in enumerate(plan.rows):
        if run.position[rank] < len(row):
            raise ConfigError(f"{name} stops: {run.chain(rank)}")
    return tuple(run.early)


class _Followed:
    """Progress of every rank."""

    def __init__(self, plan: Plan, prefetch: int, one_stream_per_pair: bool) -> None:
        self.plan, self.prefetch, self.pair = plan, prefetch, one_stream_per_pair
        ranks, stages = range(len(plan.rows)), plan.placement.num_stages
        self.rank_of = [plan.placement.rank(stage) for stage in range(stages)]
        self.position = [0 for _ in ranks]
        self.computed: set[_Message] = set()  # outputs, by the stage that needs them
        self.arrived: set[_Message] = set()
        self.asleep: set[int] = set()
        # What a rank still has to post as received from another, in the order of the sender.
        self.expected = {ends: deque(sent) for ends, sent in plan.channels.items()}
        self.posted: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self.ahead = [0 for _ in ranks]  # actions whose receives are posted
        self.requested: list[set[_Message]] = [set() for _ in ranks]
        self.early = [0 for _ in ranks]

    def source(self, action: Action) -> _Message | None:
        """The message or local output that ``action`` needs."""
        forward = action.op in FORWARDS
        if not forward and action.op not in BACKWARDS:
            return None
        before = action.stage - 1 if forward else action.stage + 1
        if not 0 <= before < len(self.rank_of):
            return None
        assert action.microbatch is not None
        return forward, action.stage, action.microbatch

    def sender(self, message: _Message) -> tuple[int, Action]:
        """The action that makes a message, and its rank."""
        forward, stage, i = message
        before = stage - 1 if forward else stage + 1
        rank = self.rank_of[before]
        ops = FORWARDS if forward else BACKWARDS
        for action in self.plan.rows[rank]:
            if action.stage == before and action.microbatch == i and action.op in ops:
                return rank, action
        raise AssertionError(message)

    def advance(self, rank: int) -> set[int]:
        """Run ``rank`` as far as it gets; the ranks that may go on now."""
        row, woken = self.plan.rows[rank], set()
        while self.position[rank] < len(row):
            position = self.position[rank]
            woken |= self._post_receives(rank, position)
            members = self._members(rank)
            messages = [one for action in members if (one := self.source(action)) is not None]
            if not all(self._there(rank, message) for message in messages):
                self.asleep.add(rank)
                break
            self.requested[rank].difference_update(messages)
            self.position[rank] += len(members)
            for action in members:
                woken |= self._send(rank, action)
        return woken - {rank}

    def _members(self, rank: int) -> tuple[Action, ...]:
        """The next action of a rank, or the two of a pair: it starts when both inputs are there."""
        row, position = self.plan.rows[rank], self.position[rank]
        return row[position : position + 1 + (row[position] in self.plan.paired)]

    def _there(self, rank: int, message: _Message) -> bool:
        forward, stage, _ = message
        before = self.rank_of[stage - 1 if forward else stage + 1]
        return message in (self.arrived if self.pair and before != rank else self.computed)

    def _send(self, rank: int, action: Action) -> set[int]:
        forward = action.op in FORWARDS
        if not forward and action.op not in BACKWARDS:
            return set()
        after = action.stage + 1 if forward else action.stage - 1
        if not 0 <= after < len(self.rank_of):
            return set()
        assert action.microbatch is not None
        message = (forward, after, action.microbatch)
        self.computed.add(message)
        target = self.rank_of[after]
        if self.pair and target != rank:
            self.posted[rank, target].append(message)
            return self._transfer(rank, target)
        return self._wake(target)

    def _post_receives(self, rank: int, position: int) -> set[int]:
        """Post the receives of the actions up to ``position`` + prefetch."""
        woken: set[int] = set()
        end = min(position + self.prefetch + 1, len(self.plan.rows[rank]))
        requested = self.requested[rank]
        for action in self.plan.rows[rank][self.ahead[rank] : end]:
            message = self.source(action)
            if message is None or message in requested:
                continue
            forward, stage, _ = message
            other = self.rank_of[stage - 1 if forward else stage + 1]
            if other == rank:
                continue
            expected = self.expected[other, rank]
            while expected and message not in requested:
                transfer = expected.popleft()
                first = (transfer.forward, transfer.stage, transfer.microbatch)
                requested.add(first)
                if self.pair:
                    self.posted[rank, other].append(first)
            if self.pair:
                woken |= self._transfer(rank, other)
        self.ahead[rank] = end
        self.early[rank] = max(self.early[rank], len(requested))
        return woken

    def _transfer(self, rank: int, other: int) -> set[int]:
        """Finish the messages that are first in the streams of both ranks."""
        here, there = self.posted[rank, other], self.posted[other, rank]
        woken: set[int] = set()
        while here and there and here[0] == there[0]:
            self.arrived.add(here.popleft())
            there.popleft()
            woken |= self._wake(rank) | self._wake(other)
        return woken

    def _wake(self, rank: int) -> set[int]:
        if rank not in self.asleep:
            return set()
        self.asleep.discard(rank)
        return {rank}

    def chain(self, rank: int) -> str:
        """Chain of waiting ranks, from a rank of the circle until that rank again."""
        path: list[int] = []
        while rank not in path:
            path.append(rank)
            rank = self._blocked(rank)[1]
        links: list[str] = []
        for one in path[path.index(rank) :]:
            message, other, cause = self._blocked(one)
            here = "&".join(map(str, self._members(one)))
            who = f"rank {one}" if not links else "which"
            links.append(f"{who} at {here} waits for {cause} of rank {other}")
            if message in self.computed:
                links[-1] += self._order_in_stream(one, other)
        return ", ".join(links)

    def _blocked(self, rank: int) -> tuple[_Message, int, Action]:
        """Message that ``rank`` waits for, from which rank, and the action that makes it."""
        sources = map(self.source, self._members(rank))
        message = next(one for one in sources if one is not None and not self._there(rank, one))
        return message, *self.sender(message)

    def _order_in_stream(self, rank: int, other: int) -> str:
        """Why a message that was sent does not arrive."""
        first, mine = self.posted[other, rank][0], self.posted[rank, other]
        return (
            f" (computed, but both directions share a stream, where rank {other} has posted "
            f"{self.sender(first)[1]} first and rank {rank} "
            f"{self.sender(mine[0])[1] if mine else 'nothing'})"
        )
