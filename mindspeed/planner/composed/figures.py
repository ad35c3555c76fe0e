"""Figures of a rank that are linear in its layers, and arithmetic on sets of them.

layer = difference(two_layers, one_layer)
layer[Figure(Quantity.KEPT)], layer[Figure(Quantity.SECONDS, "F")]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

OPS = ("F", "Fc", "B", "I", "W", "R")
"""Ops of actions in a pipeline schedule."""
END = "end"
"""In place of an op: from the end of the last action to the end of the step."""


class Quantity(Enum):
    """The quantity that a figure counts; bytes are those of tensors on a rank."""

    STATIC = "static"  # bytes between steps, by kind of memory
    HOST = "host"  # bytes of host memory between steps
    PARAMETERS = "parameters"
    TAIL = "tail"  # largest number of bytes alive after the last action
    FREED = "freed"  # bytes released before the first action
    KEPT = "kept"  # bytes that a micro-batch in flight keeps
    STASH = "stash"  # bytes that a pending weight gradient keeps
    FLOPS = "flops"  # of a micro-batch
    RECOMPUTED = "recomputed"  # FLOPs that a micro-batch executes a second time
    SECONDS = "seconds"  # of an action, or of the end of a step without waiting
    WAIT = "wait"  # seconds, by process group
    CALLS = "calls"  # of a collective
    PAYLOAD = "payload"  # bytes of its tensors
    WIRE = "wire"  # bytes that the rank sends
    DENSE_BYTES = "dense_bytes"  # unsharded bytes of a data-parallel collective of a step
    EXPERT_BYTES = "expert_bytes"  # the same, of expert-data-parallel groups


TRAFFIC = (Quantity.CALLS, Quantity.PAYLOAD, Quantity.WIRE)


class Figure(NamedTuple):
    """Key of a figure.

    Attributes:
        quantity: the counted quantity.
        op: op of the action in which it occurs, or :data:`END`; empty for figures of a micro-batch
            between actions and for those of the whole rank.
        name: kind of memory, or description of the process group.
        size: ranks of the group.
        collective: such as ``all_gather``, see :mod:`mindspeed.instruments.ledger`.
    """

    quantity: Quantity
    op: str = ""
    name: str = ""
    size: int = 0
    collective: str = ""


Figures = Mapping[Figure, float]


def of_steps(figures: Figures) -> dict[Figure, float]:
    """Select figures per step or between steps, not per action or micro-batch."""
    whole = {Quantity.STATIC, Quantity.HOST, Quantity.TAIL}
    whole |= {Quantity.DENSE_BYTES, Quantity.EXPERT_BYTES}
    return {n: v for n, v in figures.items() if n.quantity in whole or n.op == END}


def data_parallel_shared_fraction(one: Figures, wide: Figures) -> dict[Figure, float]:
    """Return the fraction of each figure that halves on twice as many data-parallel ranks."""
    shared = (Quantity.STATIC, Quantity.HOST, Quantity.TAIL, Quantity.FREED)
    names = [n for n in one if n.quantity in shared or n == Figure(Quantity.SECONDS, END)]
    return {n: 2 * (one[n] - wide.get(n, 0.0)) / one[n] if one[n] else 0.0 for n in names}


def difference(one: Figures, other: Figures) -> dict[Figure, float]:
    """Subtract figures; those of an op that only one of them has are left out."""
    known = {n.op for n in one} & {n.op for n in other}
    names = [n for n in {**one, **other} if n.op not in OPS or n.op in known]
    return {name: one.get(name, 0.0) - other.get(name, 0.0) for name in names}


def with_split_backward(figures: Figures) -> dict[Figure, float]:
    """Add the figures of whole (B) or split (I and W) backward, whichever the runs lack.

    Together I and W do what B does, except that a layer may gather its output gradient in both.
    """
    found, ops = dict(figures), {name.op for name in figures}
    if "B" in ops and "I" not in ops:
        found |= {name._replace(op="I"): n for name, n in figures.items() if name.op == "B"}
        found[Figure(Quantity.SECONDS, "W")] = 0.0
    elif "I" in ops and "B" not in ops:
        for name, value in figures.items():
            if name.op in ("I", "W"):
                whole = name._replace(op="B")
                found[whole] = found.get(whole, 0.0) + value
    return found


def within_actions(
    chunks: Mapping[int, Figures], actions: Mapping[tuple[str, int], float], micro_batches: int
) -> dict[Figure, float]:
    """Sum messages and waiting of a step, in actions and between them, without their ops.

    Args:
        chunks: figures of the chunks of a rank, by stage.
        actions: number of actions of each op and stage.
        micro_batches: micro-batches of the step.
    """
    total: dict[Figure, float] = defaultdict(float)
    for stage, figures in chunks.items():
        for name, value in figures.items():
            if name.quantity in (*TRAFFIC, Quantity.WAIT) and name.op != END:
                times = actions.get((name.op, stage), 0.0) if name.op else micro_batches
                total[name._replace(op="")] += value * times
    return dict(total)
