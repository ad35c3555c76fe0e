"""``--moe-adaptive-recompute-activation``: ranks with too many tokens keep less of each.

A rank whose experts get more than ``scale`` times the balanced number of rows keeps their inputs
only, for this layer and micro-batch, and computes the rest again in backward. It decides alone,
from the counts of the dispatch that is under way: nothing is communicated or predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.experts.layer_programs import (
    CONFLICTS,
    EXCLUDES,
    change_layers,
    expert_problems,
    saving_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--moe-adaptive-recompute-activation"
SCALE = f"{NAME}-scale"
DEFAULT = 2.0


class MoeAdaptiveRecompute(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("chunk",),
    conflicts=CONFLICTS,
    excludes=EXCLUDES,
):
    """Ranks with too many tokens keep only the inputs of their experts."""

    moe_adaptive_recompute_activation: bool = flag(
        False, "ranks with too many tokens keep the inputs of their experts only"
    )
    moe_adaptive_recompute_activation_scale: float = flag(
        DEFAULT,
        "too many: more than this many times the balanced number",
        range=Range(0.0, above=True),
    )

    def enabled(self, megatron: Megatron) -> bool:
        return (
            self.moe_adaptive_recompute_activation
            or self.moe_adaptive_recompute_activation_scale != DEFAULT
        )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if not self.moe_adaptive_recompute_activation:
            scale = self.moe_adaptive_recompute_activation_scale
            yield Problem(f"{SCALE} {scale:g}", f"has no effect without {NAME}", f"add {NAME}")
            return
        yield from expert_problems(NAME, megatron, saving_problems)
        if megatron.get("moe_zero_memory") == "level1" and (
            megatron.get("moe_zero_memory_num_layers") is None
        ):
            yield Problem(
                NAME,
                "has no effect with --moe-zero-memory level1: every rank computes everything again",
                "use level0, or remove one",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        scale = self.moe_adaptive_recompute_activation_scale
        change_layers(seams, self.name, recompute_above=scale)
