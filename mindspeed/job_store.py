"""The key-value store of a job, in which its ranks leave each other notes.

Every launcher opens one: torchrun and ours before they start the ranks, others when rank 0 joins
the process group. Keys belong to one attempt of a job that its launcher starts again.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def connect(seconds: float) -> dist.Store:
    """A separate connection: the process group's may be busy in a blocking call.

    Args:
        seconds: how long to wait for the store.

    Raises:
        dist.DistError, RuntimeError: nobody answers.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=seconds),
    )
    return of_this_attempt(store)


def of_this_attempt(store: dist.Store) -> dist.Store:
    """The same store; its keys are those of this attempt."""
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def store_of_ranks() -> dist.Store | None:
    """The store that all ranks of this job can reach now.

    None: there is one rank, or nobody has opened a store so far.

    Raises:
        dist.DistError, RuntimeError: the launcher's store does not answer.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return None
        return of_this_attempt(dist.distributed_c10d._get_default_store())
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return connect(seconds=30)
    return None
