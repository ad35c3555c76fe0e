"""``--moe-zero-memory``: experts keep (next to) nothing for backward.

    level0   drops the rows that experts get and their activations: backward dispatches the tokens
             again, hidden behind the return of the gradients, and applies the activation function
    level1   drops the output of the first linear layer, too, and what shared experts keep: backward
             computes them again

``M (H + F) e`` and ``M (H + 3 F) e`` bytes less for ``M`` rows, one all-to-all of tokens more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.experts.layer_programs import (
    CONFLICTS,
    EXCLUDES,
    chunk_policies,
    expert_problems,
    saving_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.pipeline.plans import has_pairs
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME, NUMBER = "--moe-zero-memory", "--moe-zero-memory-num-layers"


class MoeZeroMemory(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("chunk",),
    conflicts=CONFLICTS,
    excludes=EXCLUDES,
    first_layers="moe_zero_memory_num_layers",
):
    """Experts keep next to nothing for backward."""

    moe_zero_memory: Literal["disable", "level0", "level1"] = flag(
        "disable", "what experts do not keep: inputs and activations (level0), nothing (level1)"
    )
    moe_zero_memory_num_layers: int | None = flag(
        None,
        "only this many layers of a pipeline stage have level1, the others level0",
        range=Range(0, 100_000),
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.moe_zero_memory != "disable" or self.moe_zero_memory_num_layers is not None

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        level, number = self.moe_zero_memory, self.moe_zero_memory_num_layers
        if number is not None and level != "level1":
            yield Problem(
                f"{NUMBER} {number}", f"has no effect with {NAME} {level}", f"add {NAME} level1"
            )
        if level == "disable":
            return
        yield from expert_problems(f"{NAME} {level}", megatron, saving_problems, self._kept)

    def _kept(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        level, number = self.moe_zero_memory, self.moe_zero_memory_num_layers
        stages = megatron.get("pipeline_model_parallel_size") or 1
        if (
            number is not None
            and (layers := megatron.get("num_layers"))
            and number * stages > layers
        ):
            yield Problem(
                f"{NUMBER} {number}",
                f"a pipeline stage has {layers // stages} layers (--num-layers {layers}, "
                f"--pipeline-model-parallel-size {stages})",
                f"give 0 to {layers // stages}",
            )
        if level == "level1":
            if has_pairs(megatron):
                yield conflict(
                    name,
                    "--moe-fb-overlap",
                    "a pair hides no second product of the experts",
                    f"use {NAME} level0",
                )
            modules = megatron.get("recompute_modules") or ()
            if megatron.get("recompute_granularity") == "selective" and "shared_experts" in modules:
                yield Problem(
                    name,
                    "and --recompute-modules shared_experts recompute the same: redundant",
                    "remove shared_experts",
                )
        elif megatron.get("moe_apply_probs_on_input"):
            yield Problem(
                name,
                "has no effect with --moe-apply-probs-on-input: the product of rows and "
                "probabilities is kept",
                f"use {NAME} level1",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.moe.layer.megatron import change
        from mindspeed.moe.layer.megatron_parts import change_parts
        from mindspeed.moe.save.policy import LEVEL0, LEVEL1, LEVELS

        chosen = change_parts if has_pairs(megatron) else change
        level, number = LEVELS[self.moe_zero_memory], self.moe_zero_memory_num_layers

        def drop(model: Any, config: Any, vp_stage: int | None) -> None:
            for layer, first in chunk_policies(model, config, vp_stage, number):
                policy = LEVEL0 if level is LEVEL1 and not first else level
                chosen(layer, seams.journal, save=policy)

        seams.chunk.add(drop, owner=self.name)
