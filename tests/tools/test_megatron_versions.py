"""The table of Megatron versions says what was measured, and which releases the library accepts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("tomllib")  # Python 3.11

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import megatron_versions
from megatron_release import load, store
from megatron_versions import BASE, EQUAL, JOBS

from mindspeed.adaptor.versions import TESTED

OTHER = "MINDSPEED_OTHER_MEGATRON"  # directory of another release that is supported


def test_every_release_that_is_accepted_was_measured_whole():
    data = load(megatron_versions.DATA)
    for release in TESTED:
        assert JOBS.keys() <= data[release].keys(), release
        assert {data[release][name] for name in BASE} == {EQUAL}
        verdicts = {text.partition(":")[0] for text in data[release].values()}
        assert not verdicts & {"failed", "differs"}, release


def test_a_release_is_tested_when_everything_is_equal(tmp_path):
    right = dict.fromkeys(BASE, EQUAL) | {"patches": "0"}
    data = {"1.0.0": right, "0.9.1": right | {"tensor": "refused: --x"}, "main": right}
    assert megatron_versions.tested(data) == ["1.0.0", "main"]
    assert megatron_versions.problems(data) == [
        "1.0.0: the table and TESTED in mindspeed/adaptor differ"
    ]
    store(tmp_path / "data.toml", "# head\n", data)
    assert list(load(tmp_path / "data.toml")) == ["0.9.1", "1.0.0", "main"]


@pytest.mark.skipif(OTHER not in os.environ, reason=f"{OTHER} names no other Megatron")
@pytest.mark.timeout(300)
def test_another_release_trains():
    chosen = {name: JOBS[name] for name in ("virtual-pipeline", "local-sequence")}
    found = megatron_versions.measure("other", os.environ[OTHER], chosen)
    assert {name: found[name] for name in chosen} == dict.fromkeys(chosen, EQUAL)
