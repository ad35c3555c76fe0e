"""How far the composition of a tiny run is from what was counted.

What grows with layers must agree as a part of itself. Which messages are alive at the peak of a
rank with several chunks, and what is alive where layers of two kinds meet, is a number of bytes
that does not grow with layers: it counts as a part of what the whole job needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed.planner.pieces import before, figures_of, place, released, within_actions
from mindspeed.planner.signature import Signature
from mindspeed.planner.tiny_run import TinyRun


@dataclass(frozen=True)
class Difference:
    """Between composed and counted figures of a run.

    Attributes:
        linear: largest relative error of bytes between steps, FLOPs and bytes of messages.
        peak: bytes at the peak beyond those between steps, composed or counted too many.
        counted_peak: the counted ones.
    """

    linear: float
    peak: float
    counted_peak: float

    @property
    def largest(self) -> float:
        """The largest relative error; bytes at the peak count by themselves, too."""
        return max(self.linear, _relative(self.counted_peak + self.peak, self.counted_peak))


def difference_of(
    signature: Signature,
    found: TinyRun,
    chunks: Mapping[int, tuple[str, tuple[str, ...]]],
    rank: int = 0,
) -> Difference:
    """Of a run whose rank has these chunks, by stage."""
    composed, real = signature.rank(list(chunks.values())), figures_of(found)
    names = [name for name in real if name.startswith("static")]
    figures = {stage: signature.chunk(*chunk) for stage, chunk in chunks.items()}
    actions = Counter((action.op, action.stage) for action in found.actions)
    sent = within_actions(figures, actions, found.micro_batches)
    pairs = [
        (sum(composed[n] for n in names), sum(real[n] for n in names)),
        (composed["flops"], real["flops"]),
        (
            sum(value for name, value in sent.items() if name.startswith("payload ")),
            sum(value for name, value in found.messages.items() if "payload " in name),
        ),
    ]
    peak = max(action.peak for action in found.actions)
    return Difference(
        max(_relative(*pair) for pair in pairs),
        abs(_peak(signature, found, chunks, rank) - peak),
        peak,
    )


def _relative(one: float, truth: float) -> float:
    return abs(one / truth - 1) if truth else abs(one)


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
