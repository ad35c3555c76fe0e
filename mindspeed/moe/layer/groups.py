"""A layer whose experts are computed in groups; see :mod:`mindspeed.moe.expert_groups`."""

from __future__ import annotations

from dataclasses import replace

from mindspeed.moe.dispatch.all_to_all import AllToAllDispatcher
from mindspeed.moe.dispatch.choice import Routing
from mindspeed.moe.expert_groups import PipelinedGroups
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.layer.call import LayerCall
from mindspeed.te.expert_range import expert_range


def groups(call: LayerCall, stages: Stages) -> Stages:
    """The stages of a layer, with experts in groups if its request says so.

    Args:
        call: Of the layer.
        stages: So far.
    """
    request = call.request
    if request.expert_groups == 1:
        return stages
    whole = AllToAllDispatcher(call.groups, Routing.of(call.layer.config, request).copies)
    pipelined = PipelinedGroups(whole, request.expert_groups, call.log)

    def experts(chunk: Chunk) -> None:
        tensors = chunk.tensors
        tensors["rows"] = call.compute_experts(
            expert_range(call.layer.experts, chunk.values["first"], pipelined.size),
            tensors["rows"],
            chunk.values["tokens_per_expert"],
            tensors["row_probs"],
        )

    return replace(stages, compute={**stages.compute, "groups": pipelined.stage(experts)})
