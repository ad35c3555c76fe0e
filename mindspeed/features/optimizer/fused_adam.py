"""Fused Adam: ``--optimizer fused_adam`` and ``--optimizer-selection``.

Adam and AdamW update all parameters of a group and dtype by one fused operator of torch, which has
kernels for CPU, CUDA and NPU: kernel launches of a step do not grow with the number of parameters.
Every ``--optimizer adam`` is this one; ``fused_adam`` is its name in the original library.

``--optimizer-selection`` chose between two kernels there, ``fused_adamw`` for one of its own and
``fused_torch_adamw`` for torch's. Here both are torch's, so scripts with either run unchanged.
``fused_ema_adamw`` is AdamW with an average of the weights (``ema_adamw.py``).
"""

from __future__ import annotations

from typing import Any, Literal

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.optimizer.rules import ADDED


class FusedAdam(Feature, level=0):
    """Adam as one operator per parameter group.

    Nothing is attached: Megatron's Adam is the fused one of the substitute.
    """

    optimizer: Literal["adam", "sgd", "muon", "dist_muon", "fused_adam", "cadam"] = flag(
        "adam", "the optimizer", megatron=True, adds=ADDED
    )
    optimizer_selection: Literal["fused_adamw", "fused_torch_adamw", "fused_ema_adamw"] = flag(
        "fused_adamw", "which AdamW: the first two are torch's, the third also averages weights"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.optimizer in ADDED or self.optimizer_selection != "fused_adamw"

    def problems(self, megatron: Megatron) -> list[Problem]:
        level = megatron.get("optimization_level")
        if self.optimizer == "cadam" and level is not None and level < 2:
            return [Problem("--optimizer cadam", f"needs --optimization-level >= 2 (got {level})")]
        if self.optimizer_selection == "fused_adamw":
            return []
        if self.optimizer in ("adam", "fused_adam"):
            return []
        name = f"--optimizer-selection {self.optimizer_selection}"
        return [Problem(name, f"has no effect with --optimizer {self.optimizer}", "use adam")]

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        return {"optimizer": "adam"}
