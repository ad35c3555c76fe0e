"""Flash attention: ``--use-flash-attn``.

The core attention of both layer specs by one operator that never has the ``[b, h, s, s]`` scores,
masks or probabilities in memory, not for the backward either: it keeps q, k, v, the output and 4
bytes per query and head. Causal masks, windows and packed documents are rules and cost only the
pairs that they let meet. Same losses. Worth it always.

``--attention-mask-type causal`` (default) says that the mask Megatron's data loader makes for the
local spec is the causal one, so it is not read (``--no-create-attention-mask-in-dataloader`` saves
making it); ``general`` reads it, or the one of ``mindspeed.model.transformer.set_attention_mask``
where there is none. ``--sparse-mode 4`` with ``--pre-tockens`` and ``--next-tockens`` is a sliding
window in every causal layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.flags import flag

if TYPE_CHECKING:
    import torch

    from mindspeed.adaptor.seams import Seams
    from mindspeed.te.attention import Documents
    from mindspeed.te.masks import Visibility, Window

_WHOLE_SEQUENCE = 65536
_BAND = 4


@dataclass(frozen=True)
class FlashAttentionOptions:
    """Whether and how core attention is one operator."""

    use_flash_attn: bool = flag(False, "core attention as one operator", megatron=True)
    use_fusion_attn_v2: bool = flag(False, "same; the version with position biases on NPU")
    attention_mask_type: Literal["causal", "general"] = flag(
        "causal", "causal: the loader's mask is the causal one and not read; general: it is read"
    )
    sparse_mode: int = flag(0, "0, 2, 3: causal; 4: window of --pre-tockens and --next-tockens")
    pre_tockens: int = flag(_WHOLE_SEQUENCE, "keys before its own that a query sees (mode 4)")
    next_tockens: int = flag(0, "keys behind its own that a query sees (mode 4)")
    shape_order: Literal["SBH", "BSH", "BSND"] = flag(
        "SBH", "without effect: tensors are taken in the order they have"
    )


def _validate(options: FlashAttentionOptions, megatron: Megatron) -> list[Problem]:
    problems = []
    if options.sparse_mode not in (0, 2, 3, _BAND):
        problems.append(
            Problem("--sparse-mode", f"{options.sparse_mode} is not one of 0, 2, 3, 4", "use one")
        )
    changed = (options.pre_tockens, options.next_tockens) != (_WHOLE_SEQUENCE, 0)
    if changed and options.sparse_mode != _BAND:
        problems.append(
            Problem("--pre-tockens, --next-tockens", "no window without it", "add --sparse-mode 4")
        )
    if options.pre_tockens < 0 or options.next_tockens < 0:
        problems.append(
            Problem("--pre-tockens, --next-tockens", "negative: some queries would see nothing")
        )
    if options.sparse_mode == _BAND and megatron.get("window_size"):
        problems.append(Problem("--sparse-mode 4", "--window-size is a window too", "give one"))
    masked = megatron.get("reset_attention_mask") and megatron.get("optimization_level", 2) < 2
    if options.attention_mask_type == "causal" and masked:  # no packed documents at this level
        problems.append(
            Problem(
                "--reset-attention-mask",
                "the mask that separates documents is not read",
                "add --attention-mask-type general, or use --optimization-level 2",
            )
        )
    return problems


def _attach(seams: Seams, options: FlashAttentionOptions, megatron: Megatron) -> None:
    from mindspeed.ops.attention_mask import mask_of_the_user
    from mindspeed.te import flash

    def attend(q: Any, k: Any, v: Any, seen: Visibility, **more: Any) -> torch.Tensor:
        if (seen.left, seen.right) == (-1, 0):
            seen = replace(seen, left=options.pre_tockens, right=options.next_tockens)
        return flash.attend(q, k, v, seen, **more)

    def attend_packed(
        q: Any, k: Any, v: Any, documents: Documents, kind: str, *, window: Window, **more: Any
    ) -> torch.Tensor:
        if "causal" in kind and window in (None, (-1, 0)):
            kind, window = "no_mask", (options.pre_tockens, options.next_tockens)
        return flash.attend_packed(q, k, v, documents, kind, window=window, **more)

    def given_mask(mask: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
        if options.attention_mask_type == "general":
            return mask_of_the_user() if mask is None else mask
        return None if causal else mask

    windowed = options.sparse_mode == _BAND
    seams.use_kernels(
        owner=FEATURE.name,
        attend=attend if windowed else flash.attend,
        attend_packed=attend_packed if windowed else flash.attend_packed,
        given_mask=given_mask,
    )


FEATURE = Feature(
    name="flash-attention",
    summary="core attention as one operator, forward and backward",
    level=1,
    options=FlashAttentionOptions,
    enabled=lambda options, megatron: options.use_flash_attn or options.use_fusion_attn_v2,
    validate=_validate,
    attach=_attach,
    seams=("kernels",),
)
