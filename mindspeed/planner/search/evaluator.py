"""Bounds, checks, recordings and prices of the layouts of one job, for a search."""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from mindspeed.errors import ConfigError, MindSpeedError
from mindspeed.features.registry import options, planned_as
from mindspeed.pipeline.layout import evenly
from mindspeed.pipeline.layout import stage_layers as in_order
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.compose.job import (
    RUN_SECONDS,
    Tracer,
    estimates,
    shape_of_layout,
)
from mindspeed.planner.compose.templates import NotSpliceable
from mindspeed.planner.count import planned_tensors
from mindspeed.planner.count.cache import RunCache
from mindspeed.planner.count.check import check
from mindspeed.planner.count.layer_run import LayerRun, layer_point, layer_run
from mindspeed.planner.count.recording import Point
from mindspeed.planner.job import Job
from mindspeed.planner.layout import Layout, Recompute
from mindspeed.planner.search.bounds import Bound, Bounds
from mindspeed.planner.search.selective import Saving
from mindspeed.planner.shape import PAIRS, RECOMPUTED, Shape, shape_of, spread
from mindspeed.planner.time.prediction import Prediction
from mindspeed.planner.time.price import predict
from mindspeed.planner.time.whole_ranks import predict_whole


class JobEvaluator:
    """Evaluates the layouts of a job on a cluster.

    Args:
        args: its final values, in any layout.
    """

    def __init__(
        self,
        job: Job,
        args: argparse.Namespace,
        cluster: Cluster,
        cache: RunCache,
        jobs: int = 1,
    ) -> None:
        self._job, self._cluster, self._cache, self._jobs = job, cluster, cache, jobs
        self._tracer = Tracer(job, cluster, jobs, cache)
        self._bounds = [Bounds(args, kind) for kind in cluster.kinds]
        self._fastest = min(
            zip(self._bounds, cluster.kinds, strict=True), key=lambda one: one[0].layer_seconds
        )[1]
        self._shapes: dict[Hashable, Shape] = {}
        self._exact: dict[Layout, Prediction] = {}
        self._kinds = () if _changes_layers(args) else shape_of(args).kinds
        self._layers: dict[Hashable, dict[str, LayerRun]] = {}
        self._steps: dict[Hashable, int] = {}

    def bound(self, layout: Layout) -> Bound:
        """Bound a layout by the sizes of its matrices, or by the runs of its layers.

        Layers that save no memory are no slower; what others keep is not known from them.
        """
        runs = self._layers.get(_layer_key(layout))
        if not runs:
            known = self._layers.get(_keeping_all(layout).signature(), {})
            runs = {kind: replace(run, kept=0.0) for kind, run in known.items()}
        found = [bounds.of(layout, runs) for bounds in self._bounds]
        return min(found, key=lambda one: one.seconds)

    @property
    def head_layers(self) -> float:
        """Layers that take as long as the output layer."""
        return self._bounds[0].head_layers

    def refine(self, layout: Layout) -> bool:
        """Tighten the bounds of layouts with one key; False: nothing is left that can.

        First by a run of each kind of layer without what saves memory, which many keys share, then
        by their own. Layers run without recomputation if the layout says how many are recomputed.

        Raises:
            MindSpeedError: a layer cannot be counted.
        """
        steps = list(dict.fromkeys((_keeping_all(layout), _alone(layout))))
        done = self._steps.get(self.key(layout), 0)
        if done == len(steps):
            return False
        self._steps[self.key(layout)] = done + 1
        if (signature := steps[done].signature()) not in self._layers:
            self._layers[signature] = {}  # kept if a run fails
            self._layers[signature] = self._runs_of_layers(steps[done])
        return True

    def savings(
        self, layout: Layout, modules: Sequence[str]
    ) -> tuple[dict[str, Saving], Saving] | None:
        """What computing modules of a layer again saves, and the whole layer; None: unknown.

        Args:
            layout: a layout in which layers keep everything.
            modules: of ``--recompute-modules``.
        """
        sets = [Recompute(), Recompute(layers=-1), *(Recompute((name,)) for name in modules)]
        layouts = [replace(layout, recompute=one) for one in sets]
        known = {str(one.recompute): self._mean_layer(one) for one in layouts}
        plain, whole = known.pop(str(sets[0])), known.pop(str(sets[1]))
        if plain is None or whole is None:
            return None
        found = {
            name: Saving(plain.kept - one.kept, one.backward - plain.backward)
            for name, one in known.items()
            if one is not None
        }
        return found, Saving(plain.kept - whole.kept, whole.backward - plain.backward)

    def _mean_layer(self, layout: Layout) -> LayerRun | None:
        """The mean layer of a layout; None if it cannot be counted."""
        try:
            runs = self._runs_of_layers(layout)
        except MindSpeedError:
            return None
        return self._bounds[0].mean(runs) if runs else None

    def _runs_of_layers(self, layout: Layout) -> dict[str, LayerRun]:
        kinds = self._kinds_of(layout)
        return {kind: self._layer(layout, kinds, kind) for kind in kinds}

    def _kinds_of(self, layout: Layout) -> tuple[str, ...]:
        """Kinds of layers to run; none if a single layer does not bound the layout."""
        if layout.recompute is None:
            return () if any(kind.endswith(RECOMPUTED) for kind in self._kinds) else self._kinds
        return tuple(dict.fromkeys(kind.removesuffix(RECOMPUTED) for kind in self._kinds))

    def _layer(self, layout: Layout, kinds: tuple[str, ...], kind: str) -> LayerRun:
        point = layer_point(layout, kinds, kind)
        cache = self._cache
        if len(self._cluster.kinds) > 1:
            cache = cache.on(self._fastest)
        found = cache.layer(point)
        if found is None:
            isolated.import_ahead()
            arguments = self._job, point, self._fastest
            found, known = isolated.call(_layer_run, *arguments, timeout=RUN_SECONDS)
            planned_tensors.learn(known)
            cache.put_layer(point, found)
        return found

    def key(self, layout: Layout) -> Hashable:
        """Key of the recordings from which a layout is priced."""
        again = layout.recompute.layers if layout.recompute is not None else 0
        several = layout.several_chunks
        return layout.signature(), layout.pp > 1, several, layout.schedule, again > 0

    def check(self, layout: Layout) -> None:
        """Check by a dry run that the job can start.

        Raises:
            MindSpeedError: the job cannot start.
        """
        self._job.settings(layout.overrides(), layout.devices)

    def measure(self, layout: Layout) -> None:
        """Make the recordings of a layout, most of which others with its key share.

        Raises:
            MindSpeedError: it cannot be counted.
        """
        shape = isolated.call(shape_of_layout, self._job, layout)
        if shape.unspliceable and not counted_whole(shape, layout):
            raise NotSpliceable(
                f"{shape.unspliceable}: not composed of small runs; count the whole job with "
                "mindspeed plan --check --whole"
            )
        if is_dear(shape, layout):
            raise NotSpliceable(
                f"{PAIRS}: its rows are recorded with real layers, which takes too long for one of "
                f"many candidates; to compare layouts with it, give it to the job"
            )
        self._shapes[self.key(layout)] = shape
        self.price(layout)

    def price(self, layout: Layout) -> Prediction:
        """Price a layout by the recordings of its key, or by its one whole rank.

        Bytes of recordings may be estimated.
        """
        shape = self._shape(layout)
        if shape.whole_only:
            return self.exact(layout)
        return predict(self._tracer.alike(layout, shape), shape, self._cluster, layout)

    def exact(self, layout: Layout) -> Prediction:
        """Price a layout without estimating bytes, with a picture of its step.

        Raises:
            MindSpeedError: they cannot be counted.
        """
        if layout not in self._exact:
            shape = self._shape(layout)
            if shape.whole_only:
                self._exact[layout] = self._counted(layout)
            else:
                found = self._tracer.exact(layout, shape)
                self._exact[layout] = predict(found, shape, self._cluster, layout, drawn=True)
        return self._exact[layout]

    def is_exact(self, layout: Layout) -> bool:
        """Whether a layout was priced without estimating bytes."""
        return layout in self._exact or not estimates(layout, self._shape(layout))

    def _counted(self, layout: Layout) -> Prediction:
        """Price a layout without a pipeline by its whole rank."""
        args = self._job.settings(layout.overrides(), layout.devices).args
        found = predict_whole(args, check(args, jobs=self._jobs), self._cluster, self._jobs)
        return replace(found, layout=layout)

    def _shape(self, layout: Layout) -> Shape:
        return reshaped(self._shapes[self.key(layout)], layout)


