"""The options that features set on a mixture-of-experts layer, and the program of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch

from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.nodes import NodeGroups
from mindspeed.moe.program import Program
from mindspeed.moe.row_exchange import EQUAL_BLOCKS, RowExchange
from mindspeed.moe.save.policy import ALL, SavePolicy
from mindspeed.moe.wire import PLAIN, Wire


@dataclass(frozen=True)
class LayerRequest:
    """The options of one layer; each feature sets its own fields.

    Attributes:
        async_permutation: communications of counts are hidden by the permutation.
        overlap: dispatch and combine are hidden by shared experts and weight gradients.
        exchange: how all-to-all sends tokens: "flat", once for each expert; "dedup", once to each
            rank; "hierarchical", once to each node and there once to each rank; "padded", the same
            number to every expert; "window", the same but a predicted one, and nothing is dropped;
            "device", only the device knows how many; "hybridep", the same by a kernel for all.
        capacity: that number, for a rank's number of tokens.
        dropped: tokens may have fewer or more copies than the router chooses experts.
        nodes: groups between and within nodes, for "hierarchical".
        bound: of the rows that are sent, for "device" and "hybridep".
        row_exchange: how these rows travel.
        pipe_slices: experts are computed one by one, each in so many slices of the tokens; 0: not.
        pipe_chained: with them, collectives of the two expert groups wait for each other.
        expert_groups: groups of local experts whose expert tensor parallel collectives hide behind
            each other's products; 1: all together.
        hot_experts: experts that every rank computes for its own tokens; 0: none.
        hot_messages: in which their weights are sent.
        fp8: rows travel in eight bits: "tokens" on their way to experts, "both": and the gradients
            of results; "": none.
        save: what the experts keep for backward.
        recompute_above: a rank whose load is larger keeps only the rows of its experts.
        slots: slot of each expert; None: experts are in their order.
        in_parts: the parts of the layer run one by one, beside those of another micro-batch.
        watch: gets the rows of every rank for every expert of a call that is trained,
            ``[ranks, experts]`` on the host; not of exchanges that do not know them there.
    """

    async_permutation: bool = False
    overlap: bool = False
    exchange: str = "flat"
    capacity: Callable[[int], int] | None = None
    dropped: bool = False
    nodes: NodeGroups | None = None
    bound: DeviceBound | None = None
    row_exchange: RowExchange = EQUAL_BLOCKS
    pipe_slices: int = 0
    pipe_chained: bool = False
    expert_groups: int = 1
    hot_experts: int = 0
    hot_messages: int = 1
    fp8: str = ""
    save: SavePolicy = ALL
    recompute_above: float | None = None
    slots: tuple[int, ...] | None = None
    in_parts: bool = False
    watch: Callable[[torch.Tensor], None] | None = None

    def wire_of(self, width: int) -> Wire:
        """The format of rows of ``width`` elements."""
        return Wire(width, self.fp8 == "both") if self.fp8 else PLAIN


def program_of(request: LayerRequest) -> Program:
    experts = "gather! arrange experts disarrange scatter!"
    if request.expert_groups > 1:
        experts = "groups"
    asynchronous = request.async_permutation or request.overlap or request.pipe_slices
    # The number of copies is known from the counts only.
    hidden = asynchronous and not request.dropped
    head = "route count> permute count<" if hidden else "route count! permute"
    if request.pipe_slices:
        return Program.parse(f"{head} pieces unpermute")
    if request.hot_experts:
        head = "route count! choose weights> permute"
        hot = "weights< hot"
        if not request.overlap:
            return Program.parse(
                f"shared {head} dispatch> {hot} dispatch< {experts} combine! unpermute"
            )
        return Program.parse(
            f"{head} dispatch> shared_fc1 {hot} anchor dispatch< {experts} combine> shared_fc2 "
            "combine< unpermute"
        )
    if not request.overlap:
        return Program.parse(f"shared {head} dispatch! {experts} combine! unpermute")
    return Program.parse(
        f"{head} dispatch> shared_fc1 anchor dispatch< {experts} combine> shared_fc2 combine< "
        "unpermute"
    )


def settled(request: LayerRequest, config: Any) -> LayerRequest:
    """Add what follows from a Megatron transformer config: tokens dropped and padded."""
    factor = config.moe_expert_capacity_factor
    if config.moe_router_padding_for_quantization:
        return replace(request, dropped=True)
    if factor is None:
        return request
    padded = config.moe_pad_expert_input_to_capacity
    if config.moe_token_dispatcher_type != "alltoall" or request.exchange != "flat" or not padded:
        return replace(request, dropped=True)
    topk, experts = config.moe_router_topk, config.num_moe_experts

    def capacity(tokens: int) -> int:
        return ceil(tokens * topk / experts * factor)  # the router rounds so, too

    return replace(request, exchange="padded", capacity=capacity)
