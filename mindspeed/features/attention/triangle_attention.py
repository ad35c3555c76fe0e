"""Triangle attention: ``--triangle-attn``.

Causal attention in blocks of ``--triangle-block-size`` queries, each of which multiplies the keys
up to its last query only: ``(1 + B / s) / 2`` of the pairs, where the plain formula multiplies all.
Same losses. For devices without a flash kernel; ``--use-flash-attn`` skips more and keeps less.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import SIZE

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class TriangleAttention(Feature, level=1, seams=("kernels",), conflicts=("flash-attention",)):
    """Causal attention in blocks that skip later keys."""

    triangle_attn: bool = flag(False, "causal attention in blocks that skip later keys")
    triangle_block_size: int = flag(512, "queries of a block", range=SIZE)

    def enabled(self, megatron: Megatron) -> bool:
        return self.triangle_attn

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        ranks = megatron.get("context_parallel_size") or 1
        if ranks > 1:
            yield Problem(
                "--triangle-attn",
                f"attends on one rank, --context-parallel-size is {ranks}",
                "remove it: only what the mask shows is multiplied there anyway",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.te.flash import attend_by_blocks

        attend = functools.partial(attend_by_blocks, block_size=self.triangle_block_size)
        seams.use_kernels(owner=self.name, attend=attend)
