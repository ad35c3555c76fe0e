"""The experts and shared experts of a layer under a save policy (:mod:`mindspeed.moe.save`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.layer.call import LayerCall
from mindspeed.moe.layer.shared import SharedHalves
from mindspeed.moe.save.policy import ALL
from mindspeed.moe.save.shared import SavedShared
from mindspeed.moe.save.stage import Saving


def saving(call: LayerCall, stages: Stages) -> Stages:
    """Stages that keep what the request says; see :data:`REPLACEMENTS`."""
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

    stages = replace(stages, compute={**stages.compute, "experts": experts})
    if request.save.shared or not layer.use_shared_expert:
        call.at_end.append(saved.schedule)
        return stages
    return _shared(call, saved, stages)


def _shared(call: LayerCall, saved: Saving, stages: Stages) -> Stages:
    module, hidden = call.layer.shared_experts, call.hidden
    name = f"shared {saved.name}"
    shared = SavedShared(SharedHalves(module), module.parameters(), name, call.log)

    def whole(chunk: Chunk) -> None:
        chunk.tensors["shared"] = shared.second(shared.first(hidden), hidden)

    def first(chunk: Chunk) -> None:
        chunk.tensors["shared"] = shared.first(hidden)

    def second(chunk: Chunk) -> None:
        chunk.tensors["shared"] = shared.second(chunk.tensors["shared"], hidden)

    overlap = call.request.overlap  # the function belongs to the call: it must not know it

    def schedule(chunk: Chunk) -> None:
        saved.schedule(chunk, shared.again() if overlap else None)

    call.at_end.append(schedule)
    own = {"shared": whole, "shared_fc1": first, "shared_fc2": second}
    return replace(stages, side={**stages.side, **own})
