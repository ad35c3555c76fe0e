"""Follow the rows of a plan, without times, until all ranks are at their end or none can go on.

A rank goes on when the input of its next action is there. Inputs of another rank are messages. A
message has arrived once it has been sent; with one stream for both directions of a pair of ranks it
also has to be the first that both ranks have posted and not finished: a rank posts a send when it
has computed it, and its receives some actions ahead.
"""

from __future__ import annotations

from collections import defaultdict, deque

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import BACKWARDS, FORWARDS, Action
from mindspeed.pipeline.schedule.plan import Plan

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
    """How far every rank is."""

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
            action = row[position]
            message = self.source(action)
            if message is not None and not self._there(rank, message):
                self.asleep.add(rank)
                break
            if message is not None:
                self.requested[rank].discard(message)
            self.position[rank] += 1
            woken |= self._send(rank, action)
        return woken - {rank}

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
        """Who waits for whom, from a rank of the circle until that rank again."""
        path: list[int] = []
        while rank not in path:
            path.append(rank)
            rank = self._blocked(rank)[1]
        links: list[str] = []
        for one in path[path.index(rank) :]:
            message, other, cause = self._blocked(one)
            here = self.plan.rows[one][self.position[one]]
            who = f"rank {one}" if not links else "which"
            links.append(f"{who} at {here} waits for {cause} of rank {other}")
            if message in self.computed:
                links[-1] += self._order_in_stream(one, other)
        return ", ".join(links)

    def _blocked(self, rank: int) -> tuple[_Message, int, Action]:
        """What ``rank`` waits for, from which rank, and the action that makes it."""
        message = self.source(self.plan.rows[rank][self.position[rank]])
        assert message is not None
        return message, *self.sender(message)

    def _order_in_stream(self, rank: int, other: int) -> str:
        """Why a message that was sent does not arrive."""
        first, mine = self.posted[other, rank][0], self.posted[rank, other]
        return (
            f" (computed, but both directions share a stream, where rank {other} has posted "
            f"{self.sender(first)[1]} first and rank {rank} "
            f"{self.sender(mine[0])[1] if mine else 'nothing'})"
        )
