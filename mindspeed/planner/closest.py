"""Where nothing fits: the layout that needs least memory, and what would close its deficit."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

from mindspeed.errors import MindSpeedError
from mindspeed.planner.bounded_search import Evaluator, Found
from mindspeed.planner.layout import Layout
from mindspeed.planner.layout_flags import MEMORY, Recompute
from mindspeed.planner.result import Closest, Help

MOST_KEYS = 6
"""Keys that are counted in order to find it; the bounds put the likeliest first."""


def closest_of(
    layouts: Iterable[Layout],
    evaluator: Evaluator,
    memory_limit: float,
    measured: Iterable[Hashable] = (),
) -> Closest | None:
    """The layout of least memory among those whose bounds are lowest.

    Args:
        layouts: of the space.
        evaluator: prices them.
        memory_limit: bytes of a rank.
        measured: keys that were counted already, which cost nothing.
    """
    ordered = sorted(layouts, key=lambda one: (_least(evaluator, one), str(one)))
    known, tried = set(measured), set[Hashable]()
    best: Found | None = None
    for layout in ordered:
        if best is not None and _least(evaluator, layout)[0] > best[1].peak_bytes:
            break
        key = evaluator.key(layout)
        if key not in known:
            if len(tried) == MOST_KEYS or key in tried:
                continue
            try:
                evaluator.check(layout)
                tried.add(key)
                evaluator.measure(layout)
                known.add(key)
            except MindSpeedError:
                continue
        found = _priced(evaluator, layout)
        better = best is None or (found is not None and found[1].peak_bytes < best[1].peak_bytes)
        if found is not None and better and _accepted(evaluator, layout):
            best = found
    if best is None:
        return None
    layout, prediction = best
    deficit = int(prediction.peak_bytes - memory_limit)
    found_help = sorted(_help(layout, evaluator, memory_limit), key=lambda h: not h.fits)
    return Closest(layout, prediction, deficit, tuple(found_help))


def _least(evaluator: Evaluator, layout: Layout) -> tuple[float, float, int]:
    """Order in which layouts are looked at: static bytes, then what lowers activations."""
    again = layout.recompute.layers if layout.recompute is not None else 0
    share = 1000 if again < 0 else again
    return evaluator.bound(layout).nbytes, -share, layout.mbs


def _priced(evaluator: Evaluator, layout: Layout) -> Found | None:
    try:
        return layout, evaluator.exact(layout)
    except MindSpeedError:
        return None


def _accepted(evaluator: Evaluator, layout: Layout) -> bool:
    try:
        evaluator.check(layout)
    except MindSpeedError:
        return False
    return True


def _help(layout: Layout, evaluator: Evaluator, memory_limit: float) -> Iterator[Help]:
    """Each change alone that a start accepts, then two times the devices."""
    peak = None
    for what, changed in _changes(layout):
        try:
            evaluator.check(changed)
            evaluator.measure(changed)
            peak = int(evaluator.exact(changed).peak_bytes)
        except MindSpeedError:
            continue
        yield Help(what, changed, peak, peak <= memory_limit)


def _changes(layout: Layout) -> Iterator[tuple[str, Layout]]:
    if layout.recompute is None or layout.recompute.layers >= 0:
        yield "--recompute-granularity full", replace(layout, recompute=Recompute(layers=-1))
    has = layout.memory or ()
    for name in MEMORY:
        if name not in has:
            yield name, replace(layout, memory=tuple(sorted({*has, name})))
    if layout.global_batch_size % (2 * layout.mbs * layout.dp) == 0:
        yield f"{2 * layout.devices} devices", replace(layout, devices=2 * layout.devices)
