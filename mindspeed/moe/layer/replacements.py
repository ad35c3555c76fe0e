"""Stages that features put in the place of a layer's own.

    saving    experts and shared experts under a save policy (:mod:`mindspeed.moe.save`)
    pieces    experts in pieces (:mod:`mindspeed.moe.pipe_experts`)
    groups    experts in groups (:mod:`mindspeed.moe.expert_groups`)
    hot       hot experts (:mod:`mindspeed.moe.hot_experts`)

Each function in :data:`REPLACEMENTS` gets the call and the stages so far, in order, and returns
them unchanged where the request does not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from mindspeed.moe.dispatch.all_to_all import AllToAllDispatcher
from mindspeed.moe.dispatch.choice import Routing, device_dispatcher
from mindspeed.moe.dispatch.device_sizes import BoundedExperts
from mindspeed.moe.dispatch.padded import PaddedDispatcher
from mindspeed.moe.expert_groups import BoundedGroups, PipelinedGroups
from mindspeed.moe.hot_experts import HotExperts
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.layer.call import LayerCall, SharedHalves
from mindspeed.moe.load.placed import placed
from mindspeed.moe.pipe_experts import PipedExperts
from mindspeed.moe.save.policy import ALL
from mindspeed.moe.save.shared import SavedShared
from mindspeed.moe.save.stage import ExpertSaving
from mindspeed.te.expert_range import expert_range

Replacement = Callable[[LayerCall, Stages], Stages]


def saving(call: LayerCall, stages: Stages) -> Stages:
    """Keep what the request says for backward."""
    request, layer = call.request, call.layer
    if request.save == ALL and request.recompute_above is None:
        return stages
    saved = ExpertSaving(
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


def _shared(call: LayerCall, saved: ExpertSaving, stages: Stages) -> Stages:
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


def pieces(call: LayerCall, stages: Stages) -> Stages:
    """Compute the experts in pieces."""
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
    elif request.exchange == "device":
        assert request.bound is not None
        whole = BoundedExperts.of(call.groups, routing.width, request.bound)
        stages = _noting(whole, stages)
    piped = PipedExperts(whole, request.pipe_slices, request.pipe_chained, call.absent, call.log)
    return piped.stages(replace(stages, compute={**stages.compute, "experts": experts}))


def _noting(bounded: BoundedExperts, stages: Stages) -> Stages:
    """Note experts with too many rows as soon as they are known."""
    route = stages.compute["route"]

    def noting(chunk: Chunk) -> None:
        route(chunk)
        bounded.note(chunk.values["layer"], chunk.tensors["routing_map"])

    return replace(stages, compute={**stages.compute, "route": noting})


def groups(call: LayerCall, stages: Stages) -> Stages:
    """Compute the experts in groups."""
    request = call.request
    if request.expert_groups == 1:
        return stages
    routing = Routing.of(call.layer.config, request)
    whole = AllToAllDispatcher(call.groups, routing.copies)
    pipelined = PipelinedGroups(whole, request.expert_groups, call.log)
    if request.exchange == "device":
        bounded = device_dispatcher(call.groups, routing)
        pipelined = BoundedGroups(bounded, request.expert_groups, call.log)

    def experts(chunk: Chunk) -> None:
        tensors = chunk.tensors
        tensors["rows"] = call.compute_experts(
            expert_range(call.layer.experts, chunk.values["first"], pipelined.size),
            tensors["rows"],
            chunk.values["tokens_per_expert"],
            tensors["row_probs"],
        )

    return replace(stages, compute={**stages.compute, "groups": pipelined.stage(experts)})


def hot(call: LayerCall, stages: Stages) -> Stages:
    """Compute hot experts where their tokens are."""
    request = call.request
    if not request.hot_experts:
        return stages
    found = HotExperts(call.groups, call.layer.experts, request.hot_experts, request.hot_messages)
    return replace(
        stages,
        compute=found.compute(stages.compute),
        communicate=found.communicate(stages.communicate),
    )


def placement(call: LayerCall, stages: Stages) -> Stages:
    """Put experts into other slots."""
    slots = call.request.slots
    return stages if slots is None else placed(stages, slots)


def watched(call: LayerCall, stages: Stages) -> Stages:
    """Tell the rows of all ranks, which the host knows once the program has run."""
    request, trained = call.request, call.layer.training and torch.is_grad_enabled()
    watch = request.watch
    if watch is None or not trained or request.hot_experts:  # their rows are not counted
        return stages

    def tell(chunk: Chunk) -> None:
        counts = chunk.values.get("host_counts")
        if counts is not None:
            rows = counts.get().view(-1, call.groups.experts)
            watch(rows if request.slots is None else rows[:, list(request.slots)])

    call.at_end.append(tell)
    return stages


REPLACEMENTS: tuple[Replacement, ...] = (watched, placement, saving, pieces, groups, hot)
