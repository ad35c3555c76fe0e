"""The experts of a layer under a save policy (:mod:`mindspeed.moe.save`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.layer.call import LayerCall
from mindspeed.moe.save.policy import ALL
from mindspeed.moe.save.stage import Saving


def saving(call: LayerCall, stages: Stages) -> Stages:
    """The stage ``experts`` that keeps what the request says; see :data:`REPLACEMENTS`."""
    request, layer = call.request, call.layer
    if request.save == ALL and request.recompute_above is None:
        return stages
    saved = Saving(
        request,
        stages.repeat,
        layer.config.moe_router_topk,
        call.groups.tp.size(),
        f"experts of layer {layer.layer_number}",
        call.log,
    )

    def experts(chunk: Chunk) -> None:
        tensors, sizes = chunk.tensors, chunk.values["tokens_per_expert"]
        run = partial(saved.run, chunk, layer.experts)
        tensors["rows"] = call.compute_experts(
            layer.experts, tensors["rows"], sizes, tensors["row_probs"], run
        )

    call.at_end.append(saved.schedule)
    return replace(stages, compute={**stages.compute, "experts": experts})
