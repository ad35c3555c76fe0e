"""Swap optimizer: ``--swap-optimizer``, ``--swap-optimizer-times``.

Main weights and both moments are in host memory, pinned where the device can copy from it while it
computes. A step streams them through two buffers of ``1/times`` of them each: between steps a rank
keeps 6 bytes per parameter (weights and gradients) on the device, during a step ``24 / (d times)``
bytes more on d ranks, and 12/d bytes move in each direction. The update is bit for bit that of Adam
on the device. Use it when optimizer states do not fit, and a step is long compared with two copies
of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Option, Problem, conflict, option_of
from mindspeed.features.optimizer import precision_aware
from mindspeed.flags import flag
from mindspeed.optimizer.rules import chosen
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

FLAG = "--swap-optimizer"
TIMES = 16
_EXCLUDED = {
    "reuse_fp32_param": "states in host memory are whole fp32 tensors",
    "quant_states": "states in host memory are whole fp32 tensors",
    "optimizer_cpu_offload": "both move the optimizer's states to the host",
    "use_megatron_fsdp": "ZeRO 2 and 3 keep their own states",
}
_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


class SwapOptimizer(
    Feature,
    level=2,
    seams=(*precision_aware.SEAMS, "kernels"),
    planning=("needs steps",),
    options=(
        Option(
            "memory", "swap-optimizer", {"swap_optimizer": True}, "optimizer states are on the host"
        ),
    ),
):
    """Optimizer states in host memory, streamed through the device in every step."""

    swap_optimizer: bool = flag(False, "optimizer states in host memory, streamed in every step")
    swap_optimizer_times: int = flag(
        TIMES, "windows in which a step streams the states", range=Range(1, 2**20)
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.swap_optimizer or self.swap_optimizer_times != TIMES

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        return {"store_param_remainders": False}

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if not self.swap_optimizer:
            yield Problem("--swap-optimizer-times", "has no effect alone", f"add {FLAG}")
            return
        yield from host_state_problems(FLAG, megatron)
        if not megatron.get("use_distributed_optimizer"):
            what = "needs main weights that the optimizer owns"
            yield Problem(FLAG, what, "add --use-distributed-optimizer")

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.optimizer.placement import HostSwap

        if megatron.get("bf16") or megatron.get("fp16"):  # else the parameter is the main weight
            precision_aware.attach(seams, self.name)
        space = HostSwap(self.swap_optimizer_times)
        seams.use_kernels(owner=self.name, state_placement=lambda name: space)


def host_state_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find conflicts with states in host memory, which ``flag`` requires."""
    yield from [
        conflict(option_of(name), flag, why)
        for name, why in _EXCLUDED.items()
        if megatron.get(name)
    ]
    for name in _DTYPES:
        if str(megatron.get(name, "fp32")) not in ("fp32", "torch.float32"):
            yield conflict(option_of(name), flag, "states in host memory are fp32")
    name = chosen(megatron)
    if name not in ("adam", "fused_adam"):
        yield conflict(flag, f"--optimizer {name}")
