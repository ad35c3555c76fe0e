"""Two runs give the same bits: ``--npu-deterministic``, or Megatron's ``--deterministic-mode``.

Slower kernels and communication with a fixed order of summation are chosen on every device before
the first collective. Seeds stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class Deterministic(Feature, level=0):
    """Two runs give the same bits."""

    npu_deterministic: bool = flag(
        False, "bit-equal results in every run, on every device", aliases=("--use-deter-comp",)
    )
    deterministic_mode: bool = flag(
        False, "Megatron's deterministic computing, implies ours", megatron=True
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.npu_deterministic or self.deterministic_mode

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.device.determinism import make_deterministic

        seams.journal.call_on_undo(make_deterministic(True))
