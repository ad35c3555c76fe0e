"""A model in pieces: what a layer, the ends and a chunk each add, and what they compose to.

    signature = measure(job, layout)        # mindspeed.planner.composed.measurement
    signature.layers["dense"][Figure(Quantity.KEPT)]    # activation bytes of a micro-batch
    signature.rank([("first", ["dense"] * 20)])[Figure(Quantity.STATIC, name="weights")]

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

from mindspeed.planner.composed.figures import END, Figure, Figures, Quantity, within_actions
from mindspeed.planner.composed.pieces import Context, Need, Previous, figures_of, released
from mindspeed.planner.composed.tiny_run import TinyRun
from mindspeed.planner.shape import EXPERT, NOOP

TOLERANCE = 0.001
"""Errors below this are not reported."""
LARGEST_ERROR = 0.01
"""Compositions with a larger error are not used."""

Chunks = Mapping[int, tuple[str, tuple[str, ...]]]
"""Role and kinds of the layers of each chunk of a rank, by stage."""

_KEPT = Figure(Quantity.KEPT)


@dataclass(frozen=True)
class Signature:
    """The pieces of a model under one layout of its layers.

    Attributes:
        layers: figures of a layer, by its kind.
        roles: figures that a chunk adds to its layers, by role: ``first``, ``middle``, ``last``, or
            ``only``.
        needs: bytes that an action needs at its peak beyond those kept by all micro-batches in
            flight, its own among them in backward; of a chunk with one layer.
        inner: additional bytes, by kind and op, that a layer needs if the chunk has others before
            it: the input of the chunk is there anyway.
        once: figures that a rank has once but each of its chunks counts, by the roles of these.
        shared: fraction of figures that data-parallel ranks share, by kind of layer and role.
        data_parallel: data-parallel size of the runs.
        error: largest relative error of figures that grow with layers, in the runs that were
            compared with their composition.
        shift: error in bytes at the peak of these runs, which does not grow with layers.
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
        """Largest relative error of a job with ``peak`` composed bytes, by the compared runs."""
        return max(self.error, self.shift / peak)

    def chunk(
        self, role: str, kinds: Iterable[str], data_parallel: int | None = None
    ) -> dict[Figure, float]:
        """Compose the figures of a chunk.

        Args:
            role: role of the chunk.
            kinds: kinds of its layers.
            data_parallel: data-parallel size; default: that of the runs.
        """
        counts = Counter(kind for kind in kinds if kind != NOOP)
        ratio = self.data_parallel / (data_parallel or self.data_parallel) - 1
        total: dict[Figure, float] = defaultdict(float)
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
    def _gather_with_experts(total: dict[Figure, float], layer: Figures) -> None:
        """Correct the gather of parameters by an optimizer with a part for experts.

        Each part of Megatron's chained optimizer gathers all parameters of a chunk, so those that
        are not of experts are gathered once more than beside dense layers alone.
        """
        gather, reduce = (
            Figure(Quantity.DENSE_BYTES, collective=op) for op in ("all_gather", "reduce_scatter")
        )
        if layer.get(gather) and layer.get(reduce):
            total[gather] = total[reduce] * layer[gather] / layer[reduce]

    def rank(
        self, chunks: Sequence[tuple[str, Iterable[str]]], data_parallel: int | None = None
    ) -> dict[Figure, float]:
        """Compose the figures of a pipeline rank; those of steps and between steps are exact.

        Args:
            chunks: role and kinds of the layers of each of its chunks.
            data_parallel: data-parallel size; default: that of the runs.
        """
        total: Counter[Figure] = Counter()
        for role, kinds in chunks:
            total.update(self.chunk(role, kinds, data_parallel))  # type: ignore[arg-type]
        if len(chunks) > 1:
            roles = frozenset(role for role, _ in chunks)
            known = self.once.get(roles) or next(iter(self.once.values()), {})
            for name, value in known.items():
                total[name] -= (len(chunks) - 1) * value  # type: ignore[assignment]
        return dict(total)

    def need(self, context: Context, kinds: tuple[str, ...], previous: Previous, op: str) -> float:
        """Bytes at the peak of an action of a chunk whose layers have ``kinds``, beyond those kept.

        Forward has kept the layers before the one that runs, backward no longer those after it.
        """
        real = [kind for kind in kinds if kind != NOOP]
        if not real:
            return self._need(Need(context, next(iter(self.layers)), previous, op))
        sizes = [self.layers[kind][_KEPT] for kind in real]
        best = -math.inf
        for kind in dict.fromkeys(real):
            last, around = len(real) - 1 - real[::-1].index(kind), 0.0
            if op in ("F", "Fc"):
                around = sum(sizes[:last])
            elif op in ("B", "I"):
                around = -sum(sizes[last + 1 :])
            key = Need(context, kind, previous, op)
            own, inner = self._need(key), self.inner.get((kind, op), 0.0)
            if len(real) > 1:  # on the last stage either the head needs most, or a layer
                layer = self._need(key._replace(context=Context("middle")))
                if op in ("B", "I") and context.role == "last":  # the head's are released before
                    layer -= self._kept_by_head
                if any(one.context.role == "last" and one[1::2] == key[1::2] for one in self.needs):
                    layer = min(layer, own)  # which has such a layer
                own = max(own, layer + inner) if context.role == "last" else own + inner
            best = max(best, own + around)
        return best

    @property
    def _kept_by_head(self) -> float:
        last, middle = (self.roles.get(role, {}).get(_KEPT, 0.0) for role in ("last", "middle"))
        return last - middle

    def _need(self, key: Need) -> float:
        """The recorded need of an action, or the largest of those nearest to it."""
        keys = [one for one in self.needs if one.op == key.op]
        first, middle = Context("first"), Context("middle")
        if key.context == first:  # measured with layers of one kind
            known = {(one.context, one.kind) for one in keys}
            other = next((kind for context, kind in known if context == first), key.kind)
            if (first, key.kind) not in known and {(middle, key.kind), (middle, other)} <= known:
                own, base = (
                    self._need(key._replace(context=at, kind=other)) for at in (first, middle)
                )
                return self._need(key._replace(context=middle)) + own - base
        near = [one for one in keys if one.kind == key.kind]
        here = [one for one in near if one.context == key.context]
        middles = [one for one in near if one.context.role == "middle"]
        same_op = Previous(key.previous.op)
        for candidates in (
            [one for one in here if one.previous == key.previous],
            [one for one in here if one.previous.op == key.previous.op],
            here,
            [one for one in near if one.context.role == key.context.role],
            [one for one in middles if one.previous == same_op],
            middles,
            near,
            keys,
        ):
            if candidates:
                return max(self.needs[one] for one in candidates)
        return 0.0


