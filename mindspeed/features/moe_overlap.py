"""``--moe-permutation-async-comm``, ``--moe-alltoall-overlap-comm``: experts' collectives hidden.

The first hides the exchange of counts behind the permutation of tokens. The second also hides
dispatch and combine: in forward behind the shared experts, in backward behind the weight gradients
of the experts and the shared experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


@dataclass(frozen=True)
class MoeOverlapOptions:
    """Which collectives of mixture-of-experts layers are hidden."""

    moe_permutation_async_comm: bool = flag(
        False, "hide the exchange of counts behind the permutation of tokens"
    )
    moe_alltoall_overlap_comm: bool = flag(
        False, "hide the all-to-all behind shared experts and weight gradients"
    )


def _validate(options: MoeOverlapOptions, megatron: Megatron) -> list[Problem]:
    return []


def _attach(seams: Seams, options: MoeOverlapOptions, megatron: Megatron) -> None:
    from mindspeed.adaptor.moe import moe_layers
    from mindspeed.moe.layer.megatron import change

    def execute_programs(model: Any, config: Any, vp_stage: int | None) -> None:
        for layer in moe_layers(model):
            change(
                layer,
                seams.journal,
                async_permutation=options.moe_permutation_async_comm,
                overlap=options.moe_alltoall_overlap_comm,
            )

    seams.chunk.add(execute_programs, owner=FEATURE.name)


FEATURE = Feature(
    name="moe-overlap",
    summary="collectives of mixture-of-experts layers are hidden behind computation",
    level=2,
    options=MoeOverlapOptions,
    enabled=lambda options, megatron: (
        options.moe_permutation_async_comm or options.moe_alltoall_overlap_comm
    ),
    validate=_validate,
    attach=_attach,
    seams=("chunk",),
)
