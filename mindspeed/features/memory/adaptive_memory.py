"""Activations within a memory budget: ``--adaptive-recompute-device-size MIB`` and its relatives.

The first steps keep as little as possible while the plans of a layer are tried; then as much is
kept as fits, and what is computed again is what costs least time per byte.

    --adaptive-recompute-device-size MIB    the budget; alone: layers keep or compute again
    --adaptive-recompute-device-swap        layers may also move to the host where nothing else fits
    --adaptive-memory-optimization          attention and MLP of each layer may move to the host
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.adaptor.printing import print_rank_0
from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.memory.activation_memory import EXCLUDES, convert_linears
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.device import Device

_SIZE = "--adaptive-recompute-device-size"
_SWAP = "--adaptive-recompute-device-swap"
_STEPS = "--adaptive-recompute-profiling-step"
_OPTIMIZATION = "--adaptive-memory-optimization"
_MOST_MIB = 10**7
_OF_DEVICE, _OF_HOST = 0.9, 0.8
_BOTH = "both decide what becomes of the same activations"
_MIN_BYTES, _LEAST_MIN_BYTES = "MIN_SWAP_TENSOR_SIZE", 1024


class AdaptiveMemory(
    Feature,
    level=2,
    seams=("chunk", "schedule"),
    conflicts={
        "activation-plan": _BOTH,
        "recompute-activation-function": _BOTH,
        "recompute-layers-per-pp-rank": _BOTH,
        "recompute-norm": _BOTH,
        "swap-attention": _BOTH,
    },
    excludes={
        **EXCLUDES,
        "recompute_granularity": _BOTH,
        "use_megatron_fsdp": "a second run would gather weights again",
        "use_torch_fsdp2": "a second run would gather weights again",
        "fp8": "trial runs would change the scaling factors",
        "fp4": "trial runs would change the scaling factors",
    },
    planning=("changes layers", "needs steps"),
):
    """Keep as many activations as fit into a budget, chosen after the first steps."""

    adaptive_recompute_device_size: int = flag(
        -1,
        "MiB of a device that training may use; -1: 90 % of its memory",
        range=Range(1, also=(-1,)),
        aliases=("--auto-recompute-device-size",),
    )
    adaptive_recompute_device_swap: bool = flag(
        False, "layers may move to host memory where recomputation alone does not fit"
    )
    adaptive_recompute_profiling_step: int = flag(
        10,
        "first steps, in which plans are tried",
        range=Range(1, 100_000),
        aliases=("--auto-recompute-profiling-step",),
    )
    adaptive_memory_optimization: bool = flag(
        False, "attention and MLP may move to host memory while others compute"
    )

    @property
    def flags(self) -> list[str]:
        """Flags that are given and switch the feature on."""
        given = {
            _SIZE: self.adaptive_recompute_device_size != -1,
            _SWAP: self.adaptive_recompute_device_swap,
            _OPTIMIZATION: self.adaptive_memory_optimization,
        }
        return [name for name, on in given.items() if on]

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        given = self.flags
        if not given:
            yield Problem(_STEPS, f"has no effect without {_SIZE}, {_SWAP} or {_OPTIMIZATION}")
            return
        if self.adaptive_recompute_device_swap and self.adaptive_memory_optimization:
            yield conflict(_SWAP, _OPTIMIZATION)
        size = self.adaptive_recompute_device_size
        if size > _MOST_MIB:
            yield Problem(f"{_SIZE} {size}", "is in MiB", f"did you mean {size >> 20}?")
        if _min_bytes() == 0:
            yield Problem(_MIN_BYTES, f"{os.environ[_MIN_BYTES]!r} is no number of bytes from 1024")
        steps, total = self.adaptive_recompute_profiling_step, megatron.get("train_iters")
        if total is not None and steps >= total:
            yield Problem(f"{_STEPS} {steps}", f"leaves no step of --train-iters {total} to profit")

    def uneven_layers(self, megatron: Megatron) -> str:
        return next(iter(self.flags), "")

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed import device
        from mindspeed.memory.adaptive import BudgetSettings
        from mindspeed.memory.adaptive.megatron import Controller

        here = device.current()
        settings = BudgetSettings(
            flag=" ".join(self.flags),
            device_bytes=self._device_bytes(here),
            host_bytes=int(_OF_HOST * _available_on_host() / max(1, here.count())),
            profiled_steps=self.adaptive_recompute_profiling_step,
            min_bytes=_min_bytes() or 2**20,
            offload=self.adaptive_memory_optimization,
            rescue=self.adaptive_recompute_device_swap,
        )
        controller = Controller(settings, here, seams.journal, print_rank_0)
        seams.schedule.add(controller.with_schedule, owner=self.name)
        if megatron.get("overlap_grad_reduce"):
            seams.chunk.add(convert_linears, owner=self.name)

    def _device_bytes(self, here: Device) -> int:
        total, size = here.properties().total_memory, self.adaptive_recompute_device_size
        if size == -1:
            return int(_OF_DEVICE * total)
        if size * 2**20 > total:
            print_rank_0(
                f"{_SIZE} {size}: the {here.name} has {total / 2**20:,.0f} MiB, which is the budget"
            )
        return min(size * 2**20, total)


def _min_bytes() -> int | None:
    """Value of the environment variable; None if unset, 0 if it is not a number."""
    text = os.environ.get(_MIN_BYTES)
    if not text:
        return None
    return int(text) if text.isdecimal() and int(text) >= _LEAST_MIN_BYTES else 0


def _available_on_host() -> int:
    from mindspeed.device import host_memory

    return host_memory.available()
