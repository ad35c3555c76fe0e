"""Triangle attention: ``--triangle-attn``.

Causal attention in blocks of ``--triangle-block-size`` queries, each of which multiplies the keys
up to its last query only: ``(1 + B / s) / 2`` of the pairs, where the plain formula multiplies all.
Same losses. For devices without a flash kernel; ``--use-flash-attn`` skips more and keeps less.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import SIZE

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


@dataclass(frozen=True)
class TriangleAttentionOptions:
    """Whether core attention goes block by block, and their size."""

    triangle_attn: bool = flag(False, "causal attention in blocks that skip later keys")
    triangle_block_size: int = flag(512, "queries of a block", range=SIZE)


def _validate(options: TriangleAttentionOptions, megatron: Megatron) -> list[Problem]:
    problems = []
    ranks = megatron.get("context_parallel_size") or 1
    if ranks > 1:
        problems.append(
            Problem(
                "--triangle-attn",
                f"attends on one rank, --context-parallel-size is {ranks}",
                "remove it: only what the mask shows is multiplied there anyway",
            )
        )
    return problems


def _attach(seams: Seams, options: TriangleAttentionOptions, megatron: Megatron) -> None:
    from mindspeed.te import triangle

    attend = functools.partial(triangle.attend, block_size=options.triangle_block_size)
    seams.use_kernels(owner=FEATURE.name, attend=attend)


FEATURE = Feature(
    name="triangle-attention",
    summary="causal attention in blocks that skip later keys",
    level=1,
    options=TriangleAttentionOptions,
    enabled=lambda options, megatron: options.triangle_attn,
    validate=_validate,
    attach=_attach,
    seams=("kernels",),
    conflicts=("flash-attention",),
)
