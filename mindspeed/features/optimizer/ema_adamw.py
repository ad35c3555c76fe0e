"""AdamW with an average of the weights: ``--optimizer-selection fused_ema_adamw``, ``--ema-decay``.

The exponential moving average is a third state of every parameter, in fp32: 4 bytes each, shared by
data-parallel ranks like the moments (6 + 16/d bytes per parameter on d ranks with the distributed
optimizer). It is part of the optimizer in checkpoints (``optimizer.state.ema_params.NAME`` with
``--ckpt-format torch_dist``) and does not change training. Use it for models that are evaluated
with averaged weights, such as diffusion models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem, conflict, option_of
from mindspeed.flags import flag
from mindspeed.optimizer.rules import chosen
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

FLAG = "--optimizer-selection fused_ema_adamw"
DECAY = 0.9999
_EXCLUDED = {
    "reuse_fp32_param": "the average needs whole fp32 weights",
    "swap_optimizer": "the average stays on the device",
    "virtual_optimizer": "the average stays on the device",
    "optimizer_cpu_offload": "the optimizer on the host is plain AdamW",
    "use_megatron_fsdp": "ZeRO 2 and 3 store Adam's two moments",
}


class EmaAdamW(Feature, level=2, seams=("kernels",), adds_states="averages of the weights"):
    """AdamW that also keeps an average of the weights."""

    ema_decay: float = flag(DECAY, "largest decay of the average of the weights", range=Range(0, 1))

    def enabled(self, megatron: Megatron) -> bool:
        return _selected(megatron) or self.ema_decay != DECAY

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if not _selected(megatron):
            yield Problem("--ema-decay", "has no effect alone", f"add {FLAG}")
            return
        yield from [
            conflict(option_of(name), FLAG, why)
            for name, why in _EXCLUDED.items()
            if megatron.get(name)
        ]
        name = chosen(megatron)
        if name not in ("adam", "fused_adam"):
            yield conflict(FLAG, f"--optimizer {name}")

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.optimizer.rules import ema_adamw

        rule = ema_adamw(self.ema_decay)
        seams.use_kernels(owner=self.name, update_rule=lambda: rule)


def _selected(megatron: Megatron) -> bool:
    return megatron.get("optimizer_selection") == "fused_ema_adamw"
