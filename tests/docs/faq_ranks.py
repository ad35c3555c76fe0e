"""Jobs for the ranks of test_faq.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def sockets_after_groups(number: int) -> int:
    """Open sockets that ``number`` additional groups of all ranks cost before they are used."""
    before = _sockets()
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(number)]
    cost = _sockets() - before
    used = torch.ones(1)
    dist.all_reduce(used, group=groups[-1])  # a lazy group still connects when it is needed
    assert used.item() == dist.get_world_size()
    return cost


def _sockets() -> int:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.lexists(link))
