"""``--moe-record-routing DIR``: which experts tokens go to, for ``mindspeed moe plan --routing``.

Every rank writes the rows of each expert in its last 16 micro-batches, and the experts of some of
their tokens, when the training ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.features.experts.layer_programs import (
    expert_problems,
    gate_problems,
    hook_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--moe-record-routing"


class MoeRecordRouting(
    Feature,
    level=0,
    megatron_versions=">=0.16",
    planning=("no part",),
    seams=("chunk", "train"),
):
    """Routing of the last micro-batches, recorded for ``mindspeed moe plan``."""

    moe_record_routing: str = flag("", "folder for the routing of the last micro-batches")

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        yield from expert_problems(NAME, megatron, gate_problems, hook_problems)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.moe.load.megatron_recording import RoutingRecorder

        topk = megatron.get("moe_router_topk") or 2
        recorder = RoutingRecorder(Path(self.moe_record_routing), megatron["num_experts"], topk)
        seams.chunk.add(recorder.chunk, owner=self.name)
        seams.train.add(recorder.train, owner=self.name)
