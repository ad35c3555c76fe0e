"""Virtual optimizer: ``--virtual-optimizer all`` or ``--virtual-optimizer GB [GB ...]``.

Both moments are in host memory that has an address on the device: the optimizer's kernels read and
write it directly, nothing is copied. On d ranks a rank keeps 6 + 4/d bytes per parameter on the
device instead of 6 + 12/d. Numbers limit what is moved, in GiB: one for all pipeline stages, or one
for each, since the first and the last stage have other sizes. Use it when a little memory is
missing; ``--swap-optimizer`` frees more, and where kernels cannot address host memory it is used
instead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed import device
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.optimizer import precision_aware
from mindspeed.features.optimizer.swap_optimizer import host_state_problems
from mindspeed.flags import flag
from mindspeed.optimizer.placement import ALL, GIB, limits

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.optimizer.placement import StatePlacement

logger = logging.getLogger("mindspeed")

FLAG = "--virtual-optimizer"
_WINDOWS = 16  # of --swap-optimizer, where it takes over


class VirtualOptimizer(
    Feature,
    level=2,
    seams=(*precision_aware.SEAMS, "kernels"),
    conflicts={"swap-optimizer": "both move the moments to the host"},
    planning=("needs steps",),
):
    """Both moments in host memory that the device's kernels address."""

    virtual_optimizer: tuple[str, ...] = flag(
        (), "moments in host memory that kernels address: all, or GiB, one or one for each stage"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return bool(self.virtual_optimizer)

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        return {"store_param_remainders": False} if _swaps() else {}

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        yield from host_state_problems(FLAG, megatron)
        given, stages = self.virtual_optimizer, megatron.get("pipeline_model_parallel_size") or 1
        try:
            count = len(limits(given))
        except ValueError:
            what = f"{' '.join(given)} is not {ALL}, and not numbers of GiB above 0"
            yield Problem(FLAG, what)
            return
        if count not in (1, stages):
            what = f"got {count} numbers for {stages} pipeline stages"
            yield Problem(FLAG, what, f"give 1 or {stages} (or {ALL})")
        if _swaps() and not megatron.get("use_distributed_optimizer"):
            what = f"kernels of {device.current().name} cannot address host memory"
            yield Problem(FLAG, what, "add --use-distributed-optimizer: it swaps instead")

    def uneven_layers(self, megatron: Megatron) -> str:
        return "" if self.virtual_optimizer == (ALL,) else f"{FLAG} SIZE"

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.optimizer.placement import HostMapped, HostSwap
        from mindspeed.te import optimizer_policy

        if _swaps():
            logger.warning(
                "%s: kernels of %s cannot address host memory; states are swapped as with "
                "--swap-optimizer",
                FLAG,
                device.current().name,
            )
            if megatron.get("bf16") or megatron.get("fp16"):
                precision_aware.attach(seams, self.name)
            space = HostSwap(_WINDOWS)
            seams.use_kernels(owner=self.name, state_placement=lambda name: space)
            return
        numbers = limits(self.virtual_optimizer)
        mapped: list[HostMapped] = []

        def placement(name: str) -> StatePlacement | None:
            if name not in ("exp_avg", "exp_avg_sq"):
                return None
            if not mapped:  # the parallel groups exist now
                number = numbers[optimizer_policy.pipeline_rank() if len(numbers) > 1 else 0]
                mapped.append(HostMapped(None if math.isinf(number) else int(number * GIB)))
            return mapped[0]

        seams.use_kernels(owner=self.name, state_placement=placement)


def _swaps() -> bool:
    return not device.current().has("host_mapped_memory")
