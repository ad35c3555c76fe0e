"""The trusted run and its noise."""

from __future__ import annotations

import pytest

from tests.compare.job import Runs


@pytest.fixture(scope="session")
def runs(rank_pool, tmp_path_factory) -> Runs:
    """Recordings of a job in fp32."""
    return Runs(rank_pool.run, tmp_path_factory.mktemp("compare"))
