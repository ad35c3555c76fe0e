"""The import line changes nothing for libraries that do not use Megatron."""

from __future__ import annotations

import importlib.util

import pytest

from tests.adaptor.neighbour_jobs import NEIGHBOURS, trained, transformer_engine_seen


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_library_beside_megatron_trains_as_without_the_import(ranks, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    options = {"backend": None, "timeout": 240, "env": {"DS_ACCELERATOR": "cpu"}}
    [without] = ranks(1, trained, name, **options)
    [beside] = ranks(1, trained, name, setup="tests.support.warm", **options)
    assert beside == without
    assert len(beside["losses"]) == 3 and len(set(beside["losses"])) == 3


def test_transformer_engine_is_there_for_megatron_only(ranks):
    pytest.importorskip("accelerate")
    options = {"setup": "tests.support.warm", "backend": None}
    assert ranks(1, transformer_engine_seen, **options) == [(True, False)]
