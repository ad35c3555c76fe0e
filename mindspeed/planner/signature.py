"""A model in pieces, measured by four tiny runs: what a layer, the ends and a chunk each add.

    signature = measure(job, layout)
    signature.layers["dense"]["kept"]       # activation bytes that a layer keeps of a micro-batch

All figures of a pipeline stage are linear in its layers, so a layer is the difference of two runs;
the embedding and the head are the differences of two more:

| run                              | gives                                              |
|---                               |---                                                 |
| middle stage, 1 layer            | what a chunk has besides its layers                |
| middle stage, 2 layers           | less the first run: a layer                        |
| first stage, 1 layer             | less the first run: the embedding                  |
| last stage, 1 layer              | less the first run: final norm, head and loss      |

Models with several kinds of layers (dense, expert, recomputed) have the first two runs for each.
Two further runs on twice as many data-parallel ranks, compared with two of the same layout without
recomputation, tell what those ranks share, and one with three layers is compared with its
composition. Without a pipeline the only stage takes the place of
the middle one.

What an action needs beyond what micro-batches in flight keep depends on the messages around it:
it is measured for each action and the one before it (:attr:`Signature.needs`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mindspeed.errors import MindSpeedError, PlanError
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.job import Job
from mindspeed.planner.layer_run import LAYERS
from mindspeed.planner.layout import V_SHAPES, Layout, Recompute
from mindspeed.planner.pieces import (
    OTHER,
    Figures,
    Need,
    Runs,
    before,
    figures_of,
    halved,
    inner_of,
    kept,
    less,
    needs_of,
    note,
    note_chunks,
    of_steps,
    place,
    released,
    stages_of,
    weighted,
    with_role,
)
from mindspeed.planner.shape import DENSE, EXPERT, NOOP, RECOMPUTED, Shape, shape_of
from mindspeed.planner.tiny_run import Point, TinyRun, run

ONE_CHUNK = {"zb-v": "zb-h1", "dualpipev": "zb-h1", "aiao": None, "interleaved": None}
"""Schedules of ranks with one chunk that have the actions of those with several."""

TOLERANCE = 0.001
"""Of the composition of the run that is compared."""

RUN_SECONDS = 300.0
"""After which a run counts as one that does not end."""


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
        error: largest relative error of the runs that were compared with their composition: of
            static bytes and of the peak.
    """

    layers: Mapping[str, Figures]
    roles: Mapping[str, Figures]
    needs: Mapping[Need, float]
    inner: Mapping[tuple[str, str], float]
    once: Mapping[frozenset[str], Figures]
    shared: Mapping[str, Figures]
    data_parallel: int
    error: float

    @property
    def fits(self) -> bool:
        """Whether composition is as exact as is promised; otherwise count whole jobs."""
        return self.error <= TOLERANCE

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
            place: of the chunk (:data:`~mindspeed.planner.pieces.Need`).
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
                layer = self._need("middle", kind, before, op) + inner
                if op in ("B", "I") and role == "last":  # the head's are released before
                    layer -= self._kept_by_head
                own = max(own, layer) if role == "last" else own + inner
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
            lambda key: key[:3] == (place, kind, same),
            lambda key: key[:2] == (place, kind),
            lambda key: key[0].endswith(role) and key[1] == kind,
            lambda key: key[0].endswith("middle") and key[1:3] == (kind, same),
            lambda key: key[0].endswith("middle") and key[1] == kind,
            lambda key: key[1] == kind,
        ):
            if found := [key for key in keys if fits(key)]:
                return max(self.needs[key] for key in found)
        return max((self.needs[key] for key in keys), default=0.0)


class KnownRuns(Protocol):
    """Runs of the job and the cluster that were made before."""

    def get(self, point: Point) -> TinyRun | None:
        """The run of a point; None if it was not made."""

    def put(self, point: Point, run: TinyRun) -> None:
        """Keep a run."""


def measure(
    job: Job,
    layout: Layout,
    cluster: Cluster | None = None,
    jobs: int = 1,
    runs: KnownRuns | None = None,
    check: bool = True,
    chunks: bool = True,
) -> Signature:
    """Count the tiny runs of a layout.

    Args:
        job: the model and everything that the layout leaves open.
        layout: whose pipeline and data-parallel sizes only matter in what follows: whether there
            is a pipeline, its schedule, and whether ranks have several chunks.
        cluster: rates of the clock; None: no times.
        jobs: runs at a time.
        runs: those made before, and where new ones are kept.
        check: compare a run of three layers with its composition; else :attr:`Signature.error`
            is not a number.
        chunks: run ranks with two chunks, where the layout has several; else bytes of such ranks
            are estimates: each chunk has what a rank has once, messages are those of one chunk.

    Raises:
        MindSpeedError: the layout cannot start, or cannot be counted.
        PlanError: its schedule is one that is only counted whole.
    """
    import_ahead()
    shape: Shape = isolated.call(_shape, job, layout)
    if shape.uncomposable:
        raise PlanError(
            f"{shape.uncomposable}: not composed of small runs; count the whole job with "
            "mindspeed plan --check --whole"
        )
    asked = _Measurement(job, layout, shape.kinds or (DENSE,), cluster, jobs, runs)
    return asked.signature(check, chunks)


