"""The table of torch versions says what was measured, and which release is the oldest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tomllib")  # Python 3.11

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import torch_versions
from megatron_release import load
from megatron_versions import BASE, EQUAL

from mindspeed.device.torch_versions import OLDEST, TESTED, at_least


def test_every_release_in_the_table_was_measured_whole_and_trains():
    data = load(torch_versions.DATA)
    assert torch_versions.problems(data) == []
    assert torch_versions.unsaid(data) == []
    for release, found in data.items():
        assert set(torch_versions.ALL) <= found.keys(), release
        assert {found[name] for name in BASE} == {EQUAL}
        verdicts = {text.partition(":")[0] for text in found.values()}
        assert not verdicts & {"failed", "differs"}, release


def test_an_oldest_release_that_does_not_train_is_a_problem():
    right = dict.fromkeys(BASE, EQUAL)
    data = {f"{OLDEST}.1": right | {"tensor": "failed: died"}, TESTED: right}
    assert torch_versions.problems(data) == [
        f"OLDEST is {OLDEST}, the oldest that trains is {TESTED.rpartition('.')[0]}"
    ]


def test_a_measured_release_that_the_page_does_not_name_is_a_problem():
    data = {**load(torch_versions.DATA), "99.1, Python 3.99": {"python": "3.99"}}
    torch, python = torch_versions.unsaid(data)
    assert "torch is" in torch and "99.1" in torch
    assert "python is" in python and "3.99" in python


def test_releases_are_compared_as_numbers():
    assert at_least("2.9") and not at_least("99.0")
