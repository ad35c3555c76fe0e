"""Stages that features put in the place of a layer's own.

    def grouped(call: LayerCall, stages: Stages) -> Stages:
        if not call.request.expert_groups:
            return stages
        return replaced(stages, experts=ExpertGroupStages(call).experts)

Each function in :data:`REPLACEMENTS` gets the call and the stages so far, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mindspeed.moe.interpreter import Compute, Stages
from mindspeed.moe.layer.call import LayerCall
from mindspeed.moe.layer.groups import groups
from mindspeed.moe.layer.hot import hot
from mindspeed.moe.layer.pieces import pieces
from mindspeed.moe.layer.saving import saving

Replacement = Callable[[LayerCall, Stages], Stages]

REPLACEMENTS: tuple[Replacement, ...] = (saving, pieces, groups, hot)


def replaced(stages: Stages, **compute: Compute) -> Stages:
    """The stages with other functions behind some names.

    Args:
        stages: The stages so far.
        **compute: Stages that compute, by name: ``route``, ``experts``, ``arrange``, ...
    """
    return replace(stages, compute={**stages.compute, **compute})