def layer_point(job: Job, layout: Layout, kinds: tuple[str, ...], kind: str) -> Point:
    """The run of :mod:`mindspeed.planner.layer_run` for a layer of a signature.

    Args:
        job: the model.
        layout: whose layer it is.
        kinds: of all layers of the model.
        kind: of this one.
    """
    alone = replace(layout, pp=1, vpp=1, stage_layers=None, schedule=None)
    return _Measurement(job, alone, kinds, None, 1)._point(0, kind, LAYERS)


def import_ahead() -> None:
    """What every run needs, once for all of its processes."""

    import mindspeed.megatron_adaptor  # noqa: I001 - before megatron.core

    import megatron.core.tokenizers.text  # noqa: F401
    import torch._dynamo  # noqa: F401
    import mindspeed.pipeline.schedule.work.megatron
    import mindspeed.planner.fake_world
    import mindspeed.planner.step_of_rank
    import mindspeed.training.model
    import mindspeed.training.setup
    import mindspeed.training.step  # noqa: F401


def _shape(job: Job, layout: Layout) -> Shape:
    return shape_of(job.settings(layout.overrides(), layout.devices).args)


@dataclass(frozen=True)
class _Measurement:
    job: Job
    layout: Layout
    kinds: tuple[str, ...]
    cluster: Cluster | None
    jobs: int
    known: KnownRuns | None = None

    def signature(self, check: bool, chunks: bool) -> Signature:
        kinds = self.kinds
        first, last = kinds[0], kinds[-1]
        points = {("middle", kind, n): self._point(1, kind, n) for kind in kinds for n in (1, 2)}
        if check:
            points["middle", first, 3] = self._point(1, first, 3)
            if first != last:
                points["mixed", first, 2] = self._mixed(first, last)
        plain = self._plain()
        for n in (1, 2):
            points["plain", first, n] = plain._point(1, plain.kinds[0], n)
            points["wide", first, n] = plain._point(1, plain.kinds[0], n, data_parallel=2)
        if self._pipeline:
            points["first", first, 1] = self._point(0, first, 1)
            points["last", last, 1] = self._point(3, last, 1)
        if self._several and chunks:
            points["chunks", first, 0] = self._chunks(0, first)
            points["chunks", first, 1] = self._chunks(1, first)
            points["chunks", first, 2] = self._chunks(2, first)
            if self.layout.schedule not in V_SHAPES:
                points["chunks", last, 3] = self._chunks(3, last)
        runs = dict(zip(points, self._run(points.values()), strict=True))
        return self._signature(kinds, runs)

    def _signature(self, kinds: tuple[str, ...], runs: Runs) -> Signature:
        first, last = kinds[0], kinds[-1]
        one = {kind: figures_of(runs["middle", kind, 1]) for kind in kinds}
        layers = {k: less(figures_of(runs["middle", k, 2]), one[k]) for k in kinds}
        roles = {"middle": less(one[first], layers[first])}
        if self._pipeline:
            roles["first"] = less(figures_of(runs["first", first, 1]), layers[first])
            roles["last"] = less(figures_of(runs["last", last, 1]), layers[last])
        once = self._once(runs, roles, layers)
        alone = not any(role == "chunks" for role, *_ in runs)
        needs: dict[Need, float] = {}
        for (role, kind, n), found in runs.items():
            if role == "chunks":
                self._chunk_needs(found, n, kind, roles, layers, needs)
            elif n == 1 and role not in ("plain", "wide", "mixed") and alone:
                note(needs, role, kind, found, kept(found))
        plain = needs_of(runs, [("middle", first, 1)])
        inner = {
            (kind, op): value
            for kind in kinds
            for op, value in inner_of(
                needs_of(runs, [("middle", kind, 1)]),
                needs_of(runs, [("middle", kind, 2)]),
                layers[kind]["kept"],
            ).items()
        }
        shared = self._shared(kinds, layers, roles, runs)
        if not self._pipeline:
            roles = {"only": roles["middle"]}
            shared["only"] = shared["middle"]
            needs = with_role(needs, "only")
        signature = Signature(
            layers=layers,
            roles=roles,
            needs=needs,
            inner=inner,
            once=once,
            shared=shared,
            data_parallel=runs["middle", first, 1].data_parallel,
            error=0.0,
        )
        three = runs.get(("middle", first, 3))
        if three is None:
            return replace(signature, error=math.nan)
        role = "middle" if self._pipeline else "only"
        one_chunk = {role: less(one[first], layers[first])}
        checked = replace(signature, roles=one_chunk, needs=with_role(plain, role))
        errors = [_error(checked, three, dict.fromkeys(stages_of(three), (role, (first,) * 3)))]
        for (name, kind, rank), found in runs.items():
            if name == "chunks":
                rank_has = {stage: (self._role_of(stage), (kind,)) for stage in stages_of(found)}
                errors.append(_error(signature, found, rank_has, rank))
            elif name == "mixed":
                end = "first" if self._pipeline else "only"
                errors.append(_error(signature, found, {0: (end, (first, last))}))
        return replace(signature, error=max(errors))

    def _shared(
        self,
        kinds: tuple[str, ...],
        layers: Mapping[str, Figures],
        roles: Mapping[str, Figures],
        runs: Runs,
    ) -> dict[str, Figures]:
        """What of layers and roles halves on twice as many data-parallel ranks.

        The ends are shared as layers are: what they add are parameters.
        """
        first = kinds[0]
        one, wide = figures_of(runs["plain", first, 1]), figures_of(runs["wide", first, 1])
        layer = less(figures_of(runs["plain", first, 2]), one)
        wide_layer = less(figures_of(runs["wide", first, 2]), wide)
        of_layer = halved(layer, wide_layer)
        middle = roles["middle"]
        of_middle = halved(less(one, layer), less(wide, wide_layer))
        found: dict[str, Figures] = {**dict.fromkeys(kinds, of_layer), "middle": of_middle}
        for role in {*roles} - {"middle"}:
            found[role] = {
                name: weighted(middle[name], of_middle[name], value - middle[name], part)
                for name, part in of_layer.items()
                if (value := roles[role].get(name, 0.0)) and name in of_middle
            }
        return found

    def _once(
        self, runs: Runs, roles: Mapping[str, Figures], layers: Mapping[str, Figures]
    ) -> dict[frozenset[str], Figures]:
        """What two chunks count twice and a rank with both of them has once."""
        found: dict[frozenset[str], Figures] = {}
        for (role, kind, _), real in runs.items():
            if role == "chunks":
                names = [self._role_of(stage) for stage in stages_of(real)]
                once = of_steps(figures_of(real))
                twice = [roles[name] for name in names] + [layers[kind]] * len(names)
                found[frozenset(names)] = {
                    name: sum(one.get(name, 0.0) for one in twice) - value
                    for name, value in once.items()
                }
        return found

    @staticmethod
    def _role_of(stage: int) -> str:
        """Of a pipeline of four ranks with two chunks each."""
        return {0: "first", 7: "last"}.get(stage, "middle")

    def _chunk_needs(
        self,
        found: TinyRun,
        rank: int,
        kind: str,
        roles: Mapping[str, Figures],
        layers: Mapping[str, Figures],
        needs: dict[Need, float],
    ) -> None:
        """What the chunks of a rank with two of them need.

        What they keep is known from ranks with one chunk: with two, the messages that arrive while
        another chunk runs are among the bytes of a forward.
        """
        own = layers[kind]
        kept_by = {s: roles[self._role_of(s)]["kept"] + own["kept"] for s in stages_of(found)}
        note_chunks(needs, kind, found, kept_by, own["stash"], self._role_of, rank)

    def _plain(self) -> _Measurement:
        """The layout with what data-parallel ranks share, and without what they do not.

        Parameters and what is made of them: layouts that differ in the size of a micro-batch or in
        recomputation have the same.
        """
        layout = replace(self.layout, mbs=1)
        if layout.recompute is not None:
            layout = replace(layout, recompute=Recompute())
        kinds = tuple(dict.fromkeys(kind.removesuffix(RECOMPUTED) for kind in self.kinds))
        if layout.recompute is None:
            kinds = self.kinds
        return replace(self, layout=layout, kinds=kinds)

    @property
    def _pipeline(self) -> bool:
        return self.layout.pp > 1

    @property
    def _several(self) -> bool:
        """Whether a rank has several chunks, so that runs with one do not have its schedule."""
        return self._pipeline and (self.layout.vpp > 1 or self.layout.schedule in V_SHAPES)

    def _run(self, points: Iterable[Point]) -> list[TinyRun]:
        points = list(points)
        found = [None if self.known is None else self.known.get(point) for point in points]
        missing = [
            index
            for index, one in enumerate(found)
            if one is None and points[index] not in points[:index]
        ]
        arguments = [(self.job, points[index], self.cluster) for index in missing]
        results = isolated.map(run, arguments, self.jobs, RUN_SECONDS)
        for index, result in zip(missing, results, strict=True):
            if isinstance(result, MindSpeedError):
                raise result
            found[index] = result
            if self.known is not None:
                self.known.put(points[index], result)
        first = [found[points.index(point)] for point in points]  # some are the same
        return [one for one in first if one is not None]

    def _point(self, stage: int, kind: str, layers: int, data_parallel: int = 1) -> Point:
        """A stage of four, or the only one, with so many layers."""
        ranks = 4 if self._pipeline else 1
        schedule = ONE_CHUNK.get(self.layout.schedule or "", self.layout.schedule)
        batches = 5 if self._pipeline else 2
        layout = self._tiny(ranks, 1, batches, data_parallel, schedule)
        total = ranks * layers
        return Point(
            layout.overrides() | self._flags(kind, total), layout.devices, stage if ranks > 1 else 0
        )

    def _mixed(self, first: str, last: str) -> Point:
        """The first stage of four, or the only one, with a layer of each of two kinds."""
        layers = 2 * (4 if self._pipeline else 1)
        point = self._point(0, first, 2)
        flags = dict(point.overrides)
        if "moe_layer_freq" in flags:
            pattern = [int(not kind.startswith(DENSE)) for kind in (first, last)]
            flags["moe_layer_freq"] = str(pattern * (layers // 2)).replace(" ", "")
        if first.endswith(RECOMPUTED) and not last.endswith(RECOMPUTED):
            flags["recompute_method"] = "block"
        return Point(flags, point.devices, point.stage)

    def _chunks(self, rank: int, kind: str) -> Point:
        """A rank of four with two chunks each of one layer."""
        layout = self._tiny(4, 2, 8, 1, self.layout.schedule)
        return Point(layout.overrides() | self._flags(kind, 8), layout.devices, rank)

    def _tiny(
        self, pp: int, vpp: int, batches: int, data_parallel: int, schedule: str | None
    ) -> Layout:
        """The layout on the fewest data-parallel ranks that share anything, or more of them."""
        base = self.layout.signature()
        dp = base.devices // (base.tp * base.cp) * 2 * data_parallel
        return replace(
            base,
            devices=base.tp * base.cp * dp * pp,
            global_batch_size=base.mbs * dp * batches,
            pp=pp,
            vpp=vpp,
            schedule=schedule if pp > 1 else None,
        )

    def _flags(self, kind: str, layers: int) -> dict[str, Any]:
        """A model of layers of one kind."""
        flags: dict[str, Any] = {"num_layers": layers, "noop_layers": None}
        plain = kind.removesuffix(RECOMPUTED)
        if any(not k.startswith(DENSE) for k in self.kinds):
            flags["moe_layer_freq"] = f"[{int(plain != DENSE)}]*{layers}"
        if any(k.endswith(RECOMPUTED) for k in self.kinds):
            again = kind.endswith(RECOMPUTED)
            flags["recompute_granularity"] = "full" if again else None
            flags["recompute_method"] = "uniform" if again else None
            flags["recompute_num_layers"] = 1 if again else None
        return flags


def _error(
    signature: Signature,
    found: TinyRun,
    chunks: Mapping[int, tuple[str, tuple[str, ...]]],
    rank: int = 0,
) -> float:
    """Of static bytes and peak of a run whose rank has these chunks, by stage."""
    composed = signature.rank(list(chunks.values()))
    real = figures_of(found)
    names = [name for name in real if name.startswith("static")]
    static, truth = sum(composed[n] for n in names), sum(real[n] for n in names)
    peak = truth + max(action.peak for action in found.actions)
    figures = {stage: signature.chunk(*chunk) for stage, chunk in chunks.items()}
    roles = [role for role, _ in chunks.values()]
    held, last, most = 0.0, None, 0.0
    for action in found.actions:
        role, kinds = chunks[action.stage]
        own = figures[action.stage]
        need = signature.need(place(role, roles, rank), kinds, before(last, action), action.op)
        most = max(most, held + need)
        held += released(action.op, own["kept"], own["stash"])
        last = action
    return max(abs(static / truth - 1), abs((static + most) / peak - 1))
