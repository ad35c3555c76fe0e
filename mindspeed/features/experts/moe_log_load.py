"""``--moe-log-load DIR``: how unevenly tokens go to experts, in the log.

Each report adds the fullest expert, rank and node over their mean, the entropy of the shares of
experts, dropped choices, and expert biases with their change. Every pipeline stage writes the
tokens of each expert of its layers to ``DIR/stage-N.jsonl``. Sums over ranks travel in messages
that are sent anyway (:mod:`mindspeed.moe.load.megatron`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.features.experts.layer_programs import (
    expert_problems,
    expert_slices,
    gate_problems,
    hook_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--moe-log-load"
_PROGRAMS = (
    *("balanced-experts", "experts-pipeline", "moe-adaptive-recompute", "moe-alltoall-exchange"),
    *("moe-device-bound", "moe-expert-placement", "moe-fp8-dispatch", "moe-overlap"),
    *("moe-tp-extend-ep", "moe-zero-memory", "pipe-experts"),
)
"""Features by which a program runs the layer, and tells the rows of the expert group."""


class MoeLogLoad(
    Feature,
    level=0,
    megatron_versions=">=0.16",
    planning=("no part",),
    after=_PROGRAMS,
    seams=("chunk", "step", "log", "figures", "expert_counts", "balance_losses"),
):
    """Loads of experts, ranks and nodes in the log."""

    moe_log_load: str = flag(
        "", "log the loads of experts; each stage writes a file in this folder"
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        yield from expert_problems(NAME, megatron, gate_problems, hook_problems)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.moe.load.megatron import LoadSettings, LoadWatch, RankPlace

        settings = LoadSettings(
            Path(self.moe_log_load),
            megatron.get("log_interval") or 1,
            megatron["num_experts"],
            megatron.get("moe_router_topk") or 2,
            expert_slices(megatron),
            int(os.environ.get("LOCAL_WORLD_SIZE", "8")),
            megatron.get("moe_expert_capacity_factor") is not None,
        )
        watch = LoadWatch(settings, RankPlace.here)
        for seam, function in (
            (seams.chunk, watch.chunk),
            (seams.step, watch.step),
            (seams.log, watch.text),
            (seams.figures, watch.figures),
            (seams.expert_counts, watch.counted_for_bias),
            (seams.balance_losses, watch.reduced),
        ):
            seam.add(function, owner=self.name)
