"""``--enable-recompute-layers-per-pp-rank``: ``--recompute-num-layers`` counts layers of a rank.

Megatron's ``--recompute-method block`` recomputes the first N layers of every model chunk. With
virtual pipeline stages a rank has several chunks, so N can only grow by as many layers at once.
With this flag N counts over all chunks of the pipeline rank, shared evenly among them
(:mod:`mindspeed.memory.layer_rules`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.memory.activation_memory import EXCLUDES, attach_plan
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


_FLAG = "--enable-recompute-layers-per-pp-rank"


class RecomputeLayersPerRank(
    Feature,
    level=2,
    seams=("chunk",),
    excludes={**EXCLUDES, "fp8": "", "distribute_saved_activations": ""},
):
    """--recompute-num-layers counts layers of a pipeline rank, not of a model chunk."""

    enable_recompute_layers_per_pp_rank: bool = flag(
        False, "--recompute-num-layers counts layers of a pipeline rank, not of a model chunk"
    )

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        return {"recompute_granularity": None}

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if megatron.get("recompute_granularity") != "full" or (
            megatron.get("recompute_method") != "block"
        ):
            yield Problem(
                _FLAG,
                "counts the layers of --recompute-granularity full --recompute-method block, "
                "which are not given",
                "add them, or remove it",
            )
        if (megatron.get("virtual_pipeline_model_parallel_size") or 1) == 1:
            yield Problem(
                _FLAG,
                "has no effect without virtual pipeline stages: a rank has one model chunk",
                "add --num-layers-per-virtual-pipeline-stage, or remove it",
            )

    def uneven_layers(self, megatron: Megatron) -> str:
        return _FLAG

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        if megatron.get("optimize_recomp_communication_level"):
            return  # that feature divides the same layers into its regions
        number = megatron.get("recompute_num_layers") or 0

        def plan(sites: dict[str, dict[str, Any]], layers: Any) -> Any:
            from mindspeed.memory.layer_rules import plan_of
            from mindspeed.memory.plan import LAYER, SiteAction

            chosen = layers.first(number, of_rank=True)
            return plan_of(chosen, lambda layer: (LAYER,), SiteAction.RECOMPUTE)

        attach_plan(seams, self.name, "--enable-recompute-layers-per-pp-rank", megatron, plan)
