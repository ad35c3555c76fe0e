"""Figures of a tiny run that compose: linear in layers, or needs of single actions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Protocol

from mindspeed.planner.composed.tiny_run import TinyRun

Figures = Mapping[str, float]
"""Figures by name; see :func:`figures_of`."""

Need = tuple[str, str, str, str]
"""Place (:func:`context_key`), kind of the only layer, op before (:func:`previous_op`), op."""

OPS = ("F", "Fc", "B", "I", "W", "R")
"""Ops of actions."""

OTHER = "*"
"""Ends the op before if it was of another chunk."""

Runs = Mapping[tuple[str, str, int], TinyRun]
"""Tiny runs by role, kind and number of layers."""


def figures_of(found: TinyRun) -> dict[str, float]:
    """Figures of a rank with one chunk that are linear in its layers.

    Bytes: ``weights``, ``gradients``, ``optimizer`` ... between steps; ``tail`` alive after the
    last action; ``freed`` before the first one; ``kept`` by a micro-batch in flight, ``stash`` by a
    pending weight gradient.
    ``flops``, ``recomputed`` of a micro-batch, ``parameters``, ``host`` bytes between steps. Of an
    action: its seconds, ``seconds F`` ..., those of waiting, ``F wait GROUP``, and its messages,
    ``F payload ...``; messages of a micro-batch between actions, ``payload ...``
    (:attr:`TinyRun.messages`). Of a step: ``seconds tail`` after the last action without waiting,
    ``closing payload ...``, and whole bytes of collectives of data-parallel groups, as
    ``dp all_gather``.
    """
    batches = found.micro_batches
    ops = Counter(action.op for action in found.actions)
    figures: dict[str, float] = {f"static {kind}": n for kind, n in found.static.items()}
    figures |= {
        "parameters": found.parameters,
        "host": found.host,
        "tail": found.tail,
        "freed": -found.actions[0].level,
        "kept": kept(found),
        "stash": _stash(found),
        "flops": found.flops / batches,
        "recomputed": found.recomputed / batches,
        "seconds tail": found.tail_seconds - found.tail_exposed,
    }
    for op in ops:
        seconds = [action.seconds for action in found.actions if action.op == op]
        figures[f"seconds {op}"] = median(seconds)
    figures |= found.collectives
    for name, value in found.messages.items():
        figures[name] = value / ops.get(name.partition(" ")[0], batches)
    for name, value in found.closing.items():
        figures[f"closing {_of_any_size(name)}"] = value
    for name, waited in found.exposed.items():
        op, _, group = name.partition(" ")
        named = f"{op} wait {group}" if op in ops else f"wait {name}"
        figures[named] = waited / ops.get(op, batches)
    return figures


def _of_any_size(name: str) -> str:
    """The name of messages without the size of a group that grows with the job."""
    group, _, op = name.split("|")
    growing = ("INTRA_DISTRIBUTED", "MODEL_PARALLEL", "PIPELINE", "EXPERT_TENSOR_MODEL_PIPELINE")
    return f"{group}|0|{op}" if group.partition(" ")[2].startswith(growing) else name


def kept(found: TinyRun, stage: int | None = None) -> float:
    """Bytes of one more micro-batch in flight: between two forwards of the same chunk.

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
        key = (
            context_key(role_of(action.stage), roles, rank),
            kind,
            previous_op(last, action),
            action.op,
        )
        needs[key] = max(needs.get(key, -math.inf), action.peak - held)
        held += released(action.op, kept[action.stage], stash)
        last = action


class _Action(Protocol):
    @property
    def op(self) -> str: ...

    @property
    def stage(self) -> int: ...


def previous_op(last: _Action | None, action: _Action) -> str:
    """The op of the action before, and whether it was of another chunk."""
    if last is None:
        return ""
    return last.op if last.stage == action.stage else last.op + OTHER


def context_key(role: str, roles: Sequence[str], rank: int) -> str:
    """The place of a chunk, by which messages around its actions differ.

    Args:
        role: of the chunk.
        roles: of all chunks of its rank. With several, messages overlap actions, and Megatron
            orders them by whether the rank is even.
        rank: of the pipeline.
    """
    return role if len(roles) < 2 else f"{'+'.join(sorted({*roles}))} {rank % 2}:{role}"


