"""``--moe-experts-pipeline-degree D``: experts in groups that hide each other's collectives.

With expert tensor parallelism a rank holds slices of its experts: it gathers the rows of the other
slices before the products and sums the results after them. In D groups of experts, the gather of
the next group and the sum of the last one run while a group computes; only the first gather and the
last sum are exposed, 2 of 2 D. Results are those without groups to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.experts.layer_programs import (
    all_to_all_problems,
    change_layers,
    expert_problems,
    expert_slices,
    gate_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import COUNT

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class ExpertsPipeline(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("chunk",),
    conflicts={
        "moe-adaptive-recompute": "it decides for all experts of a rank together",
        "moe-alltoall-exchange": "it is for whole experts, which gather nothing",
        "moe-zero-memory": "rows that were dropped come back all together, not in groups",
        "pipe-experts": "both cut the experts into pieces",
    },
    excludes={"moe_shared_expert_overlap": "Megatron's dispatcher runs the shared experts itself"},
):
    """Groups of experts hide each other's tensor-parallel collectives."""

    moe_experts_pipeline_degree: int = flag(
        0,
        "groups of local experts that hide each other's expert tensor parallel collectives; 0: off",
        range=COUNT,
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name = f"--moe-experts-pipeline-degree {self.moe_experts_pipeline_degree}"
        yield from expert_problems(name, megatron, all_to_all_problems, gate_problems, self._sizes)

    def _sizes(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        if expert_slices(megatron) == 1:
            extended = (
                " (--moe-tp-extend-ep makes it so)" if megatron.get("moe_tp_extend_ep") else ""
            )
            yield Problem(
                name,
                f"expert tensor parallel size is 1{extended}, so there is nothing to hide",
                "choose --expert-tensor-parallel-size of 2 or more, or remove it",
            )
        local = megatron["num_experts"] // (megatron.get("expert_model_parallel_size") or 1)
        allowed = [d for d in range(2, local + 1) if local % d == 0]
        if self.moe_experts_pipeline_degree not in allowed:
            choices = ", ".join(map(str, allowed)) or "none: remove it"
            yield Problem(
                name,
                f"cannot divide the {local} experts of a rank into groups",
                f"allowed: {choices}",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        change_layers(seams, self.name, expert_groups=self.moe_experts_pipeline_degree)
