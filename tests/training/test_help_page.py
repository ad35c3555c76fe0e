"""``--help`` of training fits on one page; ``--help-all`` has every flag and finds a word."""

from __future__ import annotations

import re

import pytest

from tests.support.trainer_job import SETUP
from tests.training.raw_data_job import helped

SPELLING = re.compile(r"^  (?:-h, )?(--[\w-]+)", re.M)


@pytest.fixture(scope="module")
def texts(rank_pool) -> dict[str, str]:
    words = ["--help", "--help-all", "--help-all recompute", "--help-all xyzzy"]
    return rank_pool.run(1, helped, words, setup=SETUP, backend=None, timeout=120)[0]


@pytest.mark.slow
def test_the_page_has_the_usual_flags_in_few_lines(texts):
    page = texts["--help"]
    flags = SPELLING.findall(page)
    assert len(flags) == len(set(flags)) > 40
    assert {"--load", "--data", "--tensor-model-parallel-size", "--lora-r"} <= set(flags)
    assert len(page.splitlines()) < 130
    assert set(flags) <= set(SPELLING.findall(texts["--help-all"]))
    count = int(re.search(r"There are (\d+) flags", page)[1])
    assert count >= len(set(SPELLING.findall(texts["--help-all"]))) > 500


@pytest.mark.slow
def test_a_page_has_the_flags_of_its_own_objective(rank_pool):
    def flags(command: str) -> set[str]:
        call = helped, ["--help"], command
        text = rank_pool.run(1, *call, setup=SETUP, backend=None, timeout=120)[0]["--help"]
        assert len(text.splitlines()) < 145
        return set(SPELLING.findall(text))

    plain, dpo, reward = (flags(name) for name in ("finetune", "dpo", "reward"))
    assert dpo - plain >= {"--loss-type", "--beta", "--precompute-reference"}
    assert reward - plain == {"--center-rewards-coefficient"} and plain <= dpo & reward


@pytest.mark.slow
def test_flags_with_a_word_are_found_in_names_and_descriptions(texts):
    found = set(SPELLING.findall(texts["--help-all recompute"]))
    assert "--recompute-granularity" in found  # by its name
    assert "--checkpoint-activations" in found  # by its description
    assert "--lr" not in found and len(found) < 60
    assert texts["--help-all xyzzy"] == "no flag has 'xyzzy'\n"
