"""The seam ``pipeline_ends``: which model chunks embed tokens and compute the loss.

Megatron says: the first chunk of the first pipeline rank, and the last chunk of the last one. Only
these read data, and of a micro-batch only what they need. A feature that places the stages
otherwise says so here; Megatron-LM's functions that read and our own trainer ask
:func:`pipeline_ends`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.arguments import script_arguments
from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.seam import SeamTable
from mindspeed.adaptor.versions import at_least


def pipeline_ends(seams: SeamTable, vp_stage: int | None) -> tuple[bool, bool]:
    """Whether a chunk of this rank is the first, and whether it is the last stage.

    Args:
        seams: functions of ``pipeline_ends`` get and return this pair.
        vp_stage: number of the chunk; None for any chunk of this rank.
    """
    from megatron.core import parallel_state

    where: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    found = (
        parallel_state.is_pipeline_first_stage(**where),
        parallel_state.is_pipeline_last_stage(**where),
    )
    return seams.pipeline_ends.pipe(found, vp_stage)  # type: ignore[no-any-return]


def readers_patches(seams: SeamTable, owner: str) -> tuple[Patch, ...]:
    """The patches of Megatron-LM's answer to which chunks read data.

    Shared by the seams ``documents`` (all read, because all need the documents, as those of
    ``--sft``) and ``pipeline_ends``.
    """

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_first_or_last_pipeline_stage(vp_stage: int | None) -> bool:
            # Since 0.18 the script itself reads the borders of --sft on inner stages.
            packed = getattr(script_arguments(), "sft", False) and not at_least("0.18")
            all_read = bool(seams.documents.functions) or packed
            return all_read or any(pipeline_ends(seams, vp_stage))

        return is_first_or_last_pipeline_stage

    places = {"": ">=0.15,<0.18", ".common_utils": ">=0.18"}
    return tuple(
        Patch(
            f"megatron.training.utils{module}:is_first_or_last_pipeline_stage",
            make,
            owner,
            "the stages that need a micro-batch read it",
            expects="(vp_stage)",
            versions=versions,
        )
        for module, versions in places.items()
    )
