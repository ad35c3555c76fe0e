"""The mask that attention reads: ``--attention-mask-type``.

``causal`` (default): the rule of the layer. The mask tensor of Megatron's data loader is the causal
one, so the loader does not make it (``b * s * s`` bytes per micro-batch, which are broadcast over
tensor-parallel ranks).

``general``: a user's mask, set once with
``mindspeed.model.transformer.set_attention_mask`` as regions, intervals of keys, a bool tensor or a
callable. It becomes regions on the host, which every algorithm of context parallelism can shard.
Without one, a mask tensor of the data loader is read, as Megatron does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    import torch

    from mindspeed.adaptor.seams import Seams
    from mindspeed.attention.mask import Mask

_LOADER = "create_attention_mask_in_dataloader"


class AttentionMask(Feature, level=1, seams=("kernels",), after=("sliding-window",)):
    """One mask for the process as regions instead of a tensor per micro-batch."""

    attention_mask_type: Literal["causal", "general"] = flag(
        "causal", "causal: the layer's rule; general: the mask that set_attention_mask was given"
    )
    attention_mask_on_cpu: bool = flag(False, "without effect: masks are regions on the host")

    def enabled(self, megatron: Megatron) -> bool:
        names = ("use_flash_attn", "use_fusion_attn_v2", "triangle_attn")
        return self.attention_mask_type == "general" or any(megatron.get(name) for name in names)

    def problems(self, megatron: Megatron) -> list[Problem]:
        masked = megatron.get("reset_attention_mask") and megatron.get("optimization_level", 2) < 2
        if self.attention_mask_type == "causal" and masked:  # no packed documents at this level
            return [
                Problem(
                    "--reset-attention-mask",
                    "the mask that separates documents is not read",
                    "add --attention-mask-type general, or use --optimization-level 2",
                )
            ]
        return []

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        unread = self.attention_mask_type == "causal" and megatron.get(_LOADER)
        return {_LOADER: False} if unread else {}

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.attention.user_mask import mask_of_batch
        from mindspeed.errors import ConfigError
        from mindspeed.te import attention_policy

        general = self.attention_mask_type == "general"

        def mask_tensor(mask: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
            return mask if general or not causal else None

        def user_mask(length: int, samples: int) -> Mask | None:
            mask = mask_of_batch(length, samples)
            if mask is not None and not general:
                raise ConfigError("set_attention_mask needs --attention-mask-type general")
            return mask

        by_others = attention_policy.sharding_mask

        def sharding_mask(cu_seqlens: tuple[int, ...], samples: int) -> Mask | None:
            whole = len(cu_seqlens) == samples + 1
            mask = user_mask(cu_seqlens[-1] // samples, samples) if whole else None
            return by_others(cu_seqlens, samples) if mask is None else mask

        seams.use_kernels(
            owner=self.name,
            mask_tensor=mask_tensor,
            user_mask=user_mask,
            sharding_mask=sharding_mask,
        )