@dataclass(frozen=True)
class Difference:
    """Difference of composed and counted figures of a run.

    Attributes:
        linear: largest relative error of bytes between steps, FLOPs and bytes of messages.
        peak: absolute error of bytes at the peak beyond those between steps.
        counted_peak: the counted ones.
    """

    linear: float
    peak: float
    counted_peak: float

    @property
    def largest(self) -> float:
        """The largest relative error, that of bytes at the peak included."""
        return max(self.linear, _relative(self.counted_peak + self.peak, self.counted_peak))


def difference_of(
    signature: Signature, found: TinyRun, chunks: Chunks, rank: int = 0
) -> Difference:
    """Compare a run of a pipeline rank with its composition."""
    composed, real = signature.rank(list(chunks.values())), figures_of(found)
    names = [name for name in real if name.quantity is Quantity.STATIC]
    figures = {stage: signature.chunk(*chunk) for stage, chunk in chunks.items()}
    actions = Counter((action.op, action.stage) for action in found.actions)
    sent = within_actions(figures, actions, found.micro_batches)
    flops = Figure(Quantity.FLOPS)
    pairs = [
        (sum(composed[n] for n in names), sum(real[n] for n in names)),
        (composed[flops], real[flops]),
        (_payload(sent), _payload(found.communication)),
    ]
    peak = max(action.peak for action in found.actions)
    return Difference(
        max(_relative(*pair) for pair in pairs),
        abs(_peak(signature, found, chunks, rank) - peak),
        peak,
    )


def _payload(figures: Figures) -> float:
    """Bytes of messages until the last action ends."""
    within = [n for n in figures if n.quantity is Quantity.PAYLOAD and n.op != END]
    return sum(figures[name] for name in within)


def _relative(one: float, truth: float) -> float:
    return abs(one / truth - 1) if truth else abs(one)


def _peak(signature: Signature, found: TinyRun, chunks: Chunks, rank: int) -> float:
    """Composed bytes at the peak of a run beyond those between steps."""
    figures = {stage: signature.chunk(*chunk) for stage, chunk in chunks.items()}
    roles = [role for role, _ in chunks.values()]
    held = -signature.rank(list(chunks.values()))[Figure(Quantity.FREED)]
    last, most = None, 0.0
    for action in found.actions:
        role, kinds = chunks[action.stage]
        own = figures[action.stage]
        context = Context.of(role, roles, rank)
        need = signature.need(context, kinds, Previous.of(last, action), action.op)
        most = max(most, held + need)
        held += released(action.op, own[_KEPT], own[Figure(Quantity.STASH)])
        last = action
    return most
