"""``--half-batch-overlap``: one half of a micro-batch computes while the other communicates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--half-batch-overlap"


class HalfBatch(Feature, level=2, seams=("chunk",)):
    """One half of a micro-batch computes while the other communicates."""

    half_batch_overlap: bool = flag(
        False, "run layers in two halves of a micro-batch, whose collectives hide each other"
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if megatron.get("tensor_model_parallel_size", 2) == 1:
            yield Problem(
                NAME,
                "--tensor-model-parallel-size is 1, so linear layers do not communicate",
                "remove it, or use more tensor-parallel ranks",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.te import local_linears
        from mindspeed.tensor_parallel.halves.megatron import attach

        def halve(model: Any, config: Any, vp_stage: int | None) -> None:
            local_linears.convert_chunk(model, config, vp_stage)
            attach(model, seams.journal)

        seams.chunk.add(halve, owner=self.name)
