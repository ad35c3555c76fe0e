"""Dispatcher and program of a layer: one row for each dispatcher.

choice = choice_of("allgather", request)
program, stages = choice.program(request), choice.stages(groups, routing)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.moe.deepspeed.gate import Window
from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.dispatch import (
    all_gather,
    deduplicated,
    device_sizes,
    hierarchical,
    padded,
    window,
)
from mindspeed.moe.dispatch.all_gather import AllGatherDispatcher
from mindspeed.moe.dispatch.all_to_all import AllToAllDispatcher, ExpertGroups
from mindspeed.moe.dispatch.compact import places
from mindspeed.moe.dispatch.deduplicated import DeduplicatedDispatcher
from mindspeed.moe.dispatch.device_sizes import DeviceDispatcher
from mindspeed.moe.dispatch.hierarchical import HierarchicalDispatcher
from mindspeed.moe.dispatch.padded import PaddedDispatcher
from mindspeed.moe.dispatch.window import WindowDispatcher
from mindspeed.moe.interpreter import Stages
from mindspeed.moe.nodes import NodeGroups
from mindspeed.moe.program import Program
from mindspeed.moe.request import LayerRequest, program_of
from mindspeed.moe.row_exchange import EQUAL_BLOCKS, RowExchange


@dataclass(frozen=True)
class Routing:
    """Properties of the router that dispatchers need.

    Attributes:
        topk: experts that it chooses for a token.
        width: the most experts that a token can have after dropping and padding.
        copies: of every token, if it is the same number for all.
        capacity: rows of an expert for a rank's number of tokens; for padded dispatch.
        nodes: groups between and within nodes; for hierarchical dispatch.
        training: whether the layer is trained, and not evaluated.
        bound: of rows whose number stays on the device.
        packed: probabilities travel in the rows.
        row_exchange: how such rows travel.
        parts: groups of a rank's experts that are computed one by one.
        hybridep_sms: multiprocessors that HybridEP takes.
    """

    topk: int
    width: int
    capacity: Callable[[int], int] | None = None
    copies: int | None = None
    nodes: NodeGroups | None = None
    training: bool = True
    bound: DeviceBound | None = None
    packed: bool = True
    row_exchange: RowExchange = EQUAL_BLOCKS
    parts: int = 1
    hybridep_sms: int = 16

    @classmethod
    def of(cls, config: Any, request: LayerRequest, training: bool = True) -> Routing:
        """Read a Megatron transformer config and what the features ask."""
        topk, experts = config.moe_router_topk, config.num_moe_experts
        width = places(topk, experts, config.moe_pad_expert_input_to_capacity)
        copies = None if request.dropped else topk
        fixed = request.capacity, copies, request.nodes, training, request.bound
        return cls(
            topk,
            width,
            *fixed,
            packed=not request.in_parts,
            row_exchange=request.row_exchange,
            parts=request.expert_groups,
            hybridep_sms=getattr(config, "moe_hybridep_num_sms", 16),
        )


@dataclass(frozen=True)
class Choice:
    """A dispatcher.

    Attributes:
        program: from what the features ask.
        stages: of a layer, from its groups and its router.
    """

    program: Callable[[LayerRequest], Program]
    stages: Callable[[ExpertGroups, Routing], Stages]


def _padded(groups: ExpertGroups, routing: Routing) -> Stages:
    assert routing.capacity is not None
    dispatcher = PaddedDispatcher(groups, routing.width, routing.packed, capacity=routing.capacity)
    return dispatcher.stages()


def _flat(groups: ExpertGroups, routing: Routing) -> Stages:
    return AllToAllDispatcher(groups, routing.copies, routing.packed).stages()


def _hierarchical(groups: ExpertGroups, routing: Routing) -> Stages:
    assert routing.nodes is not None
    return HierarchicalDispatcher(groups, routing.width, routing.nodes).stages()


def _window(groups: ExpertGroups, routing: Routing) -> Stages:
    assert isinstance(routing.capacity, Window)
    return WindowDispatcher(
        groups, routing.topk, capacity=routing.capacity, observes=routing.training
    ).stages()


def device_dispatcher(groups: ExpertGroups, routing: Routing) -> DeviceDispatcher:
    """The dispatcher of rows whose number stays on the device."""
    return DeviceDispatcher(groups, routing.width, **_on_device(routing))


def _device(groups: ExpertGroups, routing: Routing) -> Stages:
    return device_dispatcher(groups, routing).stages()


def _hybrid_ep(groups: ExpertGroups, routing: Routing) -> Stages:
    from mindspeed.moe.dispatch.megatron_hybrid_ep import HybridEpDispatcher

    return HybridEpDispatcher(
        groups, routing.width, **_on_device(routing), sms=routing.hybridep_sms
    ).stages()


def _on_device(routing: Routing) -> dict[str, Any]:
    assert routing.bound is not None
    return {
        "packed": routing.packed,
        "capacity": lambda tokens: tokens,
        "bound": routing.bound,
        "exchange": routing.row_exchange,
        "parts": routing.parts,
    }


CHOICES: Mapping[tuple[str, str], Choice] = {
    ("alltoall", "flat"): Choice(program_of, _flat),
    ("alltoall", "padded"): Choice(padded.program, _padded),
    ("alltoall", "dedup"): Choice(
        deduplicated.program,
        lambda groups, routing: DeduplicatedDispatcher(groups, routing.width).stages(),
    ),
    ("alltoall", "hierarchical"): Choice(hierarchical.program, _hierarchical),
    ("alltoall", "window"): Choice(window.program, _window),
    ("alltoall", "device"): Choice(device_sizes.program, _device),
    ("alltoall", "hybridep"): Choice(program_of, _hybrid_ep),
    ("allgather", "flat"): Choice(
        all_gather.program,
        lambda groups, routing: AllGatherDispatcher(groups, routing.width).stages(),
    ),
}

DISPATCHERS = frozenset(dispatcher for dispatcher, _ in CHOICES)
"""Megatron's dispatchers that programs take the place of."""


def choice_of(dispatcher: str, request: LayerRequest) -> Choice:
    """The row of a dispatcher.

    Args:
        dispatcher: Megatron's ``--moe-token-dispatcher-type``.

    Raises:
        NotImplementedError: there is none.
    """
    try:
        return CHOICES[dispatcher, request.exchange]
    except KeyError:
        raise NotImplementedError(
            f"no program for the token dispatcher {dispatcher!r} with {request.exchange!r}"
        ) from None