def released(op: str, kept: float, stash: float) -> float:
    """Change of the bytes kept by micro-batches in flight after an action."""
    return {"F": kept, "B": -kept, "I": stash - kept, "W": -stash}.get(op, 0.0)


def of_steps(figures: Figures) -> dict[str, float]:
    """Figures per step or between steps, not per action or micro-batch."""
    prefixes = ("static ", "dp ", "edp ", "closing ")
    names = ("host", "tail", "seconds tail")
    return {n: v for n, v in figures.items() if n in names or n.startswith(prefixes)}


def data_parallel_shared_fraction(one: Figures, wide: Figures) -> dict[str, float]:
    """The part of each figure that halves on twice as many data-parallel ranks."""
    others = ("host", "tail", "freed", "seconds tail")
    names = [n for n in one if n.startswith("static") or n in others]
    return {n: 2 * (one[n] - wide.get(n, 0.0)) / one[n] if one[n] else 0.0 for n in names}


def weighted(one: float, part: float, other: float, other_part: float) -> float:
    """The part of a sum of which two parts are known."""
    total = one + other
    return (one * part + other * other_part) / total if total else 0.0


def with_role(needs: Mapping[Need, float], role: str) -> dict[Need, float]:
    """The same of a chunk with another role."""
    return {(role, *key[1:]): value for key, value in needs.items()}


def needs_of(runs: Runs, names: Iterable[tuple[str, str, int]]) -> dict[Need, float]:
    """Needs of several runs with one chunk."""
    needs: dict[Need, float] = {}
    for name in names:
        record_needs(needs, name[0], name[1], runs[name], kept(runs[name]))
    return needs


def inner_of(one: Mapping[Need, float], two: Mapping[Need, float], kept: float) -> dict[str, float]:
    """By op, the growth of the need from one to two layers, minus the bytes the first one keeps."""
    found: dict[str, float] = {}
    for key, value in one.items():
        op = key[3]
        growth = two[key] - value - (kept if op in ("F", "Fc") else 0.0)
        found[op] = max(found.get(op, -math.inf), growth)
    return found


def difference(one: Figures, other: Figures) -> dict[str, float]:
    """The difference; of an op that only one of them has there is none."""
    known = _ops(one) & _ops(other)
    names = [n for n in {**one, **other} if (op := op_of(n)) is None or op in known]
    return {name: one.get(name, 0.0) - other.get(name, 0.0) for name in names}


def op_of(name: str) -> str | None:
    """The op whose action a figure is of; None for other figures."""
    first, _, rest = name.partition(" ")
    op = rest if first == "seconds" else first
    return op if op in OPS else None


def of_op(name: str, op: str) -> str:
    """The same figure of another op."""
    first, _, rest = name.partition(" ")
    return f"seconds {op}" if first == "seconds" else f"{op} {rest}"


def _ops(figures: Figures) -> set[str]:
    return {op for name in figures if (op := op_of(name)) is not None}


def within_actions(
    chunks: Mapping[int, Figures], actions: Mapping[tuple[str, int], float], micro_batches: int
) -> dict[str, float]:
    """Messages and waiting of a step, in actions and between them: ``wire ...``, ``wait ...``.

    Args:
        chunks: figures of the chunks of a rank, by stage.
        actions: how many of each op and stage there are.
        micro_batches: of the step.
    """
    total: dict[str, float] = defaultdict(float)
    for stage, figures in chunks.items():
        for name, value in figures.items():
            op = op_of(name)
            rest = name if op is None else name.partition(" ")[2]
            if rest.startswith(("wait ", "calls ", "payload ", "wire ")):
                times = micro_batches if op is None else actions.get((op, stage), 0.0)
                total[rest] += value * times
    return dict(total)


def with_split_backward(figures: Figures) -> dict[str, float]:
    """Add the figures of whole (B) or split (I and W) backward, whichever the runs lack.

    Together I and W do what B does, except that a layer may gather its output gradient in both.
    """
    found, ops = dict(figures), _ops(figures)
    if "B" in ops and "I" not in ops:
        found |= {of_op(name, "I"): n for name, n in figures.items() if op_of(name) == "B"}
        found["seconds W"] = 0.0
    elif "I" in ops and "B" not in ops:
        for name, value in figures.items():
            if op_of(name) in ("I", "W"):
                whole = of_op(name, "B")
                found[whole] = found.get(whole, 0.0) + value
    return found
