"""A request in a continuous batch gets the tokens that it gets alone, in every model family."""

from __future__ import annotations

import pytest

from tests.support.lazy import needs

needs("megatron.core", "transformers")

from tests.inference import continuous_batching_ranks

SETUP = "tests.support.warm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    known = {}

    def of(name):
        if name not in known:
            known[name] = str(tmp_path_factory.mktemp(name))
            continuous_batching_ranks.saved_family(name, known[name])
        return known[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama2-gqa", (1, 1)),
        ("llama2-gqa", (2, 2)),
        ("mistral-window", (1, 1)),
        ("bloom", (1, 1)),
        ("deepseek-v3", (1, 1)),
    ],
)
def test_continuous_batching_equals_unbatched_generation(ranks, folder, name, layout):
    world = layout[0] * layout[1]
    results = ranks(
        world, continuous_batching_ranks.compared, folder(name), layout, setup=SETUP, timeout=150
    )
    for result in results:
        for batched, alone in zip(result["batched"], result["alone"], strict=True):
            assert [sequence[:2] for sequence in batched] == [sequence[:2] for sequence in alone]
    first = results[0]
    for batched, alone in zip(first["batched"][1], first["alone"][1], strict=True):
        assert len(batched[2]) == len(alone[2]) == 5
        for a, b in zip(batched[2], alone[2], strict=True):
            assert a.sampled == pytest.approx(b.sampled, abs=1e-4)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
    # One prefill per prompt, then one decode pass per step for the whole batch.
    assert first["passes"][1] == 5 + 10
    assert first["passes"][0] > 5 + 10


def test_removed_and_refused_requests_do_not_change_the_others(ranks, folder):
    (seen,) = ranks(1, continuous_batching_ranks.removing, folder("llama2-gqa"), setup=SETUP)
    assert seen["same"] and seen["batch size"] == 0
    assert "outside the vocabulary" in seen["error"]
