"""Bad inputs over all commands: no traceback, no signal, no silent success, nothing endless.

Another seed finds other inputs: ``python -m tests.fuzz.run_bad_inputs SEED COUNT EMPTY_DIRECTORY``.
"""

from __future__ import annotations

import json

import pytest

from tests.fuzz.run_bad_inputs import run

OPTIONS = {"setup": "tests.support.warm", "backend": None}


@pytest.mark.slow
def test_a_few_known_bad_inputs(ranks, tmp_path):
    (result,) = ranks(1, run, 0, 24, str(tmp_path), timeout=240, **OPTIONS)
    assert result["ran"] >= 24
    assert result["wrong"] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 160), pytest.param(1, 400, marks=pytest.mark.weekly)]
)
def test_hundreds_of_bad_inputs(ranks, tmp_path, seed, count):
    """All known ones, and some of every kind that are drawn."""
    (result,) = ranks(1, run, seed, count, str(tmp_path), timeout=850, **OPTIONS)
    assert result["ran"] == count
    assert result["wrong"] == [], json.dumps(result["wrong"][:10], indent=1)
