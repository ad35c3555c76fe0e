"""How far the composition of a tiny run is from what was counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mindspeed.planner.pieces import before, figures_of, place, released, within_actions
from mindspeed.planner.signature import Signature
from mindspeed.planner.tiny_run import TinyRun


def error_of(
    signature: Signature,
    found: TinyRun,
    chunks: Mapping[int, tuple[str, tuple[str, ...]]],
    rank: int = 0,
) -> float:
    """Of a run whose rank has these chunks, by stage: the largest of its figures' errors.

    Bytes between steps and those at the peak beyond them count by themselves: a whole job may have
    more of either.
    """
    composed, real = signature.rank(list(chunks.values())), figures_of(found)
    names = [name for name in real if name.startswith("static")]
    figures = {stage: signature.chunk(*chunk) for stage, chunk in chunks.items()}
    actions = Counter((action.op, action.stage) for action in found.actions)
    sent = within_actions(figures, actions, found.micro_batches)
    pairs = [
        (sum(composed[n] for n in names), sum(real[n] for n in names)),
        (_peak(signature, found, chunks, rank), max(action.peak for action in found.actions)),
        (composed["flops"], real["flops"]),
        (
            sum(value for name, value in sent.items() if name.startswith("payload ")),
            sum(value for name, value in found.messages.items() if "payload " in name),
        ),
    ]
    return max(abs(one / truth - 1) if truth else abs(one) for one, truth in pairs)


def _peak(
    signature: Signature,
    found: TinyRun,
    chunks: Mapping[int, tuple[str, tuple[str, ...]]],
    rank: int,
) -> float:
    """Composed bytes at the peak of a run beyond those between steps."""
    figures = {stage: signature.chunk(*chunk) for stage, chunk in chunks.items()}
    roles = [role for role, _ in chunks.values()]
    held = -signature.rank(list(chunks.values()))["freed"]
    last, most = None, 0.0
    for action in found.actions:
        role, kinds = chunks[action.stage]
        own = figures[action.stage]
        need = signature.need(place(role, roles, rank), kinds, before(last, action), action.op)
        most = max(most, held + need)
        held += released(action.op, own["kept"], own["stash"])
        last = action
    return most
