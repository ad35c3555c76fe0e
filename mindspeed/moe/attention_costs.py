"""What the attention of a layer computes, whole and in chunks of the sequence.

A causal kernel computes half of the square of scores. A chunk of query rows
(:mod:`mindspeed.moe.ampipe.rows`) sees the keys up to its end, so later chunks compute more.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed.moe.ampipe.rows import blocks
from mindspeed.moe.costs import StageCosts, Work


@dataclass(frozen=True)
class Attention:
    """FLOPs of the forward of one layer's attention on one rank.

    Attributes:
        inputs: of the products that make queries, keys and values.
        core: of scores and weighted sums.
        output: of the projection.
    """

    inputs: float = 0.0
    core: float = 0.0
    output: float = 0.0

    def whole(self) -> StageCosts:
        """The stage ``attn``."""
        return _stage(self.inputs + self.core + self.output)

    def chunks(self, degree: int, ranks: int) -> list[StageCosts]:
        """The stage ``attn`` of each chunk; queries, keys and values are made before the first.

        Args:
            degree: Chunks of the sequence.
            ranks: Tensor-parallel ranks, each with a block of rows in every chunk.
        """
        total = (degree * ranks) ** 2
        found = []
        for chunk in blocks(degree * ranks, degree, ranks):
            share = sum(end**2 - start**2 for start, end in chunk) / total
            found.append(self.core * share + self.output / degree)
        return [_stage(flops + self.inputs * (i == 0)) for i, flops in enumerate(found)]


def _stage(flops: float) -> StageCosts:
    work = Work(flops)
    return StageCosts(work, work * 2)
