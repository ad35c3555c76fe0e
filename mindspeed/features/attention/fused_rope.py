"""Fused rotary position embedding: ``--use-fused-rotary-pos-emb``.

One kernel for the forward and one for the backward, in both layer specs, for batches of whole
sequences and of packed documents, partial and interleaved rotation. Cosine and sine are computed
once for all layers and applied in fp32. Worth it in every model with rotary embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.flags import flag

if TYPE_CHECKING:
    import torch

    from mindspeed.adaptor.seams import Seams


class FusedRope(Feature, level=1, seams=("kernels",)):
    """Rotary embedding as one operator, forward and backward."""

    use_fused_rotary_pos_emb: bool = flag(
        False, "rotary embedding as one operator, forward and backward"
    )

    def problems(self, megatron: Megatron) -> list[Problem]:
        name = "--use-fused-rotary-pos-emb"
        kind = megatron.get("position_embedding_type", "rope")
        if kind not in ("rope", "mrope"):
            return [
                Problem(
                    name, f"the position embedding is {kind}", "add --position-embedding-type rope"
                )
            ]
        if megatron.get("multi_latent_attention"):
            return [
                Problem(name, "multi-latent attention has its own rotary embedding", "remove it")
            ]
        if not megatron.get("apply_rope_fusion", True):
            return [conflict(name, "--no-rope-fusion")]
        return []

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.ops.npu_rotary_position_embedding import rotate

        def fused(
            t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
        ) -> torch.Tensor:
            if t.dim() == 3:  # packed documents: [t, h, d]
                t, cos, sin = t.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1)
                return rotate(t, cos, sin, int(interleaved)).squeeze(1)
            return rotate(t, cos, sin, int(interleaved))

        seams.use_kernels(owner=self.name, rotate=fused)
