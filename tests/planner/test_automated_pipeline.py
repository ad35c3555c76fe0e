"""The result of an automated pipeline, made without a device."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planner import automated_job as jobs


@pytest.fixture(scope="module")
def found(rank_pool, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("automated"))
    flags = "--automated-pipeline --save-memory-ratio 0.03"
    options = {"setup": "tests.support.warm", "backend": None, "timeout": 240}
    return rank_pool.run(1, jobs.planned, flags, folder, **options)[0]


@pytest.mark.slow
def test_the_profile_has_what_was_counted(found):
    profile = found["profile"]
    assert (len(profile.layers), profile.ranks, profile.num_microbatches) == (6, 2, 4)
    one = profile.layers[0]
    for layer in profile.layers[1:3]:
        assert (layer.activations, layer.static) == (one.activations, one.static)
        assert layer.forward == pytest.approx(one.forward, rel=1e-3)
        assert layer.backward == pytest.approx(one.backward, rel=1e-3)
    assert 0 < one.forward < one.backward
    saved = one.recompute["layer"]
    assert 0 < saved.bytes < one.activations
    assert 0 < saved.seconds < one.backward
    assert profile.last.static > 0
    assert profile.latency > 0


@pytest.mark.slow
def test_the_result_is_what_the_feature_finds_for_this_profile(found):
    from mindspeed.pipeline.automated.result import result_of
    from mindspeed.pipeline.automated.search import search

    profile, result = found["profile"], found["result"]
    expected = result_of(search(profile, "memory", ratio=0.03), profile.job)
    assert dataclasses.replace(expected, job=result.job) == result
    assert any(result.recompute)
    assert " ".join(result.flags()) in found["text"]


@pytest.mark.slow
def test_the_next_start_takes_it(found):
    result = found["result"]
    assert found["list"] == ",".join(map(str, result.recompute))
    assert "has its result already" in found["again"]
