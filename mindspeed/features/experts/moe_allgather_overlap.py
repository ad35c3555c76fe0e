"""``--moe-allgather-overlap-comm``: the gathers and the reduce-scatter of experts are hidden.

    --moe-token-dispatcher-type allgather --moe-allgather-overlap-comm

In forward behind the shared experts, in backward behind the weight gradients of the experts and the
shared experts. Where the tokens of this rank's experts are is computed while the tokens travel, as
``--moe-permutation-async-comm`` does alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.experts.layer_programs import (
    change_layers,
    expert_problems,
    layer_problems,
    rank_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--moe-allgather-overlap-comm"


class MoeAllgatherOverlap(
    Feature,
    level=2,
    page="features/moe-all-gather.md",
    megatron_versions=">=0.16",
    seams=("chunk",),
    after=("moe-overlap",),
):
    """The experts' all-gather is hidden by shared experts and weight gradients."""

    moe_allgather_overlap_comm: bool = flag(
        False, "hide the experts' all-gather behind shared experts and weight gradients"
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        yield from expert_problems(NAME, megatron, _gathers, rank_problems, layer_problems)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        change_layers(seams, self.name, overlap=True)


def _gathers(name: str, megatron: Megatron) -> Iterator[Problem]:
    dispatcher = megatron.get("moe_token_dispatcher_type")
    if megatron.get("moe_alltoall_overlap_comm"):
        yield Problem(
            name,
            "and --moe-alltoall-overlap-comm are for different dispatchers",
            f"--moe-token-dispatcher-type is {dispatcher}: keep the flag of that one",
        )
    elif dispatcher != "allgather":
        yield Problem(
            name,
            f"hides the collectives of the all-gather dispatcher, and the dispatcher is "
            f"{dispatcher}",
            "add --moe-token-dispatcher-type allgather, or take --moe-alltoall-overlap-comm",
        )
    if megatron.get("moe_model_type") == "deepspeed_moe":
        yield Problem(
            name,
            "--moe-model-type deepspeed_moe exchanges tokens by all-to-all",
            "remove the flag, or take --moe-model-type megatron_moe",
        )
