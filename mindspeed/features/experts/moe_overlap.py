"""``--moe-permutation-async-comm``, ``--moe-alltoall-overlap-comm``: experts' collectives hidden.

The first hides the exchange of counts behind the permutation of tokens. The second also hides
dispatch and combine: in forward behind the shared experts, in backward behind the weight gradients
of the experts and the shared experts. It works with grouped experts and with experts one by one.

Both execute a layer as a program (:mod:`mindspeed.moe.program`); probabilities then travel in the
rows of tokens, which saves a collective in each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.experts.deepspeed_moe import sends_equally
from mindspeed.features.experts.layer_programs import change_layers, expert_ranks, layer_problems
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

ASYNC, OVERLAP = "--moe-permutation-async-comm", "--moe-alltoall-overlap-comm"


class MoeOverlap(Feature, level=2, megatron_versions=">=0.16", seams=("chunk",)):
    """Collectives of mixture-of-experts layers are hidden behind computation."""

    moe_permutation_async_comm: bool = flag(
        False, "hide the exchange of counts behind the permutation of tokens"
    )
    moe_alltoall_overlap_comm: bool = flag(
        False, "hide the all-to-all behind shared experts and weight gradients"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.moe_permutation_async_comm or self.moe_alltoall_overlap_comm

    def problems(self, megatron: Megatron) -> list[Problem]:
        if "num_experts" not in megatron:  # a framework's configuration: checked with the model
            return []
        name = OVERLAP if self.moe_alltoall_overlap_comm else ASYNC
        if not megatron["num_experts"]:
            return [
                Problem(name, "the model has no experts", "remove the flag, or add --num-experts")
            ]
        checks = (_dispatcher, _ranks, layer_problems)
        return [problem for check in checks for problem in check(name, megatron)]

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        changes = {"overlap": True} if self.moe_alltoall_overlap_comm else {}
        change_layers(seams, self.name, async_permutation=True, **changes)


def _dispatcher(name: str, megatron: Megatron) -> Iterator[Problem]:
    dispatcher = megatron.get("moe_token_dispatcher_type")
    if dispatcher == "alltoall_seq":
        return  # every model would repeat it
    if name == OVERLAP and dispatcher != "alltoall":
        yield Problem(
            name,
            f"hides the collectives of the all-to-all dispatcher, and the dispatcher is "
            f"{dispatcher}",
            "add --moe-token-dispatcher-type alltoall, or take --moe-allgather-overlap-comm",
        )
    elif dispatcher not in ("alltoall", "allgather"):
        yield Problem(
            name,
            f"is for the dispatchers alltoall and allgather, and the dispatcher is {dispatcher}",
            "remove the flag, or add --moe-token-dispatcher-type alltoall",
        )
    if name == ASYNC and sends_equally(megatron):
        yield Problem(
            name,
            "--moe-model-type deepspeed_moe exchanges no counts of tokens",
            "remove the flag, or add --moe-no-drop (without --moe-dynamic-padding)",
        )


def _ranks(name: str, megatron: Megatron) -> Iterator[Problem]:
    if expert_ranks(megatron) == 1:
        yield Problem(
            name,
            "there is nothing to overlap: --expert-model-parallel-size 1 and no tensor-parallel "
            "experts",
            "remove the flag",
        )
