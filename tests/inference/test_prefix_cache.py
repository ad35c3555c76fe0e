"""Requests that begin alike share keys and values, and get what they get without."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.lazy import needs

needs("megatron.core", "transformers")

from tests.inference import continuous_batching_ranks
from tests.support.tiny import CASES, VOCAB

SETUP = "tests.support.warm"
# One of each kind of attention and of positions; families of the same kind are weekly.
DAILY = (
    *("llama2-gqa", "mistral-window", "deepseek-v3", "bloom", "baichuan2-13b", "phi4-mini"),
    *("smollm3", "gemma3", "minimax-m2", "gpt-oss", "llama4", "qwen3.5"),
)
PROMPT = [random.Random(4).randrange(1, VOCAB) for _ in range(44)]
NOT_SHARED = {
    "qwen3-next": "gated delta nets",
    "qwen3.5": "gated delta nets",
    "qwen3.5-moe": "gated delta nets",
    "phi4-mini": "rotary embedding",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    known = {}

    def of(name):
        if name not in known:
            known[name] = str(tmp_path_factory.mktemp(name))
            continuous_batching_ranks.saved_family(name, known[name])
        return known[name]

    return of


def check(found):
    without, cached = found["without"], found["with"]
    for one, other in zip(without["answers"], cached["answers"], strict=True):
        assert one["tokens"] == other["tokens"] and len(one["tokens"]) == 6
        for a, b in zip(one["scores"], other["scores"], strict=True):
            assert a.sampled == pytest.approx(b.sampled, abs=1e-6, rel=1e-6)
    # What is shared ends with a whole block of 16; the answer to the first one is shared, too.
    assert [answer["cached"] for answer in cached["answers"]] == [0, 32, 48, 32]
    assert without["computed"] == [44, 40, 53, 44]
    assert cached["computed"] == [44, 8, 5, 12]


@pytest.mark.weekly_cases(*(name for name in CASES if name not in DAILY))
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", [*DAILY, *(name for name in CASES if name not in DAILY)])
def test_answers_are_those_without_the_cache_in_every_family(ranks, folder, name):
    args = (continuous_batching_ranks.sharing, folder(name), (1, 1), PROMPT)
    (found,) = ranks(1, *args, setup=SETUP)
    if name in NOT_SHARED:
        assert NOT_SHARED[name] in found["reason"]
        assert found["without"]["answers"][0]["tokens"] == found["alone"]
    else:
        check(found)


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
def test_both_kinds_of_layers_go_on_from_kept_states(ranks, implementation):
    args = (continuous_batching_ranks.resumed, implementation, torch.tensor([PROMPT[:30]]), 13)
    ((whole, rest),) = ranks(1, *args, setup=SETUP)
    assert whole.shape[1] == 17
    torch.testing.assert_close(rest, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"), [("llama2-gqa", (2, 2)), ("deepseek-v3", (2, 1)), ("gpt-oss", (1, 2))]
)
def test_every_rank_shares_its_part(ranks, folder, name, layout):
    args = (continuous_batching_ranks.sharing, folder(name), layout, PROMPT)
    for found in ranks(layout[0] * layout[1], *args, setup=SETUP):
        check(found)


def test_bytes_are_bounded_and_the_least_recent_go_first(ranks, folder):
    other = [token + 1 for token in PROMPT]
    # 2 layers x (k, v) x 2 heads x 8 channels in fp32, 16 tokens
    block = 2 * 2 * 2 * 8 * 4 * 16
    args = (continuous_batching_ranks.bounded, folder("llama2-gqa"))
    prompts = [PROMPT, other, PROMPT, other]
    (roomy,) = ranks(1, *args, prompts, 7 * block, setup=SETUP)
    assert roomy == [(0, 3 * block), (0, 6 * block), (32, 6 * block), (32, 6 * block)]
    (small,) = ranks(1, *args, prompts, 4 * block, setup=SETUP)
    assert [size for _, size in small] == [3 * block, 4 * block, 4 * block, 4 * block]
    # Of the first one the beginning is left, which is of use alone.
    assert [cached for cached, _ in small][:3] == [0, 0, 16]
    (whole,) = ranks(1, *args, [PROMPT[:32]] * 2, 7 * block, setup=SETUP)
    assert [cached for cached, _ in whole] == [0, 16]  # the last token's logits are needed
    (none,) = ranks(1, *args, prompts, block - 1, setup=SETUP)
    assert none == [(0, 0)] * 4
