"""Ranks of an expert group that share a node, and the groups between and within nodes.

nodes = node_groups(ep_group, ranks_per_node())
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from mindspeed import device
from mindspeed.errors import ConfigError


@dataclass(frozen=True)
class NodeGroups:
    """The two groups of this rank into whose families an expert group is divided.

    Attributes:
        between: one rank of each node, all with the same number in their node.
        within: the ranks of this node.
    """

    between: dist.ProcessGroup
    within: dist.ProcessGroup

    def destroy(self) -> None:
        """Destroy both, unless the whole process group is gone already."""
        for group in (self.between, self.within):
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)


def ranks_per_node() -> int:
    """Ranks of a node: what the launcher says (LOCAL_WORLD_SIZE), else devices of this host."""
    said = os.environ.get("LOCAL_WORLD_SIZE")
    if said:
        return int(said)
    here = device.current()
    return 1 if here.on_host else here.count()


def divided(ranks: Sequence[int], per_node: int) -> list[list[int]]:
    """The ranks of a group by node.

    Args:
        ranks: Global ranks of the group, in its order.

    Raises:
        ConfigError: the nodes hold different numbers of its ranks, or not one after the other.
    """
    nodes: list[list[int]] = []
    for rank in ranks:
        if not nodes or nodes[-1][0] // per_node != rank // per_node:
            nodes.append([])
        nodes[-1].append(rank)
    sizes = {len(node) for node in nodes}
    if len(sizes) > 1 or len({node[0] // per_node for node in nodes}) < len(nodes):
        raise ConfigError(
            f"the experts' ranks {list(ranks)} are not spread evenly over nodes of {per_node} "
            "ranks, one node after the other: choose --expert-model-parallel-size as a multiple "
            "of the ranks of a node, or --moe-alltoall-exchange dedup"
        )
    return nodes


def node_groups(group: dist.ProcessGroup, per_node: int) -> NodeGroups:
    """Create the groups of this rank; all ranks of ``group`` do it at the same time.

    Args:
        group: The experts' ranks, all of them.

    Raises:
        ConfigError: as :func:`divided` says.
    """
    nodes = divided(dist.get_process_group_ranks(group), per_node)
    families = {"BETWEEN": [list(ranks) for ranks in zip(*nodes, strict=True)], "WITHIN": nodes}
    return NodeGroups(*(_own(groups, f"EXPERTS_{name}") for name, groups in families.items()))


def _own(groups: list[list[int]], description: str) -> dist.ProcessGroup:
    (ranks,) = (ranks for ranks in groups if dist.get_rank() in ranks)
    # Only the members take part: stages of a pipeline may have different numbers of layers.
    return dist.new_group(ranks, use_local_synchronization=True, group_desc=description)
