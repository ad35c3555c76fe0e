"""A layer whose experts are computed in pieces; see :mod:`mindspeed.moe.pipe_experts`."""

from __future__ import annotations

from dataclasses import replace

from mindspeed.moe.dispatch.all_to_all import AllToAllDispatcher
from mindspeed.moe.dispatch.choice import Routing
from mindspeed.moe.dispatch.padded import PaddedDispatcher
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.layer.call import LayerCall
from mindspeed.moe.pipe_experts import PipedExperts
from mindspeed.te.expert_range import expert_range


def pieces(call: LayerCall, stages: Stages) -> Stages:
    """The stages of a layer, in pieces if its request says so.

    Args:
        call: Of the layer.
        stages: So far.
    """
    request = call.request
    if not request.pipe_slices:
        return stages

    def experts(chunk: Chunk) -> None:
        tensors = chunk.tensors
        tensors["rows"] = call.compute_experts(
            expert_range(call.layer.experts, chunk.values["expert"], 1),
            tensors["rows"],
            chunk.values["tokens_per_expert"],
            tensors["row_probs"],
        )

    routing = Routing.of(call.layer.config, request)
    whole = AllToAllDispatcher(call.groups, routing.copies)
    if request.exchange == "padded":
        assert routing.capacity is not None
        whole = PaddedDispatcher(call.groups, routing.width, capacity=routing.capacity)
    piped = PipedExperts(whole, request.pipe_slices, request.pipe_chained, call.absent, call.log)
    return piped.stages(replace(stages, compute={**stages.compute, "experts": experts}))
