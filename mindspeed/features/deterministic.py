"""Two runs give the same bits: ``--npu-deterministic``, or Megatron's ``--deterministic-mode``.

Slower kernels and communication with a fixed order of summation are chosen on every device before
the first collective. Seeds stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


@dataclass(frozen=True)
class DeterministicOptions:
    """Ours, for all devices, and Megatron's, which we extend to all devices."""

    npu_deterministic: bool = flag(
        False, "bit-equal results in every run, on every device", aliases=("--use-deter-comp",)
    )
    deterministic_mode: bool = flag(
        False, "Megatron's deterministic computing, implies ours", megatron=True
    )


def _attach(seams: Seams, options: DeterministicOptions, megatron: Megatron) -> None:
    from mindspeed.device.determinism import make_deterministic

    seams.journal.call_on_undo(make_deterministic(True))


FEATURE = Feature(
    name="deterministic",
    summary="two runs give the same bits",
    level=0,
    options=DeterministicOptions,
    enabled=lambda options, megatron: options.npu_deterministic or options.deterministic_mode,
    attach=_attach,
)