def _layer_run(job: Job, point: Point, cluster: Cluster) -> tuple[LayerRun, list[Any]]:
    """A run of layers, and what the next process need not find again."""
    return layer_run(job, point, cluster), planned_tensors.learned()


def counted_whole(shape: Shape, layout: Layout) -> bool:
    """Whether a search counts a job that is not composed, rank by rank.

    In a pipeline that takes too long for one of many candidates: only pairs that the job itself has
    are counted there.
    """
    if shape.unspliceable != shape.whole_only:
        return False
    return shape.ranks == 1 or (shape.whole_only == PAIRS and not is_dear(shape, layout))


def is_dear(shape: Shape, layout: Layout) -> bool:
    """Whether a search leaves pairs in a pipeline out: candidates have them, not the job."""
    return shape.ranks > 1 and shape.request.pairs and layout.expert_program is not None


def _changes_layers(args: argparse.Namespace) -> bool:
    """Whether a layer in a pipeline differs from a single one."""
    values = vars(args)
    return bool(
        values.get("microbatch_group_size_per_vp_stage") or planned_as("changes layers", values)
    )


def _alone(layout: Layout) -> Layout:
    """The layout whose layers are run for the bounds."""
    if layout.recompute is None or not layout.recompute.layers:
        return layout
    return replace(layout, recompute=Recompute())


