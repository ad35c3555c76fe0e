"""Fused RMSNorm: ``--use-fused-rmsnorm``.

One kernel for the forward and one for the backward, in both layer specs, with sequence
parallelism and zero-centred gamma. A norm keeps its input and 4 bytes per row for the backward: 2
bytes per element in bf16, where ``F.rms_norm`` keeps 8. Same losses. Worth it in every model with
``--normalization RMSNorm``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    import torch

    from mindspeed.adaptor.seams import Seams


class FusedRmsNorm(Feature, level=1, seams=("kernels",)):
    """RMSNorm as one operator, forward and backward."""

    use_fused_rmsnorm: bool = flag(False, "RMSNorm as one operator, forward and backward")

    def problems(self, megatron: Megatron) -> list[Problem]:
        kind = megatron.get("normalization", "RMSNorm")
        if kind == "RMSNorm":
            return []
        return [
            Problem("--use-fused-rmsnorm", f"the model has {kind}", "add --normalization RMSNorm")
        ]

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.ops.rms_norm import rms_norm
        from mindspeed.te import kernels

        unfused = kernels.normalize

        def normalize(
            x: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            *,
            eps: float,
            rms: bool,
            zero_centered_gamma: bool = False,
        ) -> Any:
            if not rms:  # a model may have both: q and k norms, for example
                return unfused(
                    x, weight, bias, eps=eps, rms=rms, zero_centered_gamma=zero_centered_gamma
                )
            return rms_norm(x, weight, eps, offset=1.0 if zero_centered_gamma else 0.0)

        seams.use_kernels(owner=self.name, normalize=normalize)
