"""Changes of a configuration, each with its effect: the changed job is predicted anew.

    now = price(Change("as it is", layout))
    for effect in effects(changes(layout, args), price):
        effect.change.what, effect.seconds, effect.peak_bytes

Nothing is estimated by rules of thumb: each change is a set of flags, and its effect is what the
planner predicts for a job with these flags. What a start would refuse has the reason instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mindspeed.errors import MindSpeedError
from mindspeed.planner.layout import MEMORY, OPTIMIZERS, Layout, Recompute

_SIZES = {
    "tp": "tensor parallel size",
    "cp": "context parallel size",
    "ep": "expert parallel size",
    "pp": "pipeline parallel size",
    "vpp": "model chunks of a pipeline rank",
    "mbs": "micro-batch size",
}
_SCHEDULES = ("zb-h1", "zb-v", "dualpipev")
_OVERLAPS: Mapping[str, Mapping[str, Any]] = {
    "gradients are reduced while backward runs": {"overlap_grad_reduce": True},
    "parameters are gathered while forward runs": {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}


@dataclass(frozen=True)
class Change:
    """Another configuration of the same job.

    Attributes:
        what: in words.
        layout: of the changed job.
        flags: values of further flags, by their names in the namespace.
    """

    what: str
    layout: Layout
    flags: Mapping[str, Any] = field(default_factory=dict)

    def overrides(self) -> dict[str, Any]:
        """Values of all its flags."""
        return {**self.layout.overrides(), **self.flags}

    def differences(self, before: Layout) -> dict[str, Any]:
        """Flags with other values than those of a layout; None: the flag goes away."""
        old = before.overrides()
        new = self.overrides()
        return {
            name: new.get(name)
            for name in {**old, **new}
            if name not in old or old[name] != new.get(name)
        }


class Priced(Protocol):
    """What is needed of a :class:`mindspeed.planner.price.Prediction`."""

    @property
    def seconds(self) -> float:
        """Of a step."""

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""


Price = Callable[[Change], Priced]
"""Predicts a changed job, or raises a MindSpeedError."""


@dataclass(frozen=True)
class Effect:
    """What a change does.

    Attributes:
        change: that is made.
        seconds: of a step after it.
        peak_bytes: of the fullest rank after it.
        refused: why a job with it cannot start, or cannot be counted; empty otherwise.
    """

    change: Change
    seconds: float = 0.0
    peak_bytes: float = 0.0
    refused: str = ""


def changes(layout: Layout, args: argparse.Namespace) -> Iterator[Change]:
    """Single changes of a job that may help.

    Args:
        layout: of the job.
        args: its final values.
    """
    yield from _sizes(layout, args)
    if layout.pp > 1:
        if layout.vpp == 1 and layout.schedule is None:
            vpp = replace(layout, vpp=2)
            yield Change("two model chunks on each pipeline rank (interleaved)", vpp)
        for name in _SCHEDULES:
            if name != layout.schedule and (layout.schedule is None or name == "zb-h1"):
                chunks = 1 if name == "zb-h1" else 2
                other = replace(layout, schedule=name, vpp=chunks)
                yield Change(f"pipeline schedule {name}", other)
    yield from _memory(layout, args)
    for what, flags in _OVERLAPS.items():
        parted = args.use_distributed_optimizer or "overlap_param_gather" not in flags
        if layout.dp > 1 and parted and not all(getattr(args, name) for name in flags):
            yield Change(what, layout, flags)


def _sizes(layout: Layout, args: argparse.Namespace) -> Iterator[Change]:
    for name, title in _SIZES.items():
        size = getattr(layout, name)
        for other in (2 * size, size // 2):
            started = size > 1 or name in ("tp", "pp", "mbs", "cp")
            if other < 1 or not started or (name == "ep" and not args.num_experts):
                continue
            if name == "vpp" and (layout.pp == 1 or layout.schedule is not None):
                continue
            changed = replace(layout, **{name: other})
            if changed.dp > 0 and changed.micro_batches > 0:
                yield Change(f"{title} {size} -> {other}", changed)


def _memory(layout: Layout, args: argparse.Namespace) -> Iterator[Change]:
    now = args.recompute_granularity
    kinds = {
        "nothing is computed again": (None, Recompute()),
        "recomputation of attention": ("selective", Recompute(modules=("core_attn",))),
        "recomputation of every MLP": ("mlp", Recompute(modules=("mlp",))),
        "recomputation of all layers": ("full", Recompute(layers=-1)),
    }
    for what, (granularity, recompute) in kinds.items():
        if granularity != now:
            yield Change(what, replace(layout, recompute=recompute))
    used = [name for name, flags in MEMORY.items() if _is_on(flags, args)]
    for name in MEMORY:
        if name not in used:
            yield Change(name, replace(layout, memory=tuple(sorted([*used, name]))))
    if not args.use_distributed_optimizer and layout.dp > 1 and "distributed" in OPTIMIZERS:
        yield Change("distributed optimizer", replace(layout, optimizer="distributed"))


def _is_on(flags: Mapping[str, Any], args: argparse.Namespace) -> bool:
    return all(vars(args).get(flag) for flag, value in flags.items() if value is True)


def effects(
    found: Sequence[Change],
    price: Price,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Effect]:
    """The effect of each change, predicted.

    Args:
        found: changes.
        price: predicts a changed job.
        progress: is told how far it is.
    """
    results = []
    for done, change in enumerate(found):
        progress(done, len(found))
        try:
            priced = price(change)
        except MindSpeedError as error:
            results.append(Effect(change, refused=str(error)))
        else:
            results.append(Effect(change, priced.seconds, priced.peak_bytes))
    progress(len(found), len(found))
    return results


def most_helpful(
    found: Iterable[Effect], now: Priced, limit: float | None, count: int = 3
) -> list[Effect]:
    """The changes that help most.

    A job that does not fit needs those that make it fit, the fastest first, then those that save
    most; one that fits those that make it faster and still fit.

    Args:
        found: effects.
        now: the job as it is.
        limit: bytes of a rank.
        count: how many.
    """
    possible = [one for one in found if not one.refused]
    most = float("inf") if limit is None else limit
    if now.peak_bytes <= most:
        faster = [one for one in possible if one.seconds < now.seconds and one.peak_bytes <= most]
        return sorted(faster, key=lambda one: (one.seconds, one.peak_bytes))[:count]
    smaller = [one for one in possible if one.peak_bytes < now.peak_bytes]

    def order(one: Effect) -> tuple[bool, float]:
        fits = one.peak_bytes <= most
        return not fits, one.seconds if fits else one.peak_bytes

    return sorted(smaller, key=order)[:count]
