"""The filtered distribution against Hugging Face, and draws against the distribution."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.inference.beam_search import BeamSearch
from mindspeed.inference.sampling import (
    SamplingOptions,
    filter_scores,
    generator_of,
    next_token_probabilities,
    process_logits,
    sample_tokens,
)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.8), (20, 0.6), (3, 0.01)])
def test_probabilities_equal_those_of_hugging_face(temperature, top_k, top_p):
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    expected = transformers.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = transformers.TopKLogitsWarper(top_k)(None, expected)
    expected = transformers.TopPLogitsWarper(top_p)(None, expected).softmax(-1)
    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p)
    torch.testing.assert_close(next_token_probabilities(logits, options), expected)


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(20_000, 1)
    options = SamplingOptions(temperature=1.5)
    drawn = sample_tokens(logits, options, [torch.Generator().manual_seed(1)] * len(logits))
    observed = drawn.bincount(minlength=4).double()
    expected = next_token_probabilities(logits[:1], options)[0].double() * len(drawn)
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # 0.1 % point at 3 degrees of freedom


def test_greedy_takes_the_largest_logit():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.5, 0.1, 0.2]])
    chosen = sample_tokens(logits, SamplingOptions(greedy=True), [])
    assert chosen.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"temperature": 0.0}, "--temperature 0.0.*--greedy"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.1}, "--top-p 1.1"),
        ({"num_beams": 0}, "--num-beams 0"),
        ({"num_return_sequences": 0}, "--num-return-sequences 0"),
        ({"logprobs": -1}, "--logprobs -1"),
    ],
)
def test_impossible_options_name_the_flag(values, flag):
    with pytest.raises(ConfigError, match=flag):
        SamplingOptions(**values)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.01), (1, 1.0), (5, 0.7)])
def test_beams_keep_two_tokens_as_in_hugging_face(top_k, top_p):
    transformers = pytest.importorskip("transformers")
    scores = torch.randn(5, 50, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    expected = scores
    if top_k:
        expected = transformers.TopKLogitsWarper(top_k, min_tokens_to_keep=2)(None, expected)
    if top_p < 1:
        expected = transformers.TopPLogitsWarper(top_p, min_tokens_to_keep=2)(None, expected)
    kept = filter_scores(scores, SamplingOptions(top_k=top_k, top_p=top_p), at_least=2)
    torch.testing.assert_close(kept, expected)


def test_penalty_and_minimum_length_equal_those_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 20, generator=generator)
    tokens = torch.randint(20, (3, 9), generator=generator)
    options = SamplingOptions(repetition_penalty=1.3, min_new_tokens=4)
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.3)(tokens, logits)
    least = transformers.MinNewTokensLengthLogitsProcessor(6, 4, [7, 9])
    expected = torch.stack([least(tokens[:1], expected[:1])[0], *expected[1:]])
    found = process_logits(
        logits, tokens, options, {9, 7}, [3, 4, 5]
    )  # only the first row is too short
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("at_least", [1, 2])
@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
def test_min_p_is_hugging_faces(min_p, at_least):
    transformers = pytest.importorskip("transformers")
    scores = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    warper = transformers.MinPLogitsWarper(min_p, min_tokens_to_keep=at_least)
    kept = filter_scores(scores, SamplingOptions(min_p=min_p), at_least=at_least)
    torch.testing.assert_close(kept, warper(None, scores))


def test_bias_and_openais_penalties_are_those_of_its_formula():
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence + bias[j], of generated tokens only."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 7, generator=generator)
    tokens = torch.tensor([[1, 1, 2, 2, 2, 5], [0, 0, 3, 3, 6, 6], [4, 4, 4, 4, 4, 4]])
    new_tokens = [4, 1, 0]
    options = SamplingOptions(
        presence_penalty=0.7, frequency_penalty=-0.2, logit_bias=((2, 1.5), (6, -100.0))
    )
    expected = logits.clone()
    for row, count in enumerate(new_tokens):
        generated = tokens[row, 6 - count :].tolist()
        for token in range(7):
            times = generated.count(token)
            expected[row, token] -= times * -0.2 + (times > 0) * 0.7
            expected[row, token] += {2: 1.5, 6: -100.0}.get(token, 0.0)
    before = logits.clone()
    found = process_logits(logits, tokens, options, set(), new_tokens)
    torch.testing.assert_close(found, expected)
    assert torch.equal(logits, before)


def test_sampling_of_a_sequence_does_not_depend_on_its_batch():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(8000, 1)
    options = SamplingOptions(temperature=1.5)
    drawn = sample_tokens(logits, options, [generator_of(5, row) for row in range(len(logits))])
    expected = next_token_probabilities(logits[:1], options)[0].double() * len(drawn)
    observed = drawn.bincount(minlength=4).double()
    assert float(((observed - expected) ** 2 / expected).sum()) < 16.3  # 0.1 %, 3 degrees
    some = sample_tokens(
        logits[:5], options, [generator_of(5, row) for row in (3, 70, 0, 7999, 12)]
    )
    assert some.tolist() == drawn[[3, 70, 0, 7999, 12]].tolist()


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    generators = [torch.Generator().manual_seed(1)] * 2000
    drawn = sample_tokens(logits.repeat(2000, 1), SamplingOptions(), generators)
    assert set(drawn.tolist()) == {1, 3}


def test_beam_sampling_draws_without_replacement():
    """Which two of six tokens continue: against the sum over all orders of four draws."""
    scores = torch.tensor([0.0, 1.5, 0.5, 2.0, 1.0, 0.2]).log_softmax(-1)
    expected: dict[tuple[int, ...], float] = {}
    for order in permutations(range(6), 4):
        probability, left = 1.0, 1.0
        for token in order:
            probability *= float(scores[token].exp()) / left
            left -= float(scores[token].exp())
        pair = tuple(sorted(sorted(order, key=lambda token: -scores[token])[:2]))
        expected[pair] = expected.get(pair, 0.0) + probability
    draws, generator = 4000, torch.Generator().manual_seed(2)
    options = SamplingOptions(num_beams=2)
    observed: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        search = BeamSearch(options, generator=generator)
        tokens, parents = search.advance(scores.repeat(2, 1), scores.repeat(2, 1))
        assert parents == [0, 0]
        pair = tuple(sorted(tokens))
        observed[pair] = observed.get(pair, 0) + 1
    common = [pair for pair, probability in expected.items() if probability * draws >= 5]
    chi_square = sum(
        (observed.get(pair, 0) - expected[pair] * draws) ** 2 / (expected[pair] * draws)
        for pair in common
    )
    assert len(common) >= 5 and sum(expected.values()) == pytest.approx(1)
    assert chi_square < 37.7  # 0.1 % point at 15 degrees of freedom, all pairs there are
