"""Changes of a configuration: sets of flags that may make a job faster or smaller.

    for change in changes(layout, args):
        change.what, change.overrides(), change.differences(layout)

Their effects (:mod:`.effects`) are predictions of jobs with these flags, not rules of thumb.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed.features.registry import options
from mindspeed.job import MixtureOfExperts, RecomputeOptions, Sharding
from mindspeed.planner.layout import Layout, Recompute

_SIZES = {
    "tp": "tensor parallel size",
    "cp": "context parallel size",
    "ep": "expert parallel size",
    "pp": "pipeline parallel size",
    "vpp": "model chunks of a pipeline rank",
    "mbs": "micro-batch size",
}
_OVERLAPS: Mapping[str, Mapping[str, Any]] = {
    "gradients are reduced while backward runs": {"overlap_grad_reduce": True},
    "parameters are gathered while forward runs": {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}

SPEED, MEMORY_ONLY, BOTH = "speed", "memory", "both"


@dataclass(frozen=True)
class Change:
    """Another configuration of the same job.

    Attributes:
        flags: values of other flags, by argument name.
        may: possible improvement: ``speed``, ``memory``, or ``both``.
    """

    what: str
    layout: Layout
    flags: Mapping[str, Any] = field(default_factory=dict)
    may: str = BOTH

    def overrides(self) -> dict[str, Any]:
        """Values of all flags of the changed job."""
        return {**self.layout.overrides(), **self.flags}

    def differences(self, before: Layout) -> dict[str, Any]:
        """Flags whose values differ from those of a layout; None: the flag is removed."""
        old = before.overrides()
        new = self.overrides()
        return {
            name: new.get(name)
            for name in {**old, **new}
            if name not in old or old[name] != new.get(name)
        }


def changes(layout: Layout, args: argparse.Namespace) -> Iterator[Change]:
    """Yield single changes of a job that may help; ``args`` are its final values."""
    yield from _sizes(layout, args)
    if layout.pp > 1:
        if layout.vpp == 1 and layout.schedule is None:
            vpp = replace(layout, vpp=2)
            yield Change("two model chunks on each pipeline rank (interleaved)", vpp)
        for name, one in options("schedule").items():
            other = replace(layout, schedule=name, schedule_flag=None)
            other = replace(other, vpp=2 if other.placed else 1)
            if name != layout.schedule and (layout.schedule is None or not other.placed):
                yield Change(one.what, other)
    if layout.tp > 1 and not layout.sequence_parallel:
        yield Change("sequence parallelism", replace(layout, sequence_parallel=True))
    yield from _memory(layout, args)
    for what, flags in _OVERLAPS.items():
        parted = Sharding.of(args).distributed_optimizer or "overlap_param_gather" not in flags
        if layout.dp > 1 and parted and not all(getattr(args, name) for name in flags):
            yield Change(what, layout, flags, SPEED)


def _sizes(layout: Layout, args: argparse.Namespace) -> Iterator[Change]:
    for name, title in _SIZES.items():
        size = getattr(layout, name)
        for other in (2 * size, size // 2):
            started = size > 1 or name in ("tp", "pp", "mbs", "cp")
            if other < 1 or not started or (name == "ep" and not MixtureOfExperts.of(args).count):
                continue
            if name == "vpp" and (layout.pp == 1 or layout.schedule is not None):
                continue
            changed = replace(layout, **{name: other})
            if changed.dp > 0 and changed.micro_batches > 0:
                yield Change(f"{title} {size} -> {other}", changed)


def _memory(layout: Layout, args: argparse.Namespace) -> Iterator[Change]:
    now = RecomputeOptions.of(args).granularity
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
    known = options("memory")
    used = [name for name, one in known.items() if _is_on(one.flags, args)]
    for name, one in known.items():
        if name not in used:
            changed = replace(layout, memory=tuple(sorted([*used, name])))
            yield Change(one.what, changed, may=BOTH if one.faster else MEMORY_ONLY)
    if not Sharding.of(args).distributed_optimizer and layout.dp * layout.cp > 1:
        yield Change("distributed optimizer", replace(layout, optimizer="distributed"))


def _is_on(flags: Mapping[str, Any], args: argparse.Namespace) -> bool:
    return all(vars(args).get(flag) for flag, value in flags.items() if value is True)
