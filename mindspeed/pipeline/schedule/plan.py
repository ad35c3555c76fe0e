"""A pipeline schedule: one row of actions per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from mindspeed.pipeline.schedule.actions import (
    BACKWARDS,
    FORWARD_INPUT_ONLY,
    FORWARDS,
    Action,
)
from mindspeed.pipeline.schedule.placement import Placement


@dataclass(frozen=True)
class Transfer:
    """A message between two stages, which follows from an action.

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

    def __str__(self) -> str:
        """``the output of stage 0 for stage 1, micro-batch 3``."""
        name, sender = ("output", -1) if self.forward else ("gradient", 1)
        return (
            f"the {name} of stage {self.stage + sender} for stage {self.stage}, "
            f"micro-batch {self.microbatch}"
        )


@dataclass(frozen=True)
class Plan:
    """What every rank does in one step.

    Attributes:
        placement: which rank has which stages.
        rows: the actions of each rank, in order.
        num_microbatches: m.
        sizes: samples of each micro-batch, where they differ; relative values are enough.
        name: of the schedule, for people.
        paired: forwards that run at the same time as the backward after them (:mod:`.pairs`).
        compiled: what :mod:`.row` keeps of it between steps.
    """

    placement: Placement
    rows: tuple[tuple[Action, ...], ...]
    num_microbatches: int
    sizes: tuple[float, ...] | None = None
    name: str = ""
    paired: frozenset[Action] = frozenset()
    compiled: dict[tuple[int, int], object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __hash__(self) -> int:
        """Hash of few fields: a step looks plans up, and must not walk over their tables."""
        return hash((self.placement, self.num_microbatches, self.name))

    def size(self, microbatch: int) -> float:
        """Relative size of a micro-batch, 1 where all are equal."""
        return 1.0 if self.sizes is None else self.sizes[microbatch]

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Every (rank, action), rank by rank."""
        return ((rank, action) for rank, row in enumerate(self.rows) for action in row)

    def message_of(self, action: Action) -> Transfer | None:
        """What ``action`` hands on; source and target may be the same rank."""
        if action.op in FORWARDS:
            return self._message(action, action.stage, action.stage + 1)
        if action.op in BACKWARDS:
            return self._message(action, action.stage, action.stage - 1)
        return None

    def message_to(self, action: Action) -> Transfer | None:
        """What ``action`` waits for; source and target may be the same rank."""
        if action.op in FORWARDS:
            return self._message(action, action.stage - 1, action.stage)
        if action.op in BACKWARDS:
            return self._message(action, action.stage + 1, action.stage)
        return None

    def transfer_of(self, action: Action) -> Transfer | None:
        """The message that ``action`` sends to another rank, or None."""
        message = self.message_of(action)
        return None if message is None or message.source == message.target else message

    def _message(self, action: Action, source: int, target: int) -> Transfer | None:
        placement = self.placement
        if min(source, target) < 0 or max(source, target) >= placement.num_stages:
            return None
        ranks = placement.rank(source), placement.rank(target)
        assert action.microbatch is not None
        return Transfer(*ranks, source < target, target, action.microbatch)

    def entries(self, rank: int) -> Iterator[tuple[Action, ...]]:
        """The row of ``rank``, with the members of a pair together."""
        row = iter(self.rows[rank])
        for action in row:
            partner = next(row, None) if action in self.paired else None
            yield (action,) if partner is None else (action, partner)

    def without_pairs(self) -> Plan:
        """The same actions, the members of each pair one after the other."""
        return replace(self, paired=frozenset())

    @cached_property
    def dropped(self) -> Action | None:
        """The first forward that keeps its input only."""
        return next((action for _, action in self if action.op == FORWARD_INPUT_ONLY), None)

    @cached_property
    def channels(self) -> dict[tuple[int, int], tuple[Transfer, ...]]:
        """Messages by (source, target), in the order in which the source sends them."""
        found: dict[tuple[int, int], list[Transfer]] = {}
        for _, action in self:
            if (transfer := self.transfer_of(action)) is not None:
                found.setdefault((transfer.source, transfer.target), []).append(transfer)
        return {ends: tuple(transfers) for ends, transfers in found.items()}
