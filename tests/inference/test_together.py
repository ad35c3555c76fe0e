"""Requests that run together get what each gets alone, in every family and layout."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from tests.inference import together_ranks

SETUP = "mindspeed.megatron_adaptor"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    known = {}

    def of(name):
        if name not in known:
            known[name] = str(tmp_path_factory.mktemp(name))
            together_ranks.saved_family(name, known[name])
        return known[name]

    return of


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
def test_every_request_gets_the_tokens_that_it_gets_alone(ranks, folder, name, layout):
    world = layout[0] * layout[1]
    results = ranks(world, together_ranks.compared, folder(name), layout, setup=SETUP, timeout=150)
    for result in results:
        for ours, alone in zip(result["together"], result["alone"], strict=True):
            assert [row[:2] for row in ours] == [row[:2] for row in alone]
    first = results[0]
    for mine, other in zip(first["together"][1], first["alone"][1], strict=True):
        assert len(mine[2]) == len(other[2]) == 5
        for a, b in zip(mine[2], other[2], strict=True):
            assert a.chosen == pytest.approx(b.chosen, abs=1e-4)
            assert [token for token, _ in a.best] == [token for token, _ in b.best]
    # One pass for each prompt, then one a turn for all of them.
    assert first["passes"][1] == 5 + 10
    assert first["passes"][0] > 5 + 10


def test_who_leaves_and_who_cannot_be_answered_changes_nothing_for_others(ranks, folder):
    (seen,) = ranks(1, together_ranks.leaving, folder("llama2-gqa"), setup=SETUP)
    assert seen["same"] and seen["rows"] == 0
    assert "outside the vocabulary" in seen["error"]
