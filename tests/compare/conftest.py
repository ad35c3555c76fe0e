"""Trusted runs and their noise."""

from __future__ import annotations

import pytest

from tests.compare.campaign import Campaign
from tests.compare.job import Runs
from tests.compare.pairs import FEW


@pytest.fixture(scope="session")
def runs(rank_pool, tmp_path_factory) -> Runs:
    """Recordings of a job in fp32."""
    return Runs(rank_pool.run, tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="session")
def campaign(rank_pool, tmp_path_factory) -> Campaign:
    """Recordings of jobs in fp32, with one set of weights: of planted faults, and of equal runs."""
    folder = tmp_path_factory.mktemp("campaign")
    return Campaign(rank_pool.run, folder, weights=1, samples=FEW)
