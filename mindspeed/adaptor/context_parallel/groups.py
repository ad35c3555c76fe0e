"""Process groups and ranks of context parallelism by the original's functions.

Megatron's groups, and lists of ranks that follow from them; nothing is created. ``hybrid`` is
``--context-parallel-algo hybrid_cp_algo``: all-to-all among neighbours (Ulysses), ring between
them. Without it the whole context-parallel group is the ring. A double ring (``--cp-window-size``)
has consecutive ranks of the ring as windows.
"""

from __future__ import annotations

import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.te import attention_policy


def get_context_parallel_group_for_hybrid_ulysses(
    check_initialized: bool = True,
) -> dist.ProcessGroup | None:
    """The ranks of this rank's all-to-all.

    Args:
        check_initialized: Raise where there are no such groups, instead of returning None.

    Raises:
        ConfigError: There are none.
    """
    return _level(0, check_initialized)


def get_context_parallel_group_for_hybrid_ring(
    check_initialized: bool = True,
) -> dist.ProcessGroup | None:
    """The ranks of this rank's ring; arguments and errors as for the all-to-all."""
    return _level(1, check_initialized)


def get_context_parallel_for_hybrid_ulysses_world_size() -> int:
    """Ranks of an all-to-all."""
    return dist.get_world_size(get_context_parallel_group_for_hybrid_ulysses())


def get_context_parallel_for_hybrid_ulysses_rank() -> int:
    """This rank in its all-to-all."""
    return dist.get_rank(get_context_parallel_group_for_hybrid_ulysses())


def get_context_parallel_for_hybrid_ring_world_size() -> int:
    """Ranks of a ring."""
    return dist.get_world_size(get_context_parallel_group_for_hybrid_ring())


def get_context_parallel_for_hybrid_ring_rank() -> int:
    """This rank in its ring."""
    return dist.get_rank(get_context_parallel_group_for_hybrid_ring())


def get_context_parallel_for_hybrid_ring_global_ranks() -> list[int]:
    """The ranks of this rank's ring, by their numbers in the world."""
    group = get_context_parallel_group_for_hybrid_ring()
    assert group is not None
    return dist.get_process_group_ranks(group)


def get_ring_ranks_for_intra_window() -> list[int]:
    """World ranks of this rank's window of the double ring; the whole ring where it is one."""
    ranks, position, window = _ring()
    first = position - position % window
    return ranks[first : first + window]


def get_ring_ranks_for_inter_window_kv() -> list[int]:
    """World ranks of the outer ring, in which keys and values go from window to window."""
    ranks, position, window = _ring()
    return ranks[position % window :: window]


def get_ring_ranks_for_inter_window_dkv() -> list[int]:
    """World ranks of the outer ring of the gradients of keys and values: that of the keys."""
    return get_ring_ranks_for_inter_window_kv()


def get_ring_degree() -> int:
    """Parts in which a ring shards the sequence: ranks of the ring."""
    return len(_ring()[0])


def _level(level: int, check_initialized: bool) -> dist.ProcessGroup | None:
    from megatron.core import parallel_state

    groups = parallel_state.get_hierarchical_context_parallel_groups(False)
    if groups:
        return groups[level]  # type: ignore[no-any-return]
    if check_initialized:
        raise ConfigError(
            "there are no groups of hybrid context parallelism: --context-parallel-algo "
            "hybrid_cp_algo --ulysses-degree-in-cp N, before the parallel groups are made"
        )
    return None


def _ring() -> tuple[list[int], int, int]:
    """World ranks of this rank's ring, its position among them, ranks of a window."""
    from megatron.core import parallel_state

    group = _level(1, False) or parallel_state.get_context_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    window = attention_policy.context_strategy(None, 1).ring_window
    return ranks, dist.get_rank(group), len(ranks) if window == 1 else window