def _layer_key(layout: Layout) -> Layout:
    """Equal for layouts with the same layers."""
    return _alone(layout).signature()


def _keeping_all(layout: Layout) -> Layout:
    """The layout without what a layer does to save memory."""
    recompute, memory = layout.recompute, layout.memory
    if recompute is not None:
        recompute = Recompute()
    if memory is not None:
        known = options("memory")
        memory = tuple(name for name in memory if known[name].faster)
    return replace(layout, recompute=recompute, memory=memory)


def reshaped(shape: Shape, layout: Layout) -> Shape:
    """The shape of a layout, from the shape of another layout with the same key.

    They differ in the pipeline, the split of layers and the number of recomputed layers.
    """
    kinds = [kind.removesuffix(RECOMPUTED) for stage in shape.stages for kind in stage]
    chunks = max(layout.vpp, 2 if layout.v_shaped else 1)
    counts = layout.stage_layers or in_order(evenly(len(kinds), layout.pp, chunks))
    again = layout.recompute.layers if layout.recompute is not None else 0
    request = shape.request
    if request.group_size == shape.ranks:  # Megatron's default follows the pipeline
        request = replace(request, group_size=layout.pp)
    recomputed = any(kind.endswith(RECOMPUTED) for stage in shape.stages for kind in stage)
    if layout.recompute is None and recomputed:
        raise ConfigError(
            "--recompute-num-layers with the method block: which layers are recomputed in "
            "another pipeline is not known; search or fix the dimension recompute"
        )
    return replace(
        shape,
        request=request,
        ranks=layout.pp,
        chunks=chunks,
        stages=spread(kinds, counts, again),
        micro_batches=layout.micro_batches,
        data_parallel=layout.dp,
        devices=layout.devices,
    )
