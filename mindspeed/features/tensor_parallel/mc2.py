"""``--use-ascend-mc2``: a product and its collective in one kernel, with sequence parallelism.

On an NPU torch_npu's kernels, on GPUs of one machine torch's over symmetric memory, elsewhere
parts that overlap. Fused are the forward of column and row layers and the input gradient of row
layers; the input gradient of a column layer only where its weight is frozen, because the weight
gradient hides its collective otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.tensor_parallel import overlapped_products as shared
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--use-ascend-mc2"


class Mc2(
    Feature,
    level=2,
    seams=("kernels",),
    conflicts=("coc",),
    excludes={"tp_comm_overlap": "", **shared.READ_WEIGHTS},
):
    """A product of a linear layer and its collective in one kernel."""

    use_ascend_mc2: bool = flag(False, "a product and its collective in one kernel")

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        yield from shared.common_problems(NAME, megatron)
        yield from shared.sequence_parallel_problem(NAME, "fuses", megatron)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        shared.attach_products(seams, self.name, shared.fused_overlap())
