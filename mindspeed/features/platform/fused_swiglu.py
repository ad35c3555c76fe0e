"""Fused SwiGLU: ``--use-fused-swiglu``.

One kernel for the forward and one for the backward, in dense layers, shared experts and experts
weighted with the router's probability, in both layer specs. Kept for the backward: the output
of the first linear layer, 4 bytes per activation in bf16, where Megatron's unfused formula keeps 8.
Computed in fp32 and rounded once. Worth it in every model with ``--swiglu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.flags import flag

if TYPE_CHECKING:
    import torch

    from mindspeed.adaptor.seams import Seams


class FusedSwiglu(Feature, level=1, seams=("kernels",)):
    """SwiGLU as one operator, forward and backward."""

    use_fused_swiglu: bool = flag(False, "SwiGLU as one operator, forward and backward")

    def problems(self, megatron: Megatron) -> list[Problem]:
        name = "--use-fused-swiglu"
        if not megatron.get("swiglu", True):
            return [Problem(name, "the model has another activation", "add --swiglu")]
        unfused = not megatron.get("bias_swiglu_fusion", True)
        if unfused and not megatron.get("use_te_activation_func"):
            return [conflict(name, "--no-bias-swiglu-fusion")]
        return []

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.ops.swiglu import swiglu, weighted_swiglu

        def fused(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return swiglu(x, bias=bias)

        seams.use_kernels(owner=self.name, swiglu=fused, weighted_swiglu=weighted_swiglu)
