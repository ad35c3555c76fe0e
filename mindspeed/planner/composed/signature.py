"""A model in pieces: what a layer, the ends and a chunk each add, and what they compose to.

    signature = measure(job, layout)        # mindspeed.planner.composed.measurement
    signature.layers["dense"]["kept"]       # activation bytes that a layer keeps of a micro-batch
    signature.rank([("first", ["dense"] * 20)])["static weights"]

All figures of a pipeline stage are linear in its layers. Bytes that an action needs beyond those
kept by micro-batches in flight depend on the messages around it, so they are known for each action
and its predecessor (:attr:`Signature.needs`).

:func:`difference_of` compares a composition with a counted run. Figures that grow with layers are
compared relatively. Messages alive at the peak of a rank with several chunks, and bytes alive where
layers of two kinds meet, do not grow with layers: their error is a number of bytes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed.planner.composed.pieces import (
    OTHER,
    Figures,
    Need,
    context_key,
    figures_of,
    previous_op,
    released,
    within_actions,
)
from mindspeed.planner.composed.tiny_run import TinyRun
from mindspeed.planner.shape import EXPERT, NOOP

TOLERANCE = 0.001
"""Errors below this are not reported."""
LARGEST_ERROR = 0.01
"""Compositions with a larger error are not used."""


@dataclass(frozen=True)
class Signature:
    """The pieces of a model under one layout of its layers.

    Attributes:
        layers: by kind of layer.
        roles: what a chunk adds to its layers, by its role: ``first``, ``middle``, ``last``, or
            ``only``.
        needs: bytes that an action needs at its peak beyond those kept by all micro-batches in
            flight, its own among them in backward; of a chunk with one layer.
        inner: by kind and op what a layer needs more if the chunk has others before it: the
            input of the chunk is there anyway.
        once: by the roles of a rank's chunks what a rank has once but each of its chunks counts.
        shared: for each kind of layer and each role the part of its figures that data-parallel
            ranks share.
        data_parallel: size in the runs.
        error: largest relative error of figures that grow with layers, in the runs that were
            compared with their composition.
        shift: bytes at the peak that these runs have more or less, which do not grow with layers.
    """

    layers: Mapping[str, Figures]
    roles: Mapping[str, Figures]
    needs: Mapping[Need, float]
    inner: Mapping[tuple[str, str], float]
    once: Mapping[frozenset[str], Figures]
    shared: Mapping[str, Figures]
    data_parallel: int
    error: float
    shift: float = 0.0

    def error_at(self, peak: float) -> float:
        """Largest relative error of a job, as far as the compared runs tell.

        Args:
            peak: its composed bytes.
        """
        return max(self.error, self.shift / peak)

    def chunk(
        self, role: str, kinds: Iterable[str], data_parallel: int | None = None
    ) -> dict[str, float]:
        """Figures of a chunk.

        Args:
            role: of the chunk.
            kinds: of its layers.
            data_parallel: size; that of the runs by default.
        """
        counts = Counter(kind for kind in kinds if kind != NOOP)
        ratio = self.data_parallel / (data_parallel or self.data_parallel) - 1
        total: dict[str, float] = defaultdict(float)
        for name, figures, count in [
            (role, self.roles[role], 1),
            *((kind, self.layers[kind], count) for kind, count in counts.items()),
        ]:
            shared = self.shared.get(name, {})
            for figure, value in figures.items():
                total[figure] += count * value * (1 + shared.get(figure, 0.0) * ratio)
        experts = next((kind for kind in counts if kind.startswith(EXPERT)), None)
        if experts is not None:
            self._gather_with_experts(total, self.layers[experts])
        return dict(total)

    @staticmethod
    def _gather_with_experts(total: dict[str, float], layer: Figures) -> None:
        """Parameters that are gathered by an optimizer with a part for experts.

        Each part of Megatron's chained optimizer gathers all parameters of a chunk, so those that
        are not of experts are gathered once more than beside dense layers alone.
        """
        gathered, reduced = (layer.get(f"dp {op}", 0.0) for op in ("all_gather", "reduce_scatter"))
        if gathered and reduced:
            total["dp all_gather"] = total["dp reduce_scatter"] * gathered / reduced

    def rank(
        self, chunks: Sequence[tuple[str, Iterable[str]]], data_parallel: int | None = None
    ) -> dict[str, float]:
        """Figures of a pipeline rank; those of steps and between steps are exact.

        Args:
            chunks: role and kinds of the layers of each of its chunks.
            data_parallel: size; that of the runs by default.
        """
        total: Counter[str] = Counter()
        for role, kinds in chunks:
            total.update(self.chunk(role, kinds, data_parallel))  # type: ignore[arg-type]
        if len(chunks) > 1:
            roles = frozenset(role for role, _ in chunks)
            known = self.once.get(roles) or next(iter(self.once.values()), {})
            for name, value in known.items():
                total[name] -= (len(chunks) - 1) * value  # type: ignore[assignment]
        return dict(total)

    def need(self, place: str, kinds: tuple[str, ...], before: str, op: str) -> float:
        """Bytes at the peak of an action of a chunk, beyond those kept.

        Forward has kept the layers before the one that runs, backward no longer those after it.

        Args:
            place: of the chunk (:data:`~mindspeed.planner.composed.pieces.Need`).
            kinds: of its layers.
            before: op of the action before.
            op: of the action.
        """
        role = place.partition(":")[2] or place
        real = [kind for kind in kinds if kind != NOOP]
        if not real:
            return self._need(place, next(iter(self.layers)), before, op)
        sizes = [self.layers[kind]["kept"] for kind in real]
        best = -math.inf
        for kind in dict.fromkeys(real):
            if op in ("F", "Fc"):
                last = len(real) - 1 - real[::-1].index(kind)
                around = sum(sizes[:last])
            elif op in ("B", "I"):
                last = len(real) - 1 - real[::-1].index(kind)
                around = -sum(sizes[last + 1 :])
            else:
                around = 0.0
            own, inner = self._need(place, kind, before, op), self.inner.get((kind, op), 0.0)
            if len(real) > 1:  # on the last stage either the head needs most, or a layer
                layer = self._need("middle", kind, before, op)
                if op in ("B", "I") and role == "last":  # the head's are released before
                    layer -= self._kept_by_head
                if any(key[0].endswith("last") and key[1::2] == (kind, op) for key in self.needs):
                    layer = min(layer, own)  # which has such a layer
                own = max(own, layer + inner) if role == "last" else own + inner
            best = max(best, own + around)
        return best

    @property
    def _kept_by_head(self) -> float:
        last, middle = (self.roles.get(role, {}).get("kept", 0.0) for role in ("last", "middle"))
        return last - middle

    def _need(self, place: str, kind: str, before: str, op: str) -> float:
        role = place.partition(":")[2] or place
        same = before.removesuffix(OTHER)
        keys = [key for key in self.needs if key[3] == op]
        if place == "first":  # measured with layers of one kind
            known = {(role, k) for role, k, *_ in keys}
            other = next((k for role, k in known if role == place), kind)
            if (place, kind) not in known and {("middle", kind), ("middle", other)} <= known:
                own, less = (self._need(at, other, before, op) for at in (place, "middle"))
                return self._need("middle", kind, before, op) + own - less
        for fits in (
            lambda key: key[:3] == (place, kind, before),
            lambda key: (*key[:2], key[2].removesuffix(OTHER)) == (place, kind, same),
            lambda key: key[:2] == (place, kind),
            lambda key: key[0].endswith(role) and key[1] == kind,
            lambda key: key[0].endswith("middle") and key[1:3] == (kind, same),
            lambda key: key[0].endswith("middle") and key[1] == kind,
            lambda key: key[1] == kind,
        ):
            if found := [key for key in keys if fits(key)]:
                return max(self.needs[key] for key in found)
        return max((self.needs[key] for key in keys), default=0.0)


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
    """Compare a run whose rank has these chunks, by stage, with its composition."""
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
        need = signature.need(
            context_key(role, roles, rank), kinds, previous_op(last, action), action.op
        )
        most = max(most, held + need)
        held += released(action.op, own["kept"], own["stash"])
        last = action
    return most
