"""``--moe-alltoall-exchange``, ``--moe-hierarchical-alltoallv``: tokens are not sent twice.

    --moe-alltoall-exchange flat             a token goes once to each of its experts
    --moe-alltoall-exchange dedup            once to each rank that owns experts of it
    --moe-alltoall-exchange hierarchical     once to each node, and there once to each rank
    --moe-tp-extend-ep --moe-hierarchical-alltoallv     hierarchical, the original's flag

Experts whole on a rank weight their results themselves, so the results of one rank are summed there
and come back as one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.experts.layer_programs import (
    all_to_all_problems,
    expert_parallel_problems,
    expert_problems,
    layer_problems,
    on_layers,
    sends_equally,
    whole_expert_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    import torch.distributed as dist

    from mindspeed.adaptor.seams import Seams
    from mindspeed.moe.nodes import NodeGroups

EXCHANGE, HIERARCHICAL = "--moe-alltoall-exchange", "--moe-hierarchical-alltoallv"


class MoeAlltoallExchange(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("chunk",),
    conflicts={
        "ampipe": "it has an exchange of its own",
        "pipe-experts": "it has an exchange of its own",
    },
):
    """Tokens are sent once to each rank or node that owns experts of them."""

    moe_alltoall_exchange: Literal["flat", "dedup", "hierarchical"] = flag(
        "flat",
        "send a token once to each of its experts (flat), to each rank of them (dedup), or to each "
        "node and there to each rank (hierarchical)",
    )
    moe_hierarchical_alltoallv: bool = flag(
        False, "send tokens of experts over tensor and expert ranks once to each node"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.exchange_of() != "flat"

    def exchange_of(self) -> str:
        return "hierarchical" if self.moe_hierarchical_alltoallv else self.moe_alltoall_exchange

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        named = self.moe_alltoall_exchange
        name = HIERARCHICAL if self.moe_hierarchical_alltoallv else f"{EXCHANGE} {named}"
        yield from expert_problems(
            name,
            megatron,
            all_to_all_problems,
            layer_problems,
            expert_parallel_problems,
            self._counts,
            self._sizes,
        )

    def _counts(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        if self.moe_hierarchical_alltoallv and self.moe_alltoall_exchange == "dedup":
            yield Problem(name, f"and {EXCHANGE} dedup are different exchanges", "keep one")
        if sends_equally(megatron):
            yield Problem(
                name,
                "sends counted rows, and with --moe-model-type deepspeed_moe experts get equal "
                "numbers",
                "remove it, or add --moe-no-drop (without --moe-dynamic-padding)",
            )

    def _sizes(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        tp = megatron.get("tensor_model_parallel_size") or 1
        ep = megatron.get("expert_model_parallel_size") or 1
        if self.moe_hierarchical_alltoallv and not megatron.get("moe_tp_extend_ep"):
            yield Problem(
                name,
                "is for experts spread over tensor-parallel ranks",
                f"add --moe-tp-extend-ep, or take {EXCHANGE} hierarchical",
            )
        else:
            yield from whole_expert_problems(name, megatron)
        if self.moe_hierarchical_alltoallv and tp == 1:
            yield Problem(
                name,
                "--tensor-model-parallel-size is 1",
                f"use more tensor-parallel ranks, or take {EXCHANGE} hierarchical",
            )
        if ep > 1 and self.exchange_of() == "hierarchical":
            yield from _nodes(name, ep, megatron)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.moe.layer.megatron import change
        from mindspeed.moe.nodes import node_groups, ranks_per_node

        exchange = self.exchange_of()
        made: list[tuple[dist.ProcessGroup, NodeGroups]] = []

        def nodes_of(group: dist.ProcessGroup) -> NodeGroups | None:
            if exchange != "hierarchical":
                return None
            for known, nodes in made:
                if known is group:
                    return nodes
            made.append((group, node_groups(group, ranks_per_node())))
            return made[-1][1]

        def exchanged(layer: Any) -> None:
            nodes = nodes_of(layer.token_dispatcher.ep_group)
            change(layer, seams.journal, exchange=exchange, nodes=nodes)

        def destroy() -> None:
            while made:
                made.pop()[1].destroy()

        on_layers(seams, self.name, exchanged)
        seams.journal.call_on_undo(destroy)


def _nodes(name: str, ranks: int, megatron: Megatron) -> Iterator[Problem]:
    from mindspeed.moe.nodes import ranks_per_node

    if not megatron.get("world_size"):
        return
    node = ranks_per_node()
    if ranks <= node:
        yield Problem(
            name,
            f"the experts' {ranks} ranks fit into a node of {node}",
            f"remove the flag, or take {EXCHANGE} dedup",
        )
    elif ranks % node:
        yield Problem(
            name,
            f"the experts' {ranks} ranks cannot be spread evenly over nodes of {node} ranks",
            f"choose --expert-model-parallel-size accordingly, or take {EXCHANGE} dedup",
        )
    elif node == 1:
        yield Problem(name, "nodes have one rank each", f"take {EXCHANGE} dedup: it is the same")
