"""Processes that tests of the planner fork."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def imported_ahead() -> None:
    """Megatron is imported here, once, and not in each process that a test forks."""
    from mindspeed.planner.isolated import import_ahead

    import_ahead()
