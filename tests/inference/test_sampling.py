"""The filtered distribution against Hugging Face, and draws against the distribution."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.inference.sampling import SamplingOptions, choose, next_token_probabilities


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
    drawn = choose(logits, options, [torch.Generator().manual_seed(1)] * len(logits))
    observed = drawn.bincount(minlength=4).double()
    expected = next_token_probabilities(logits[:1], options)[0].double() * len(drawn)
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # 0.1 % point at 3 degrees of freedom


def test_greedy_takes_the_largest_logit():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.5, 0.1, 0.2]])
    chosen = choose(logits, SamplingOptions(greedy=True), [])
    assert chosen.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"temperature": 0.0}, "--temperature 0.0.*--greedy"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.1}, "--top-p 1.1"),
    ],
)
def test_impossible_options_name_the_flag(values, flag):
    with pytest.raises(ConfigError, match=flag):
        SamplingOptions(**values)
