"""A layer with hot experts; see :mod:`mindspeed.moe.hot_experts`."""

from __future__ import annotations

from dataclasses import replace

from mindspeed.moe.hot_experts import HotExperts
from mindspeed.moe.interpreter import Stages
from mindspeed.moe.layer.call import LayerCall


def hot(call: LayerCall, stages: Stages) -> Stages:
    """The stages of a layer, with hot experts if its request says so.

    Args:
        call: Of the layer.
        stages: So far.
    """
    request = call.request
    if not request.hot_experts:
        return stages
    found = HotExperts(call.groups, call.layer.experts, request.hot_experts, request.hot_messages)
    return replace(
        stages,
        compute=found.compute(stages.compute),
        communicate=found.communicate(stages.communicate),
    )
