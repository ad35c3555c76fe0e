"""A second communicator for the groups that share a sequence.

Messages of one communicator wait for each other on NVIDIA and Ascend devices. With another one for
the same ranks, gradients travel home while the next keys arrive (``--use-cp-send-recv-overlap``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist


class SecondCommunicators:
    """The context-parallel groups of this process, each a second time."""

    def __init__(self) -> None:
        self._made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def make(self) -> None:
        """Make them anew for the groups of Megatron's state. Collective over each group."""
        self.destroy()
        for group in _context_groups():
            if group.size() > 1 and group not in self._made:
                ranks = dist.get_process_group_ranks(group)
                self._made[group] = dist.new_group(
                    ranks, use_local_synchronization=True, group_desc="CONTEXT_PARALLEL_SECOND"
                )

    def of(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The other communicator of a group; None where there is none."""
        return None if group is None else self._made.get(group)

    def destroy(self) -> None:
        """Destroy them."""
        for made in self._made.values():
            if made in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(made)
        self._made.clear()


def _context_groups() -> Iterator[dist.ProcessGroup]:
    from megatron.core import parallel_state

    yield parallel_state.get_context_parallel_group()
    yield from parallel_state.get_hierarchical_context_parallel_groups(False) or ()
