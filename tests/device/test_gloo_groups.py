"""Process groups end without locking up, with torch 2.7 as with newer ones."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from packaging.version import Version

from mindspeed.device import torch_versions
from mindspeed.journal import Journal


def ends(release: str) -> bool:
    """Ends many groups right after a collective; whether a backend outlives its group."""
    if release:
        torch_versions._HERE = Version(release)
    journal, original = Journal(), dist.destroy_process_group
    torch_versions.let_groups_end(journal)
    for _ in range(100):
        group = dist.new_group([0])
        dist.all_reduce(torch.ones(10_000), group=group)
        held = group._get_backend(torch.device("cpu"))
        backend = weakref.ref(held)
        dist.destroy_process_group(group)
        del held
        outlives = backend() is not None
        del group
        assert backend() is None
    journal.undo()
    assert dist.destroy_process_group is original
    return outlives


def test_the_backend_is_what_ends_last_where_torch_would_lock_up(ranks):
    assert ranks(1, ends, "2.7.1", timeout=60) == [True]
    assert ranks(1, ends, "", timeout=60) == [not torch_versions.gloo_groups_end_alone()]
