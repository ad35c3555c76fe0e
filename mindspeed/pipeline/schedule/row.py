"""The row of one rank with all that follows from its plan, made once and read in every step.

A plan says which messages there are and in which order; a step only walks over this row. Nothing
here is changed by a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed.pipeline.schedule.actions import BACKWARD_INPUT, Action
from mindspeed.pipeline.schedule.plan import Plan, Transfer


class Cell(NamedTuple):
    """An action and its messages.

    Attributes:
        action: what to compute.
        awaited: the message that it needs, from another rank or from this one.
        handed: the message that it hands on.
        posted: messages of other ranks whose receives are posted before it runs.
        from_here: ``awaited`` is of this rank.
        to_here: ``handed`` is for this rank.
        partner: of a pair.
    """

    action: Action
    awaited: Transfer | None
    handed: Transfer | None
    posted: tuple[Transfer, ...]
    from_here: bool
    to_here: bool
    partner: Cell | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The row of one rank.

    Attributes:
        entries: in order.
        incoming: for each rank the messages that come from it, in the order in which it sends.
        places: of each message among those of its sender.
        receipts: for each message, those from this rank that have arrived when it does. A rank
            that sends a message has received all that the actions before needed.
        splits: some backward is divided.
    """

    entries: tuple[Cell, ...]
    incoming: Mapping[int, tuple[Transfer, ...]]
    places: Mapping[Transfer, int]
    receipts: Mapping[Transfer, tuple[Transfer, ...]]
    splits: bool


def row_of(plan: Plan, rank: int, prefetch: int) -> Row:
    """The row of ``rank``, whose receives are posted ``prefetch`` actions ahead."""
    key = rank, prefetch
    if key not in plan.compiled:
        plan.compiled[key] = _compiled(plan, rank, prefetch)
    found = plan.compiled[key]
    assert isinstance(found, Row)
    return found


def _compiled(plan: Plan, rank: int, prefetch: int) -> Row:
    row = plan.rows[rank]
    awaited = [plan.message_to(action) for action in row]
    entries = []
    for index, action in enumerate(row):
        needed, handed = awaited[index], plan.message_of(action)
        near = awaited[index : index + 1 + prefetch]
        posted = tuple(one for one in near if one is not None and one.source != rank)
        from_here = needed is not None and needed.source == rank
        to_here = handed is not None and handed.target == rank
        entries.append(Cell(action, needed, handed, posted, from_here, to_here))
        if index and row[index - 1] in plan.paired:
            second = entries.pop()
            first = entries.pop()
            posted = tuple(dict.fromkeys(first.posted + second.posted))
            entries.append(first._replace(posted=posted, partner=second))
    incoming = {
        source: transfers for (source, target), transfers in plan.channels.items() if target == rank
    }
    places = {one: place for queue in incoming.values() for place, one in enumerate(queue)}
    splits = any(action.op == BACKWARD_INPUT for action in row)
    return Row(tuple(entries), incoming, places, _receipts(plan, rank), splits)


def _receipts(plan: Plan, rank: int) -> dict[Transfer, tuple[Transfer, ...]]:
    """A handle of gloo does not tell by itself that a message arrived: it must be waited for."""
    found: dict[Transfer, tuple[Transfer, ...]] = {}
    for row in plan.rows:
        arrived: list[Transfer] = []
        for action in row:
            needed, sent = plan.message_to(action), plan.transfer_of(action)
            if needed is not None and needed.source == rank != needed.target:
                arrived.append(needed)
            if sent is not None and sent.target == rank:
                found[sent], arrived = tuple(arrived), []
    return found
