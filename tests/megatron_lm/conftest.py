"""Ranks for ``pretrain``, which tests of this folder call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mindspeed.testing import RankPool
from tests.megatron_lm import launch


@pytest.fixture(scope="module")
def forked_scripts(rank_pool: RankPool) -> Iterator[None]:
    """Scripts run in forks of a process that has imported Megatron-LM, instead of under torchrun.

    For files with many runs, of which none is about how a run starts.
    """
    launch.pools.append(rank_pool)
    yield
    launch.pools.pop()
