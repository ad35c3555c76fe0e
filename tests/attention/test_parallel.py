"""Context-parallel attention over gloo, against scores written out in float64."""

from __future__ import annotations

import pytest

from . import gloo_ranks as jobs

EXACT = 1e-12


@pytest.mark.parametrize("name", jobs.PLANNERS)
@pytest.mark.parametrize("documents", [(0, 48), (0, 1, 20, 48)])
def test_algorithms(ranks, name: str, documents: tuple[int, ...]) -> None:
    for errors, counted in ranks(4, jobs.algorithm, name, documents):
        assert max(errors) < EXACT
        assert counted


@pytest.mark.parametrize(
    ("size", "heads", "groups"),
    [(48, 8, 4), (48, 4, 2), (48, 4, 1), (45, 6, 3), (47, 7, 7), (46, 5, 1)],
)
def test_ulysses_of_any_length_and_number_of_heads(ranks, size, heads, groups) -> None:
    for errors in ranks(4, jobs.ulysses, size, heads, groups):
        assert max(errors) < EXACT


def test_hybrid_of_heads_and_ring(ranks) -> None:
    for errors in ranks(4, jobs.hybrid, 2):
        assert max(errors) < EXACT


def test_dropout_is_drawn_again_for_the_backward_pass(ranks) -> None:
    results = ranks(2, jobs.dropout)
    for mean, analytic, difference in results:
        assert mean == pytest.approx(1.0, abs=0.05)  # kept ones are scaled up
        assert analytic == pytest.approx(difference, rel=1e-6)
    assert any(mean != 1.0 for mean, _, _ in results)


def test_sizes_that_do_not_fit(ranks) -> None:
    for messages in ranks(2, jobs.wrong_sizes):
        assert messages[0].startswith("ConfigError: q is [3, 2, 8], must be [4, heads, head size]")
        assert "do not fit" in messages[1] and "do not fit" in messages[2]
        assert messages[3] == "ConfigError: the plan is for 4 ranks, the group has 2"
