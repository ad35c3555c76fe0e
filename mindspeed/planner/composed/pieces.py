"""Pieces of a tiny run that compose: figures linear in layers, and bytes that actions need."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, Protocol

from mindspeed.planner.composed.figures import END, Figure, Quantity
from mindspeed.planner.composed.tiny_run import TinyRun


class Context(NamedTuple):
    """The place of a chunk, by which messages around its actions differ.

    Attributes:
        role: role of the chunk.
        roles: roles of all chunks of its rank, sorted; empty with one chunk. With several, messages
            overlap actions, and Megatron orders them by whether the rank is even.
        odd: whether such a rank has an odd number.
    """

    role: str
    roles: tuple[str, ...] = ()
    odd: bool = False

    @classmethod
    def of(cls, role: str, roles: Sequence[str], rank: int) -> Context:
        """Build the context of a chunk from the roles of all chunks of its pipeline rank."""
        return cls(role) if len(roles) < 2 else cls(role, tuple(sorted({*roles})), bool(rank % 2))


class Previous(NamedTuple):
    """The op before an action, empty for the first one, and whether it was of another chunk."""

    op: str = ""
    other_chunk: bool = False

    @classmethod
    def of(cls, last: _Action | None, action: _Action) -> Previous:
        """Build the predecessor of an action from the action before it, if any."""
        return cls() if last is None else cls(last.op, last.stage != action.stage)


class Need(NamedTuple):
    """Key of the bytes that an action needs; ``kind`` is that of the only layer of its chunk."""

    context: Context
    kind: str
    previous: Previous
    op: str


Runs = Mapping[tuple[str, str, int], TinyRun]
"""Tiny runs by role, kind and number of layers."""


def figures_of(found: TinyRun) -> dict[Figure, float]:
    """Return the figures of a rank with one chunk that are linear in its layers."""
    batches = found.micro_batches
    ops = Counter(action.op for action in found.actions)
    figures = {Figure(Quantity.STATIC, name=kind): float(n) for kind, n in found.static.items()}
    figures |= {
        Figure(Quantity.PARAMETERS): found.parameters,
        Figure(Quantity.HOST): found.host,
        Figure(Quantity.TAIL): found.tail,
        Figure(Quantity.FREED): -found.actions[0].level,
        Figure(Quantity.KEPT): kept(found),
        Figure(Quantity.STASH): _stash(found),
        Figure(Quantity.FLOPS): found.flops / batches,
        Figure(Quantity.RECOMPUTED): found.recomputed / batches,
        Figure(Quantity.SECONDS, END): found.tail_seconds - found.tail_exposed,
    }
    for op in ops:
        seconds = [action.seconds for action in found.actions if action.op == op]
        figures[Figure(Quantity.SECONDS, op)] = median(seconds)
    of_step = (Quantity.DENSE_BYTES, Quantity.EXPERT_BYTES)
    for name, value in found.communication.items():
        times = 1 if name.op == END or name.quantity in of_step else ops.get(name.op, batches)
        figures[name] = value / times
    return figures


def kept(found: TinyRun, stage: int | None = None) -> float:
    """Return the bytes of one more micro-batch in flight: between two forwards of the same chunk.

    The last such pair counts: the first forward of a step has no message left over from before.
    """
    pairs = list(zip(found.actions, found.actions[1:], strict=False))
    forwards = [(a, b) for a, b in pairs if a.op == "F" and stage in (None, a.stage)]
    again = [b.level - a.level for a, b in forwards if b.op == "F" and b.stage == a.stage]
    return (again or [b.level - a.level for a, b in forwards])[-1]


def _stash(found: TinyRun) -> float:
    return max((action.dropped for action in found.actions if action.op == "W"), default=0)


def stages_of(found: TinyRun) -> list[int]:
    """The stages of a rank, in the order of their first actions."""
    return list(dict.fromkeys(action.stage for action in found.actions))


def record_needs(
    needs: dict[Need, float], role: str, kind: str, found: TinyRun, kept: float
) -> None:
    """Record the bytes that each action of a rank with one chunk needs."""
    kept_by = dict.fromkeys(stages_of(found), kept)
    freed = -found.actions[0].level
    record_chunk_needs(needs, kind, found, kept_by, _stash(found), freed, lambda stage: role)


def record_chunk_needs(
    needs: dict[Need, float],
    kind: str,
    found: TinyRun,
    kept: Mapping[int, float],
    stash: float,
    freed: float,
    role_of: Callable[[int], str],
    rank: int = 0,
) -> None:
    """Record the bytes that each action needs beyond those kept by micro-batches in flight."""
    roles = [role_of(stage) for stage in stages_of(found)]
    held, last = -freed, None
    for action in found.actions:
        context = Context.of(role_of(action.stage), roles, rank)
        key = Need(context, kind, Previous.of(last, action), action.op)
        needs[key] = max(needs.get(key, -math.inf), action.peak - held)
        held += released(action.op, kept[action.stage], stash)
        last = action


class _Action(Protocol):
    @property
    def op(self) -> str: ...

    @property
    def stage(self) -> int: ...


def released(op: str, kept: float, stash: float) -> float:
    """Change of the bytes kept by micro-batches in flight after an action."""
    return {"F": kept, "B": -kept, "I": stash - kept, "W": -stash}.get(op, 0.0)


def with_role(needs: Mapping[Need, float], role: str) -> dict[Need, float]:
    """Assign the needs of a rank with one chunk to another role."""
    return {key._replace(context=Context(role)): value for key, value in needs.items()}


def needs_of(runs: Runs, names: Iterable[tuple[str, str, int]]) -> dict[Need, float]:
    """Needs of several runs with one chunk."""
    needs: dict[Need, float] = {}
    for name in names:
        record_needs(needs, name[0], name[1], runs[name], kept(runs[name]))
    return needs


def inner_of(one: Mapping[Need, float], two: Mapping[Need, float], kept: float) -> dict[str, float]:
    """Growth of needs from one to two layers, by op, minus the bytes that the first one keeps."""
    found: dict[str, float] = {}
    for key, value in one.items():
        growth = two[key] - value - (kept if key.op in ("F", "Fc") else 0.0)
        found[key.op] = max(found.get(key.op, -math.inf), growth)
    return found
