"""A second process group over the ranks of each context-parallel group, for gradients (dkv).

Messages of one communicator are serialised on NVIDIA and Ascend devices. With a second one, dkv are
sent back while the next keys and values are received (``--use-cp-send-recv-overlap``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist


class OverlapGroups:
    """The overlap group of every context-parallel group of this process."""

    def __init__(self) -> None:
        self._groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def make(self) -> None:
        """Create them for the groups of ``parallel_state``. Collective over each group.

        Groups of the same ranks are kept: torch 2.7 gives a group the name of one that was
        destroyed, and waits for its ranks where they were.
        """
        before = {tuple(dist.get_process_group_ranks(made)): made for made in self._alive()}
        self._groups = {}
        for group in _context_groups():
            if group.size() > 1 and group not in self._groups:
                ranks = dist.get_process_group_ranks(group)
                kept = before.pop(tuple(ranks)) if tuple(ranks) in before else None
                self._groups[group] = kept or dist.new_group(
                    ranks, use_local_synchronization=True, group_desc="CONTEXT_PARALLEL_OVERLAP"
                )
        for made in before.values():
            dist.destroy_process_group(made)

    def of(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The overlap group of a context-parallel group; None where there is none."""
        return None if group is None else self._groups.get(group)

    def destroy(self) -> None:
        for made in self._alive():
            dist.destroy_process_group(made)
        self._groups.clear()

    def _alive(self) -> list[dist.ProcessGroup]:
        known = dist.distributed_c10d._world.pg_map
        return [made for made in self._groups.values() if made in known]


def _context_groups() -> Iterator[dist.ProcessGroup]:
    from megatron.core import parallel_state

    yield parallel_state.get_context_parallel_group()
    yield from parallel_state.get_hierarchical_context_parallel_groups(False) or ()
