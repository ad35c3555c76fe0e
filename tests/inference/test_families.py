"""Greedy and beam search of every family against transformers' ``generate``, token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.lazy import needs

needs("megatron.core", "transformers")

from tests.inference import family_ranks
from tests.inference.family_ranks import GREEDY
from tests.support.tiny import CASES, VOCAB

SETUP = "tests.support.warm"
# Longer than the sliding window; of different lengths, so that a batch is ragged.
PROMPTS = [[5, 17, 8, 33, 61, 9, 70], [11, 2, 90]]
BEAMS = replace(GREEDY, num_beams=4, num_return_sequences=3)


def use_explicit_mask(model):
    """ALiBi through LLaMA's class: its mask is made for the length of every pass."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    forward, heads = model.forward, model.config.num_attention_heads

    def with_bias(input_ids, **unused):
        rows, length = input_ids.shape
        bias = build_alibi_tensor(torch.ones(rows, length), heads, torch.float32)
        hidden = torch.full((length, length), -1e30).triu(1)
        mask = hidden + bias.view(rows, heads, 1, length)
        return forward(input_ids, attention_mask=mask, use_cache=False)

    model.forward = with_bias
    model.generation_config.use_cache = False


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """``oracle(name)``: directory of the tiny model, and the model for transformers' generate."""
    known = {}

    def get(name):
        if name not in known:
            case, folder = CASES[name], tmp_path_factory.mktemp(name)
            model = case.model().eval()
            case.save(model, folder)
            if case.inputs(model):
                use_explicit_mask(model)
            known[name] = (str(folder), model)
        return known[name]

    return get


def truth(model, options, eos=None):
    """What transformers generates, each prompt alone; without the end token."""
    found = []
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=options.min_new_tokens or None,
            do_sample=False,
            num_beams=options.num_beams,
            num_return_sequences=options.num_return_sequences,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            repetition_penalty=options.repetition_penalty,
            eos_token_id=eos,
            pad_token_id=0,
        )
        rows = [row[len(prompt) :] for row in out.tolist()]
        found.append([row[: row.index(eos)] if eos in row else row for row in rows])
    return found


def ours(ranks, folder, jobs, tp=1, pp=1):
    """Per rank the ids of every job, in the form of :func:`truth`."""
    run = family_ranks.generated
    results = ranks(tp * pp, run, folder, (tp, pp), PROMPTS, jobs, setup=SETUP, timeout=120)
    return [
        [_ids(found, options) for found, (options, _) in zip(result, jobs, strict=True)]
        for result in results
    ]


def _ids(found, options):
    if options.num_beams == 1:
        return [[row] for row in found]
    return [[tokens for tokens, _ in row] for row in found]


# Weekly: families whose layers keep the same states as those of a daily one; tests/models compares
# the logits of all.
@pytest.mark.weekly_cases(
    *(
        "aquila",
        "internlm",
        "internlm2",
        "internlm3",
        "baichuan-7b",
        "baichuan-13b",
        "baichuan2-7b",
    ),
    *("llama3.1-scaling", "llama3.2-tied", "qwen2.5", "qwen3-yarn", "seed-oss", "ernie4.5"),
    *("phi3", "granite", "granite-moe", "hunyuan-moe", "ernie4.5-moe", "glm4-moe", "qwen2-moe"),
    *("mixtral", "qwen3-moe-raw-probabilities", "kimi-k2", "deepseek-v2", "deepseek-v2-lite"),
    *("olmo2", "qwen3.5-moe"),
)
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", CASES)
def test_every_family_generates_as_in_transformers(oracle, ranks, name):
    folder, model = oracle(name)
    greedy = truth(model, GREEDY)
    eos = greedy[0][0][3]
    jobs = [(GREEDY, None), (BEAMS, [eos])]
    assert ours(ranks, folder, jobs) == [[greedy, truth(model, BEAMS, eos)]]


VARIANTS = {
    "short": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "long": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 2.0},
    "against-length": {"num_beams": 3, "length_penalty": -1.0},
    "early": {"num_beams": 3, "early_stopping": True},
    "no-repetition": {"num_beams": 3, "repetition_penalty": 1.7},
    "greedy-no-repetition": {"repetition_penalty": 1.7},
    "greedy-at-least": {"min_new_tokens": 6},
    "beams-at-least": {"num_beams": 3, "min_new_tokens": 6},
    "without-cache": {"recompute": True},
    "beams-without-cache": {"num_beams": 2, "num_return_sequences": 2, "recompute": True},
}


def test_penalties_and_limits_mean_what_they_mean_in_transformers(oracle, ranks):
    folder, model = oracle("llama2-gqa")
    eos = truth(model, GREEDY)[0][0][3]
    variants = {key: replace(GREEDY, **values) for key, values in VARIANTS.items()}
    jobs = [(options, [eos]) for options in variants.values()]
    (results,) = ours(ranks, folder, jobs)
    expected = {key: truth(model, options, eos) for key, options in variants.items()}
    assert dict(zip(variants, results, strict=True)) == expected
    assert len({str(value) for value in expected.values()}) > 5  # the variants do differ


@pytest.mark.weekly_cases("llama2-gqa-2-2", "llama2-gqa-2-1", "baichuan2-13b-2-1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("llama2-gqa", 2, 1),
        ("llama2-gqa", 2, 2),
        ("llama3.2-tied", 1, 2),
        ("baichuan2-13b", 2, 1),
        ("deepseek-v3", 1, 2),
        ("mixtral", 2, 1),
        ("mistral-window", 1, 2),
    ],
)
def test_the_layout_changes_nothing(oracle, ranks, name, tp, pp):
    folder, model = oracle(name)
    greedy = truth(model, GREEDY)
    beams = replace(BEAMS, num_beams=3)
    eos = greedy[0][0][3]
    sampled = replace(GREEDY, greedy=False, num_return_sequences=2, top_k=20)
    beams_sampled = replace(sampled, num_beams=3)
    jobs = [(GREEDY, None), (beams, [eos]), (sampled, None), (beams_sampled, [eos])]
    (alone,) = ours(ranks, folder, jobs)
    assert alone[:2] == [greedy, truth(model, beams, eos)]
    assert ours(ranks, folder, jobs, tp, pp) == [alone] * (tp * pp)


@pytest.mark.parametrize("name", ["llama2-gqa", "mistral-window", "bloom", "deepseek-v3"])
def test_logits_with_the_cache_equal_those_without(oracle, ranks, name):
    folder, _ = oracle(name)
    tokens = torch.randint(VOCAB, (2, 14), generator=torch.Generator().manual_seed(3))
    run = family_ranks.logits_both_ways
    cached, recomputed = ranks(1, run, folder, tokens, 6, setup=SETUP)[0]
    assert cached.shape == (9, 2, VOCAB)
    torch.testing.assert_close(cached, recomputed, rtol=1e-5, atol=1e-5)
