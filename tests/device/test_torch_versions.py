"""What differs between releases of torch is as torch_versions says."""

from __future__ import annotations

import hashlib

import torch.distributed as dist

from mindspeed.device import torch_versions


def names_of_lonely_groups() -> list[tuple[str, str]]:
    """Names that torch gives groups of one rank, and those that are expected."""
    rank, found = dist.get_rank(), []
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    dist.new_group([0, 1])
    dist.new_group([1])
    for _ in range(2):
        text = f"{rank}_{torch_versions.groups_in_a_name()}"
        group = dist.new_group([rank], use_local_synchronization=True)
        found.append((group.group_name, hashlib.sha1(text.encode()).hexdigest()))
    return found


def test_the_number_in_the_name_of_a_group_of_some_ranks(ranks):
    for names in ranks(2, names_of_lonely_groups):
        for name, expected in names:
            assert name == expected
