"""What rank 0 decides, on all ranks: the next line of a chat, the next request of a server.

Rank 0 may wait for hours for its user. So the others wait in a process group of their own (gloo, on
the CPU, so that no accelerator spins) whose timeout is a month.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PATIENCE = timedelta(days=30)


class Control:
    """The ranks of the job, led by rank 0. Making it is collective."""

    def __init__(self) -> None:
        self.leads = dist.get_rank() == 0
        self._group = None
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def agree(self, value: Any = None) -> Any:
        """Rank 0's picklable ``value`` on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]
