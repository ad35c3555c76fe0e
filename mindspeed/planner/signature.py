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

Models with several kinds of layers (dense, expert, recomputed) have the first two runs for each. A
further run on twice as many data-parallel ranks tells what those ranks share, and one with three
layers is compared with its composition. Without a pipeline the only stage takes the place of the
middle one.

What an action needs beyond what micro-batches in flight keep depends on the messages around it:
it is measured for each action and the one before it (:attr:`Signature.needs`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from mindspeed.errors import MindSpeedError
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.job import Job
from mindspeed.planner.layout import V_SHAPES, Layout
from mindspeed.planner.shape import DENSE, NOOP, RECOMPUTED, Shape, shape_of
from mindspeed.planner.tiny_run import Point, TinyRun, run

Figures = Mapping[str, float]
"""Figures by name; see :func:`figures_of`."""

Need = tuple[str, str, str, str]
"""Role, kind of the only layer, op before, op."""

TOLERANCE = 0.001
"""Of the composition of the run that is compared."""


@dataclass(frozen=True)
class Signature:
    """The pieces of a model under one layout of its layers.

    Attributes:
        layers: by kind of layer.
        roles: what a chunk adds to its layers, by its role: ``first``, ``middle``, ``last``, or
            ``only``.
        needs: bytes that an action needs at its peak beyond those kept by all micro-batches in
            flight, its own among them in backward; of a chunk with one layer.
        shared: for names of figures the part that data-parallel ranks share.
        data_parallel: size in the runs.
        error: largest relative error of the run that was compared with its composition: of its
            static bytes and of its peak.
    """

    layers: Mapping[str, Figures]
    roles: Mapping[str, Figures]
    needs: Mapping[Need, float]
    shared: Figures
    data_parallel: int
    error: float

    @property
    def fits(self) -> bool:
        """Whether composition is as exact as is promised; otherwise count whole jobs."""
        return self.error <= TOLERANCE

    def chunk(self, role: str, kinds: Iterable[str]) -> dict[str, float]:
        """Figures of a chunk, of data-parallel ranks as in the runs."""
        return _sum([self.roles[role], *(self.layers[kind] for kind in kinds if kind != NOOP)])

    def at(self, figures: Figures, data_parallel: int) -> dict[str, float]:
        """Figures with another number of data-parallel ranks."""
        ratio = self.data_parallel / data_parallel
        return {
            name: value * (1 + self.shared.get(name, 0.0) * (ratio - 1))
            for name, value in figures.items()
        }

    def need(self, role: str, kinds: tuple[str, ...], before: str, op: str) -> float:
        """Bytes at the peak of an action of a chunk, beyond those kept.

        Forward has kept the layers before the one that runs, backward no longer those after it.
        """
        real = [kind for kind in kinds if kind != NOOP]
        if not real:
            return self._need(role, next(iter(self.layers)), before, op)
        kept = [self.layers[kind]["kept"] for kind in real]
        best = -math.inf
        for kind in dict.fromkeys(real):
            if op in ("F", "Fc"):
                last = len(real) - 1 - real[::-1].index(kind)
                around = sum(kept[:last])
            elif op in ("B", "I"):
                last = len(real) - 1 - real[::-1].index(kind)
                around = -sum(kept[last + 1 :])
            else:
                around = 0.0
            best = max(best, self._need(role, kind, before, op) + around)
        return best

    def _need(self, role: str, kind: str, before: str, op: str) -> float:
        for wanted in ((role, kind, before), (role, kind), (role,), ()):
            found = [
                value
                for key, value in self.needs.items()
                if key[: len(wanted)] == wanted and key[3] == op
            ]
            if found:
                return max(found)
        return 0.0


def measure(job: Job, layout: Layout, cluster: Cluster | None = None, jobs: int = 1) -> Signature:
    """Count the tiny runs of a layout.

    Args:
        job: the model and everything that the layout leaves open.
        layout: whose pipeline and data-parallel sizes only matter in what follows: whether there
            is a pipeline, its schedule, and whether ranks have several chunks.
        cluster: rates of the clock; None: no times.
        jobs: runs at a time.

    Raises:
        MindSpeedError: the layout cannot start, or cannot be counted.
    """
    _import_ahead()
    shape: Shape = isolated.call(_shape, job, layout)
    return _Measurement(job, layout, shape, cluster, jobs).signature()


def _import_ahead() -> None:
    """What every run needs, once for all of its processes."""

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
    shape: Shape
    cluster: Cluster | None
    jobs: int

    def signature(self) -> Signature:
        kinds = self.shape.kinds or (DENSE,)
        first, last = kinds[0], kinds[-1]
        points = {("middle", kind, n): self._point(1, kind, n) for kind in kinds for n in (1, 2)}
        points["middle", first, 3] = self._point(1, first, 3)
        points["middle", first, 0] = self._point(1, first, 1, data_parallel=2)
        if self._pipeline:
            points["first", first, 1] = self._point(0, first, 1)
            points["last", last, 1] = self._point(3, last, 1)
        if self._several:
            points["chunks", first, 0] = self._chunks(0, first)
            points["chunks", last, 1] = self._chunks(1, last)
        runs = dict(zip(points, self._run(points.values()), strict=True))
        return self._signature(kinds, runs)

    def _signature(
        self, kinds: tuple[str, ...], runs: Mapping[tuple[str, str, int], TinyRun]
    ) -> Signature:
        first, last = kinds[0], kinds[-1]
        one = {kind: figures_of(runs["middle", kind, 1]) for kind in kinds}
        layers = {k: _less(figures_of(runs["middle", k, 2]), one[k]) for k in kinds}
        roles = {"middle": _less(one[first], layers[first])}
        if self._pipeline:
            roles["first"] = _less(figures_of(runs["first", first, 1]), layers[first])
            roles["last"] = _less(figures_of(runs["last", last, 1]), layers[last])
        needs: dict[Need, float] = {}
        for (role, kind, n), found in runs.items():
            if role == "chunks":
                self._chunk_needs(found, n, kind, roles, layers, needs)
            elif n == 1 and not self._several:
                _note(needs, role, kind, found, _kept(found))
        if not self._pipeline:
            roles = {"only": roles["middle"]}
            needs = {("only", *key[1:]): value for key, value in needs.items()}
        halved = figures_of(runs["middle", first, 0])
        signature = Signature(
            layers=layers,
            roles=roles,
            needs=needs,
            shared=_shared(one[first], halved),
            data_parallel=runs["middle", first, 1].data_parallel,
            error=0.0,
        )
        return replace(signature, error=_error(signature, runs["middle", first, 3], first))

    def _chunk_needs(
        self,
        found: TinyRun,
        rank: int,
        kind: str,
        roles: dict[str, dict[str, float]],
        layers: Mapping[str, Figures],
        needs: dict[Need, float],
    ) -> None:
        """What the chunks of a rank with two of them keep and need."""
        roles_of = {0: "first", 3: "last"}
        kept = {
            stage: _kept(found, stage) for stage in dict.fromkeys(a.stage for a in found.actions)
        }
        for stage, nbytes in kept.items():
            role = roles_of.get(stage, "middle")
            roles[role] = {**roles[role], "kept": nbytes - layers[kind]["kept"]}
        _note_chunks(needs, kind, found, kept, lambda stage: roles_of.get(stage, "middle"))

    @property
    def _pipeline(self) -> bool:
        return self.layout.pp > 1

    @property
    def _several(self) -> bool:
        """Whether a rank has several chunks, so that runs with one do not have its schedule."""
        return self._pipeline and (self.layout.vpp > 1 or self.layout.schedule in V_SHAPES)

    def _run(self, points: Iterable[Point]) -> list[TinyRun]:
        found = []
        arguments = [(self.job, point, self.cluster) for point in points]
        for result in isolated.map(run, arguments, self.jobs):
            if isinstance(result, MindSpeedError):
                raise result
            found.append(result)
        return found

    def _point(self, stage: int, kind: str, layers: int, data_parallel: int = 1) -> Point:
        """A stage of four, or the only one, with so many layers."""
        ranks = 4 if self._pipeline else 1
        schedule = None if self._several else self.layout.schedule
        batches = 5 if self._pipeline else 2
        layout = self._tiny(ranks, 1, batches, data_parallel, schedule)
        total = ranks * layers
        return Point(
            layout.overrides() | self._flags(kind, total), layout.devices, stage if ranks > 1 else 0
        )

    def _chunks(self, rank: int, kind: str) -> Point:
        """A rank of two with two chunks each of one layer."""
        layout = self._tiny(2, 2, 4, 1, self.layout.schedule)
        return Point(layout.overrides() | self._flags(kind, 4), layout.devices, rank)

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
        if any(not k.startswith(DENSE) for k in self.shape.kinds):
            flags["moe_layer_freq"] = f"[{int(plain != DENSE)}]*{layers}"
        if any(k.endswith(RECOMPUTED) for k in self.shape.kinds):
            again = kind.endswith(RECOMPUTED)
            flags["recompute_granularity"] = "full" if again else None
            flags["recompute_method"] = "uniform" if again else None
            flags["recompute_num_layers"] = 1 if again else None
        return flags


def figures_of(found: TinyRun) -> dict[str, float]:
    """Figures of a rank with one chunk that are linear in its layers.

    Bytes: ``weights``, ``gradients``, ``optimizer`` ... between steps; ``tail`` alive after the
    last action; ``kept`` by a micro-batch in flight, ``stash`` by a pending weight gradient.
    ``flops``, ``recomputed`` of a micro-batch, ``parameters``. Seconds of an action ``seconds F``
    ..., after the last one ``seconds tail`` without waiting; ``wait`` within a micro-batch, by
    process group. Whole bytes of collectives of data-parallel groups, as ``dp all_gather``.
    """
    batches = found.micro_batches
    figures: dict[str, float] = {f"static {kind}": n for kind, n in found.static.items()}
    figures |= {
        "parameters": found.parameters,
        "tail": found.tail,
        "kept": _kept(found),
        "stash": _stash(found),
        "flops": found.flops / batches,
        "recomputed": found.recomputed / batches,
        "seconds tail": found.tail_seconds - found.tail_exposed,
    }
    for op in dict.fromkeys(action.op for action in found.actions):
        seconds = [action.seconds for action in found.actions if action.op == op]
        figures[f"seconds {op}"] = median(seconds)
    figures |= found.collectives
    for group, waited in found.exposed.items():
        figures[f"wait {group}"] = waited / batches
    return figures


def _kept(found: TinyRun, stage: int | None = None) -> float:
    """Bytes of one more micro-batch in flight: between two forwards of the same chunk.

    The last such pair counts: the first forward of a step has no message left over from before.
    """
    pairs = list(zip(found.actions, found.actions[1:], strict=False))
    forwards = [(a, b) for a, b in pairs if a.op == "F" and stage in (None, a.stage)]
    again = [b.level - a.level for a, b in forwards if b.op == "F" and b.stage == a.stage]
    return (again or [b.level - a.level for a, b in forwards])[-1]


def _stash(found: TinyRun) -> float:
    return max((action.dropped for action in found.actions if action.op == "W"), default=0)


def _note(needs: dict[Need, float], role: str, kind: str, found: TinyRun, kept: float) -> None:
    """What each action of a rank with one chunk needs."""
    stages = dict.fromkeys(action.stage for action in found.actions)
    _note_chunks(needs, kind, found, dict.fromkeys(stages, kept), lambda stage: role)


def _note_chunks(
    needs: dict[Need, float], kind: str, found: TinyRun, kept: Mapping[int, float], role_of: Any
) -> None:
    stash, held, before = _stash(found), 0.0, ""
    for action in found.actions:
        key = role_of(action.stage), kind, before, action.op
        needs[key] = max(needs.get(key, -math.inf), action.peak - held)
        held += released(action.op, kept[action.stage], stash)
        before = action.op


def released(op: str, kept: float, stash: float) -> float:
    """What an action adds to the bytes that micro-batches in flight keep."""
    return {"F": kept, "B": -kept, "I": stash - kept, "W": -stash}.get(op, 0.0)


def _shared(one: Figures, more: Figures) -> dict[str, float]:
    """The part of each figure that halves on twice as many ranks."""
    parts = {}
    for name, value in one.items():
        if not value or not (name.startswith("static") or name in ("tail", "seconds tail")):
            continue
        part = 2 * (value - more.get(name, 0.0)) / value
        parts[name] = min(max(part, 0.0), 1.0)
    return parts


def _error(signature: Signature, found: TinyRun, kind: str) -> float:
    """Of static bytes and peak of a run with three layers."""
    role = "middle" if "middle" in signature.roles else "only"
    composed = signature.chunk(role, [kind] * 3)
    real = figures_of(found)
    names = [name for name in real if name.startswith("static")]
    static, truth = sum(composed[n] for n in names), sum(real[n] for n in names)
    peak = truth + max(action.peak for action in found.actions)
    held, before, most = 0.0, "", 0.0
    for action in found.actions:
        most = max(most, held + signature.need(role, (kind,) * 3, before, action.op))
        held += released(action.op, composed["kept"], composed["stash"])
        before = action.op
    return max(abs(static / truth - 1), abs((static + most) / peak - 1))


def _sum(parts: Iterable[Figures]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for part in parts:
        for name, value in part.items():
            total[name] += value  # type: ignore[assignment]
    return dict(total)


def _less(one: Figures, other: Figures) -> dict[str, float]:
    return {name: one.get(name, 0.0) - other.get(name, 0.0) for name in {**one, **other}}
