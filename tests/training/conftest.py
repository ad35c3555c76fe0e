"""The runs of one rank that layouts are compared with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.training.one_rank import OneRank, made_once


@pytest.fixture(scope="session")
def one_rank(rank_pool, tmp_path_factory) -> Callable[[str], OneRank]:
    """``one_rank(model)``: its run, made at the first use in a session."""
    return made_once(rank_pool.run, tmp_path_factory)
