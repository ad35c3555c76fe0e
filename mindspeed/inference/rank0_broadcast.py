"""Broadcast of rank 0's decisions: the next line of a chat, the next batch update of a server.

Rank 0 may wait hours for its user. The other ranks therefore wait in a separate gloo group (on the
CPU, so that no accelerator spins in a collective) with a timeout of 30 days.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_TIMEOUT = timedelta(days=30)


class Rank0Broadcast:
    """Broadcasts Python objects from rank 0 to all ranks of the job. Its creation is collective."""

    def __init__(self) -> None:
        self.is_source = dist.get_rank() == 0
        self._group = None
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's picklable ``value``, on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]
