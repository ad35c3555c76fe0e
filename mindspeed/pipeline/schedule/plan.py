"""A pipeline schedule: one row of actions per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mindspeed.pipeline.schedule.actions import BACKWARDS, FORWARDS, Action
from mindspeed.pipeline.schedule.placement import Placement


@dataclass(frozen=True)
class Transfer:
    """A message between two ranks, which follows from an action.

    Attributes:
        source: rank that sends.
        target: rank that receives.
        forward: activations; otherwise their gradients.
        stage: that receives: it needs this message to start.
        microbatch: it belongs to.
    """

    source: int
    target: int
    forward: bool
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Plan:
    """What every rank does in one step.

    Attributes:
        placement: which rank has which stages.
        rows: the actions of each rank, in order.
        num_microbatches: m.
        sizes: samples of each micro-batch, where they differ; relative values are enough.
        name: of the schedule, for people.
    """

    placement: Placement
    rows: tuple[tuple[Action, ...], ...]
    num_microbatches: int
    sizes: tuple[float, ...] | None = None
    name: str = ""

    def size(self, microbatch: int) -> float:
        """Relative size of a micro-batch, 1 where all are equal."""
        return 1.0 if self.sizes is None else self.sizes[microbatch]

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Every (rank, action), rank by rank."""
        return ((rank, action) for rank, row in enumerate(self.rows) for action in row)

    def transfer_of(self, action: Action) -> Transfer | None:
        """The message that ``action`` sends to another rank, or None."""
        forward = action.op in FORWARDS
        if not forward and action.op not in BACKWARDS:
            return None
        stage = action.stage + 1 if forward else action.stage - 1
        if not 0 <= stage < self.placement.num_stages:
            return None
        source, target = self.placement.rank(action.stage), self.placement.rank(stage)
        assert action.microbatch is not None
        if source == target:
            return None
        return Transfer(source, target, forward, stage, action.microbatch)

    @cached_property
    def channels(self) -> dict[tuple[int, int], tuple[Transfer, ...]]:
        """For each (source, target) its messages, in the order in which the source sends them."""
        found: dict[tuple[int, int], list[Transfer]] = {}
        for _, action in self:
            if (transfer := self.transfer_of(action)) is not None:
                found.setdefault((transfer.source, transfer.target), []).append(transfer)
        return {ends: tuple(transfers) for ends, transfers in found.items()}
