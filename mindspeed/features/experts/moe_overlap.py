"""``--moe-permutation-async-comm``, ``--moe-alltoall-overlap-comm``: experts' collectives hidden.

The first hides the exchange of counts behind the permutation of tokens. The second also hides
dispatch and combine: in forward behind the shared experts, in backward behind the weight gradients
of the experts and the shared experts. It works with grouped experts and with experts one by one.

Both execute a layer as a program (:mod:`mindspeed.moe.program`); probabilities then travel in the
rows of tokens, which saves a collective in each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mindspeed.features.experts.layer_programs import (
    all_to_all_problems,
    change_layers,
    dispatcher_problems,
    expert_problems,
    layer_problems,
    rank_problems,
    sends_equally,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

ASYNC, OVERLAP = "--moe-permutation-async-comm", "--moe-alltoall-overlap-comm"


class MoeOverlap(
    Feature,
    level=2,
    page="features/moe-alltoall-overlap.md",
    megatron_versions=">=0.16",
    seams=("chunk",),
):
    """Collectives of mixture-of-experts layers are hidden behind computation."""

    moe_permutation_async_comm: bool = flag(
        False, "hide the exchange of counts behind the permutation of tokens"
    )
    moe_alltoall_overlap_comm: bool = flag(
        False, "hide the all-to-all behind shared experts and weight gradients"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.moe_permutation_async_comm or self.moe_alltoall_overlap_comm

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name, dispatches = ASYNC, _counts
        if self.moe_alltoall_overlap_comm:
            name, dispatches = OVERLAP, _all_to_all
        return expert_problems(name, megatron, dispatches, rank_problems, layer_problems)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        changes = {"overlap": True} if self.moe_alltoall_overlap_comm else {}
        change_layers(seams, self.name, async_permutation=True, **changes)


def _all_to_all(name: str, megatron: Megatron) -> Iterator[Problem]:
    for problem in all_to_all_problems(name, megatron):
        yield replace(problem, fix=f"{problem.fix}, or take --moe-allgather-overlap-comm")


def _counts(name: str, megatron: Megatron) -> Iterator[Problem]:
    yield from dispatcher_problems(name, megatron)
    if sends_equally(megatron):
        yield Problem(
            name,
            "--moe-model-type deepspeed_moe exchanges no counts of tokens",
            "remove the flag, or add --moe-no-drop (without --moe-dynamic-padding)",
        )
