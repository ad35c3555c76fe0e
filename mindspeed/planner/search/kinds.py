"""Layouts of a job on several kinds of devices: stages on one kind each, layers by their speed.

    for layout in on_kinds(layouts, machine, weights, removed): ...

Pipeline ranks follow the order of the devices, so a number of stages exists if none of them is on
two kinds. Layers are dealt one by one to the rank that would be done first, where the output layer
counts as the layers that take as long; that makes the slowest rank as fast as it can be. How much
faster one kind is depends on the layout, so a search also tries splits for kinds that differ more,
or less, than their rates say (:data:`FACTORS`), and prices all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mindspeed.planner.cluster import GIB, Cluster
from mindspeed.planner.cluster.mixed import MixedCluster
from mindspeed.planner.layout import Layout

if TYPE_CHECKING:
    from mindspeed.planner.time.prediction import Prediction

FACTORS: tuple[float, ...] = (1.0, 0.7, 0.85, 1.2, 1.45)
"""How much more the seconds of kinds may differ than their rates say, as exponents."""
ON_TWO_KINDS = "a stage would be on two kinds of devices"


def on_kinds(
    layouts: Iterable[Layout],
    machine: MixedCluster,
    num_layers: int,
    dtype: str,
    head: float,
    removed: Counter[str],
) -> Iterator[Layout]:
    """Layouts that put every stage on one kind of devices, with layers by the speed of kinds.

    Args:
        layouts: whose stages have equally many layers; a given split is kept.
        num_layers: of the model.
        dtype: of products.
        head: layers that take as long as the output layer.
        removed: receives the number of impossible ones, by reason.
    """
    known: set[Layout] = set()
    for layout in layouts:
        kinds = machine.stage_kinds(layout.pp)
        if kinds is None:
            removed[ON_TWO_KINDS] += 1
            continue
        rates = [
            kind.device.peak(dtype) * kind.device.efficiency(dtype) * kind.device.sustained
            for kind in kinds
        ]
        weights = [max(rates) / rate for rate in rates]
        for one in (layout, *_uneven(layout, num_layers, weights, head)):
            if one not in known:
                known.add(one)
                yield one


def by_kind(machine: MixedCluster, layout: Layout, found: Prediction, layers: int) -> list[str]:
    """What each kind of devices has of a layout: pipeline ranks, layers, bytes of its fullest."""
    each = layout.devices // layout.pp
    counts = layout.stage_layers or (layers // (layout.pp * layout.vpp),) * layout.pp * layout.vpp
    of: dict[Cluster, list[int]] = {}
    for rank in range(layout.pp):
        of.setdefault(machine.at(rank * each), []).append(rank)
    lines = []
    for kind, ranks in of.items():
        number = sum(sum(counts[rank :: layout.pp]) for rank in ranks)
        peak = max(found.ranks[rank].peak for rank in ranks)
        limit, fits = kind.memory_limit, all(found.ranks[rank].fits for rank in ranks)
        lines.append(
            f"{kind.name}: {len(ranks)} of {layout.pp} pipeline ranks, {number} layers; "
            f"{'fits' if fits else 'does not fit'}: its fullest rank needs {peak / GIB:.3f} GiB of "
            f"{limit / GIB:.3f}"
        )
    return lines


def _uneven(
    layout: Layout, num_layers: int, weights: Sequence[float], head: float
) -> Iterator[Layout]:
    """The layout with splits for ranks whose layers take ``weights``."""
    if layout.stage_layers is not None or layout.pp == 1 or layout.placed:
        return
    most = layout.recompute.layers if layout.recompute is not None else 0
    for factor in FACTORS:
        ranks = dealt(num_layers, [weight**factor for weight in weights], layout.vpp, head)
        stages = tuple(
            count // layout.vpp + (chunk < count % layout.vpp)
            for chunk in range(layout.vpp)
            for count in ranks
        )
        if len(set(stages)) > 1 and min(stages) >= max(1, most):
            yield replace(layout, stage_layers=stages)


def dealt(num_layers: int, weights: Sequence[float], least: int, head: float) -> list[int]:
    """Layers of each rank, so that the slowest rank takes as little time as it can.

    Args:
        num_layers: of the model.
        weights: seconds of a layer on each rank.
        least: layers of a rank, at least.
        head: layers that take as long as what else the last rank does.
    """
    last = len(weights) - 1
    counts = [least] * len(weights)

    def done(rank: int) -> float:
        return weights[rank] * (counts[rank] + 1 + head * (rank == last))

    for _ in range(num_layers - sum(counts)):
        counts[min(range(len(counts)), key=done)] += 1
    return counts
