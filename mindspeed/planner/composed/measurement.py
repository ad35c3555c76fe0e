"""Measure the signature of a layout: run its tiny runs, and take the pieces from their figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from mindspeed.adaptor.versions import at_least, megatron_version
from mindspeed.errors import MindSpeedError, PlanError
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.composed.figures import (
    Figure,
    Figures,
    Quantity,
    data_parallel_shared_fraction,
    difference,
    of_steps,
    with_split_backward,
)
from mindspeed.planner.composed.layer_run import LAYERS
from mindspeed.planner.composed.pieces import (
    Need,
    Runs,
    figures_of,
    inner_of,
    kept,
    needs_of,
    record_chunk_needs,
    record_needs,
    stages_of,
    with_role,
)
from mindspeed.planner.composed.run_cache import RunCache
from mindspeed.planner.composed.signature import Signature, difference_of
from mindspeed.planner.composed.signature_points import SignaturePoints
from mindspeed.planner.composed.tiny_run import Point, TinyRun, run
from mindspeed.planner.job import Job
from mindspeed.planner.layout import Layout
from mindspeed.planner.shape import DENSE, Shape, shape_of

RUN_SECONDS = 300.0
"""Timeout of a run."""
_FREED = Figure(Quantity.FREED)


def measure(
    job: Job,
    layout: Layout,
    cluster: Cluster | None = None,
    jobs: int = 1,
    runs: RunCache | None = None,
    check: bool = True,
    chunks: bool = True,
) -> Signature:
    """Count the tiny runs of a layout.

    Args:
        job: the model and everything that the layout leaves open.
        layout: the layout; of its pipeline and data-parallel sizes only matter whether there is a
            pipeline, its schedule, and whether ranks have several chunks.
        cluster: rates of the clock; None: no times.
        jobs: concurrent runs.
        runs: cache of runs.
        check: compare a run of three layers with its composition; else :attr:`Signature.error`
            is NaN.
        chunks: run ranks with two chunks, where the layout has several; else bytes of such ranks
            are estimates: each chunk has what a rank has once, messages are those of one chunk.

    Raises:
        MindSpeedError: the layout cannot start, or cannot be counted.
        PlanError: its schedule can only be counted whole.
    """
    import_ahead()
    shape: Shape = isolated.call(shape_of_layout, job, layout)
    if shape.uncomposable:
        raise PlanError(
            f"{shape.uncomposable}: not composed of small runs; count the whole job with "
            "mindspeed plan --check --whole"
        )
    points = SignaturePoints(layout, shape.kinds or (DENSE,))
    wanted = points.all(check, chunks)
    found = _run_all(job, wanted.values(), cluster, jobs, runs)
    return _signature(points, dict(zip(wanted, found, strict=True)))


def signature_of(shape: Shape, layout: Layout, run_of: Callable[[Point], TinyRun]) -> Signature:
    """The signature of a layout from runs that are known, without those that check it.

    Args:
        shape: of the job in the layout.
        layout: the layout.
        run_of: the run of a point.
    """
    points = SignaturePoints(layout, shape.kinds or (DENSE,))
    wanted = points.all(check=False, chunks=False)
    return _signature(points, {key: run_of(point) for key, point in wanted.items()})


def layer_point(layout: Layout, kinds: tuple[str, ...], kind: str) -> Point:
    """The run of :mod:`mindspeed.planner.composed.layer_run` for one kind of layer.

    Args:
        layout: layout of the layer.
        kinds: kinds of all layers of the model.
        kind: kind of this one.
    """
    alone = replace(layout, pp=1, vpp=1, stage_layers=None, schedule=None)
    return SignaturePoints(alone, kinds).point(0, kind, LAYERS)


def import_ahead() -> None:
    """Import the modules of every run before its processes are forked.

    Raises:
        PlanError: the installed Megatron is too old to be counted.
    """
    if not at_least("0.15"):
        raise PlanError(
            f"jobs are planned (--dry-run, too) with megatron-core 0.15.3 and newer, not with "
            f"{megatron_version()}: install megatron-core 0.16.1"
        )
    import mindspeed.megatron_adaptor  # noqa: I001 - before megatron.core

    import megatron.core.tokenizers.text  # noqa: F401
    import torch._dynamo  # noqa: F401
    import mindspeed.pipeline.schedule.megatron_work
    import mindspeed.planner.counted.fake_world
    import mindspeed.planner.counted.loop
    import mindspeed.training.model
    import mindspeed.training.pretrain
    import mindspeed.training.setup
    import mindspeed.training.step  # noqa: F401


def shape_of_layout(job: Job, layout: Layout) -> Shape:
    """The shape of a job in a layout; changes the state of this process.

    Raises:
        MindSpeedError: the job cannot start.
    """
    return shape_of(job.settings(layout.overrides(), layout.devices).args)


def _run_all(
    job: Job, points: Iterable[Point], cluster: Cluster | None, jobs: int, cache: RunCache | None
) -> list[TinyRun]:
    """Execute the runs that the cache lacks; equal points once."""
    points = list(points)
    found = [None if cache is None else cache.get(point) for point in points]
    missing = [
        index
        for index, one in enumerate(found)
        if one is None and points[index] not in points[:index]
    ]
    arguments = [(job, points[index], cluster) for index in missing]
    results = isolated.map(run, arguments, jobs, RUN_SECONDS)
    for index, result in zip(missing, results, strict=True):
        if isinstance(result, MindSpeedError):
            raise result
        found[index] = result
        if cache is not None:
            cache.put(points[index], result)
    first = [found[points.index(point)] for point in points]
    return [one for one in first if one is not None]


def _signature(points: SignaturePoints, runs: Runs) -> Signature:
    kinds = points.kinds
    first, last = kinds[0], kinds[-1]
    one = {kind: figures_of(runs["middle", kind, 1]) for kind in kinds}
    layers = {k: difference(figures_of(runs["middle", k, 2]), one[k]) for k in kinds}
    for kind in kinds:
        if ("first", kind, 2) in runs:  # only the first stage does not split its backward
            ends = [figures_of(runs["first", kind, n]) for n in (1, 2)]
            whole = {name: n for name, n in difference(*ends[::-1]).items() if name.op == "B"}
            layers[kind] = with_split_backward(whole | layers[kind])
    roles = {"middle": difference(one[first], layers[first])}
    if points.pipeline:
        roles["first"] = difference(figures_of(runs["first", first, 1]), layers[first])
        roles["last"] = difference(figures_of(runs["last", last, 1]), layers[last])
    if any(name.op == "I" for name in layers[first]):
        roles = {role: with_split_backward(figures) for role, figures in roles.items()}
    once = _once(runs, roles, layers)
    alone = not any(role == "chunks" for role, *_ in runs)
    needs: dict[Need, float] = {}
    for (role, kind, n), found in runs.items():
        if role == "chunks":
            _chunk_needs(found, n, kind, roles, layers, needs)
        elif n == 1 and role in ("first", "middle", "last") and alone:
            record_needs(needs, role, kind, found, kept(found))
    inner = {
        (kind, op): value
        for kind in kinds
        for op, value in inner_of(
            needs_of(runs, [("middle", kind, 1)]),
            needs_of(runs, [("middle", kind, 2)]),
            layers[kind][Figure(Quantity.KEPT)],
        ).items()
    }
    shared = _shared(kinds, layers, roles, runs)
    if not points.pipeline:
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
        error=math.nan,
    )
    if ("middle", first, 3) not in runs:
        return signature
    return _compared(signature, points, runs)


def _compared(signature: Signature, points: SignaturePoints, runs: Runs) -> Signature:
    """The signature with its errors, of runs that are compared with their composition."""
    first, last = points.kinds[0], points.kinds[-1]
    role = "middle" if points.pipeline else "only"
    one_chunk = {role: difference(figures_of(runs["middle", first, 1]), signature.layers[first])}
    plain = with_role(needs_of(runs, [("middle", first, 1)]), role)
    checked = replace(signature, roles=one_chunk, needs=plain)
    three = runs["middle", first, 3]
    layers_of_three = dict.fromkeys(stages_of(three), (role, (first,) * 3))
    grown = [difference_of(checked, three, layers_of_three)]
    if ("last", last, 2) in runs:
        at_end = replace(signature, needs=needs_of(runs, [("middle", last, 1), ("last", last, 1)]))
        two = runs["last", last, 2]
        grown.append(difference_of(at_end, two, {stages_of(two)[0]: ("last", (last,) * 2)}))
    others = []
    for (name, kind, rank), found in runs.items():
        if name in ("chunks", "three"):
            stages = stages_of(found)
            own = {s: (_role_of(s) if name == "chunks" else "middle", (kind,)) for s in stages}
            others.append(difference_of(signature, found, own, rank))
        elif name == "mixed":
            end = "first" if points.pipeline else "only"
            others.append(difference_of(signature, found, {0: (end, (first, last))}))
    return replace(
        signature,
        error=max([one.largest for one in grown] + [one.linear for one in others]),
        shift=max((one.peak for one in others), default=0.0),
    )


def _shared(
    kinds: tuple[str, ...],
    layers: Mapping[str, Figures],
    roles: Mapping[str, Figures],
    runs: Runs,
) -> dict[str, Figures]:
    """Fractions of the figures of layers and roles that data-parallel ranks share.

    What the ends add are parameters, of which the fraction of layers is shared.
    """
    first = kinds[0]
    one, wide = figures_of(runs["plain", first, 1]), figures_of(runs["wide", first, 1])
    layer = difference(figures_of(runs["plain", first, 2]), one)
    wide_layer = difference(figures_of(runs["wide", first, 2]), wide)
    of_layer = data_parallel_shared_fraction(layer, wide_layer)
    middle = roles["middle"]
    of_middle = data_parallel_shared_fraction(difference(one, layer), difference(wide, wide_layer))
    found: dict[str, Figures] = {**dict.fromkeys(kinds, of_layer), "middle": of_middle}
    for role in {*roles} - {"middle"}:
        found[role] = {
            name: (middle[name] * of_middle[name] + (value - middle[name]) * fraction) / value
            for name, fraction in of_layer.items()
            if (value := roles[role].get(name, 0.0)) and name in of_middle
        }
    return found


def _once(
    runs: Runs, roles: Mapping[str, Figures], layers: Mapping[str, Figures]
) -> dict[frozenset[str], Figures]:
    """Figures that a rank has once but each of its two chunks counts."""
    found: dict[frozenset[str], Figures] = {}
    for (role, kind, _), real in runs.items():
        if role == "chunks":
            names = [_role_of(stage) for stage in stages_of(real)]
            once = of_steps(figures_of(real))
            once[_FREED] = len(names) * layers[kind][_FREED] + _freed(roles, names)
            twice = [roles[name] for name in names] + [layers[kind]] * len(names)
            found[frozenset(names)] = {
                name: sum(one.get(name, 0.0) for one in twice) - value
                for name, value in once.items()
            }
    return found


def _freed(roles: Mapping[str, Figures], names: Sequence[str]) -> float:
    """Bytes released before the chunks of a rank run; the message that arrived is there once."""
    total = sum(roles[name][_FREED] for name in names)
    return total - (len(names) - 1) * roles["middle"][_FREED]


def _role_of(stage: int) -> str:
    """Role of a stage in a pipeline of four ranks with two chunks each."""
    return {0: "first", 7: "last"}.get(stage, "middle")


def _chunk_needs(
    found: TinyRun,
    rank: int,
    kind: str,
    roles: Mapping[str, Figures],
    layers: Mapping[str, Figures],
    needs: dict[Need, float],
) -> None:
    """Record the needs of a rank with two chunks.

    The bytes that they keep come from ranks with one chunk: with two, the messages that arrive
    while another chunk runs are among the bytes of a forward.
    """
    own, stages, keeps = layers[kind], stages_of(found), Figure(Quantity.KEPT)
    kept_by = {s: roles[_role_of(s)][keeps] + own[keeps] for s in stages}
    freed = len(stages) * own[_FREED] + _freed(roles, [_role_of(s) for s in stages])
    stash = own[Figure(Quantity.STASH)]
    record_chunk_needs(needs, kind, found, kept_by, stash, freed, _role_of, rank)
