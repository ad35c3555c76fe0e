"""The import line changes nothing for libraries that do not use Megatron."""

from __future__ import annotations

import importlib.util

import pytest

from tests.adaptor.neighbour_jobs import NEIGHBOURS, trained, transformer_engine_seen

OPTIONS = {"backend": None, "timeout": 240, "env": {"DS_ACCELERATOR": "cpu"}}


@pytest.fixture(scope="module")
def without(rank_pool):
    """Of all installed libraries, in one process: the costly part is to import transformers."""
    names = [name for name in NEIGHBOURS if importlib.util.find_spec(name)]
    [found] = rank_pool.run(1, trained, names, **OPTIONS)
    return found


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_library_beside_megatron_trains_as_without_the_import(ranks, without, name):
    if name not in without:
        pytest.skip(f"{name} is not installed")
    [found] = ranks(1, trained, [name], setup="tests.support.warm", **OPTIONS)
    beside = found[name]
    assert beside == without[name]
    assert len(beside["losses"]) == 3 and len(set(beside["losses"])) == 3


def test_transformer_engine_is_there_for_megatron_only(ranks):
    pytest.importorskip("accelerate")
    options = {"setup": "tests.support.warm", "backend": None}
    assert ranks(1, transformer_engine_seen, **options) == [(True, False)]
