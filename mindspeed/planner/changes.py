"""Changes of a configuration, each with its effect: the changed job is predicted anew.

    for effect in effects(changes(layout, args), price, now, memory_limit):
        effect.change.what, effect.seconds, effect.peak_bytes

Nothing is estimated by rules of thumb: each change is a set of flags, and its effect is what the
planner predicts for a job with these flags. What a start would refuse has the reason instead.

Predictions cost seconds, so changes that cannot be among those that help most have none:

* those whose lower bound (:mod:`.bounds`) needs more memory than there is;
* for a job that fits, those that only save memory, which are never faster under the model, and
  those whose lower bound is slower than the best so far;
* for one that does not fit, those that never save memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mindspeed.errors import MindSpeedError
from mindspeed.planner.bounds import Bound
from mindspeed.planner.layout import Layout
from mindspeed.planner.layout_flags import MEMORY, Recompute
from mindspeed.planner.result import GIB

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


_MEMORY_WORDS = {
    "swap-attention": "inputs of attention layers wait on the host",
    "recompute-norm": "norms are computed again",
    "recompute-activation": "activation functions are computed again",
    "reuse-fp32-param": "bf16 weights share the memory of the fp32 ones",
    "swap-optimizer": "optimizer states are on the host",
    "grad-reduce-in-bf16": "gradients are kept and reduced in bf16, which rounds their sums",
}
_ALSO_FASTER = ("grad-reduce-in-bf16",)
"""Memory features that may make a step faster."""
SPEED, MEMORY_ONLY, BOTH = "speed", "memory", "both"
INTERRUPTED = "interrupted"
LEAST = 0.001
"""Part of a step's time that a change has to save."""


@dataclass(frozen=True)
class Change:
    """Another configuration of the same job.

    Attributes:
        what: in words.
        layout: of the changed job.
        flags: values of further flags, by their names in the namespace.
        may: what it may make better: ``speed``, ``memory``, or ``both``.
    """

    what: str
    layout: Layout
    flags: Mapping[str, Any] = field(default_factory=dict)
    may: str = BOTH

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
        skipped: why it cannot be among the most helpful, so that it was not predicted.
    """

    change: Change
    seconds: float = 0.0
    peak_bytes: float = 0.0
    refused: str = ""
    skipped: str = ""

    @property
    def predicted(self) -> bool:
        """Whether it has figures."""
        return not (self.refused or self.skipped)


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
            yield Change(what, layout, flags, SPEED)


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
        "nothing is computed again": (None, Recompute(), SPEED),
        "attention is computed again": (
            "selective",
            Recompute(modules=("core_attn",)),
            MEMORY_ONLY,
        ),
        "MLPs are computed again": ("mlp", Recompute(modules=("mlp",)), MEMORY_ONLY),
        "all layers are computed again": ("full", Recompute(layers=-1), MEMORY_ONLY),
    }
    for what, (granularity, recompute, may) in kinds.items():
        if granularity != now:
            yield Change(what, replace(layout, recompute=recompute), may=may)
    used = [name for name, flags in MEMORY.items() if _is_on(flags, args)]
    for name in MEMORY:
        if name not in used:
            changed = replace(layout, memory=tuple(sorted([*used, name])))
            may = BOTH if name in _ALSO_FASTER else MEMORY_ONLY
            yield Change(_MEMORY_WORDS.get(name, name), changed, may=may)
    if not args.use_distributed_optimizer and layout.dp * layout.cp > 1:
        yield Change("distributed optimizer", replace(layout, optimizer="distributed"))


def _is_on(flags: Mapping[str, Any], args: argparse.Namespace) -> bool:
    return all(vars(args).get(flag) for flag, value in flags.items() if value is True)


def effects(
    found: Sequence[Change],
    price: Price,
    now: Priced,
    limit: float,
    *,
    bound: Callable[[Change], Bound] = lambda change: Bound(),
    progress: Callable[[int, int], None] = lambda done, of: None,
    count: int = 3,
) -> list[Effect]:
    """The effect of each change, predicted where it can be among those that help most.

    Ctrl-C ends it: changes that were not predicted by then say so.

    Args:
        found: changes.
        price: predicts a changed job.
        now: the job as it is.
        limit: bytes of a rank.
        bound: of a changed job.
        progress: is told how far it is.
        count: how many of the most helpful are wanted.
    """
    fits = now.peak_bytes <= limit
    ordered = sorted(found, key=lambda one: _promise(bound(one), fits))
    results: dict[int, Effect] = {}
    done, interrupted = 0, False
    for done, change in enumerate(ordered):
        progress(done, len(found))
        helpful = most_helpful(results.values(), now, limit, count)
        beaten = max(one.seconds for one in helpful) if len(helpful) == count else float("inf")
        slowest = min(now.seconds, beaten) if fits else beaten
        reason = INTERRUPTED if interrupted else _why_not(change, bound(change), fits, limit)
        if not reason and bound(change).seconds >= slowest:
            reason = f"takes at least {bound(change).seconds:.4g} s"
        if reason:
            results[id(change)] = Effect(change, skipped=reason)
            continue
        try:
            priced = price(change)
        except MindSpeedError as error:
            results[id(change)] = Effect(change, refused=str(error))
        except KeyboardInterrupt:
            interrupted = True
            results[id(change)] = Effect(change, skipped=INTERRUPTED)
        else:
            results[id(change)] = Effect(change, priced.seconds, priced.peak_bytes)
    progress(len(found), len(found))
    return [results[id(change)] for change in found]


def _promise(bound: Bound, fits: bool) -> tuple[float, float]:
    both = bound.seconds, bound.nbytes
    return both if fits else both[::-1]


def _why_not(change: Change, bound: Bound, fits: bool, limit: float) -> str:
    """Why a change cannot help; empty if it may."""
    if fits and change.may == MEMORY_ONLY:
        return "only saves memory, and the job fits"
    if not fits and change.may == SPEED:
        return "saves no memory, and the job does not fit"
    if bound.nbytes > limit:
        return f"needs at least {bound.nbytes / GIB:.3f} GiB"
    return ""


def most_helpful(
    found: Iterable[Effect], now: Priced, limit: float, count: int = 3
) -> list[Effect]:
    """The changes with which the job fits that help most, the fastest first.

    A job that fits needs those that make it faster; for one that does not, each that makes it fit
    is a help.

    Args:
        found: effects.
        now: the job as it is.
        limit: bytes of a rank.
        count: how many.
    """
    fitting = [one for one in found if one.predicted and one.peak_bytes <= limit]
    if now.peak_bytes <= limit:
        least = now.seconds * (1 - LEAST)
        fitting = [one for one in fitting if one.seconds <= least]
    return sorted(fitting, key=lambda one: (one.seconds, one.peak_bytes))[:count]


def nearest(found: Iterable[Effect], now: Priced) -> Effect | None:
    """The change that needs least memory, for a job that no single change makes fit."""
    smaller = [one for one in found if one.predicted and one.peak_bytes < now.peak_bytes]
    return min(smaller, key=lambda one: (one.peak_bytes, one.seconds), default=None)
