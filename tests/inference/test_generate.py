"""Generation under TP and PP against full forward passes of the unsplit model."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import needs

needs("megatron.core")

from mindspeed.inference.decoder import Decoder
from mindspeed.inference.generate import ModelParallelGroups, generate, stream
from mindspeed.inference.sampling import SamplingOptions
from tests.inference import tiny_gpt

SETUP = "tests.support.warm"
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
NEW_TOKENS = 12


def generated(tp, pp, implementation, prompts, options, eod=None):
    model = tiny_gpt.build(tp, pp, implementation)
    groups = ModelParallelGroups.of_megatron()
    return generate(model, prompts, options, groups=groups, vocab_size=tiny_gpt.VOCAB, eod=eod)


def greedy_by_full_passes(prompts, new_tokens):
    """Argmax over a full forward pass for every token, and how clear each decision was."""
    model = tiny_gpt.build(1, 1, "local")
    output, margins = [], []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(new_tokens):
            logits = tiny_gpt.logits_of_full_pass(model, torch.tensor([tokens]))[0, -1]
            best = logits.topk(2).values
            margins.append(float(best[0] - best[1]))
            tokens.append(int(logits.argmax()))
        output.append(tokens[len(prompt) :])
    return output, min(margins)


@pytest.fixture(scope="module")
def truth(rank_pool):
    output, margin = rank_pool.run(1, greedy_by_full_passes, PROMPTS, NEW_TOKENS, setup=SETUP)[0]
    assert margin > 1e-4  # otherwise rounding could decide and equality would prove nothing
    return output


@pytest.mark.weekly_cases("1-2-local", "2-2-transformer_engine", "1-4-local")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
def test_greedy_equals_argmax_of_full_passes(ranks, truth, tp, pp, implementation):
    options = SamplingOptions(max_new_tokens=NEW_TOKENS, greedy=True)
    results = ranks(tp * pp, generated, tp, pp, implementation, PROMPTS, options, setup=SETUP)
    assert all(result == truth for result in results)  # every rank has the text


def test_replicas_of_the_model_generate_the_same(ranks, truth):
    options = SamplingOptions(max_new_tokens=NEW_TOKENS, greedy=True)
    results = ranks(4, generated, 1, 2, "local", PROMPTS, options, setup=SETUP)
    assert all(result == truth for result in results)


def test_a_batch_gives_what_each_prompt_gives_alone(ranks, truth):
    options = SamplingOptions(max_new_tokens=NEW_TOKENS, greedy=True)
    for prompt, expected in zip(PROMPTS, truth, strict=True):
        assert ranks(1, generated, 1, 1, "local", [prompt], options, setup=SETUP)[0] == [expected]


@pytest.mark.slow
def test_sampled_text_depends_on_the_seed_and_not_on_the_layout(ranks):
    def run(tp, pp, seed):
        options = SamplingOptions(NEW_TOKENS, temperature=0.9, top_k=40, top_p=0.95, seed=seed)
        return ranks(tp * pp, generated, tp, pp, "local", PROMPTS, options, setup=SETUP)

    expected = run(1, 1, seed=3)[0]
    assert run(2, 2, seed=3) == [expected] * 4
    assert run(1, 1, seed=4)[0] != expected


def test_the_end_token_stops_its_row_only_and_is_not_returned(ranks, truth):
    eod = truth[1][3]
    options = SamplingOptions(max_new_tokens=NEW_TOKENS, greedy=True)
    result = ranks(2, generated, 1, 2, "local", PROMPTS, options, eod, setup=SETUP)[0]
    assert result == [row[: row.index(eod)] if eod in row else row for row in truth]
    assert len(result[1]) <= 3


def streamed(prompts, options):
    model = tiny_gpt.build(1, 1, "local")
    groups = ModelParallelGroups.of_megatron()
    return list(stream(model, prompts, options, groups=groups, vocab_size=tiny_gpt.VOCAB))


def test_stream_yields_each_token_once_and_longer_prompts_start_later(ranks, truth):
    options = SamplingOptions(max_new_tokens=NEW_TOKENS, greedy=True)
    steps = ranks(1, streamed, PROMPTS, options, setup=SETUP)[0]
    assert list(steps[0]) == [1]  # the shortest prompt begins
    rows = [[step[row] for step in steps if row in step] for row in range(len(PROMPTS))]
    assert rows == truth


def padded_model_output():
    """Sampling must never choose a padded vocabulary entry, however likely the model finds it."""
    model = tiny_gpt.build(1, 1, "local")
    with torch.no_grad():
        model.output_layer.weight[tiny_gpt.VOCAB :] = 100 * model.output_layer.weight[0]
        model.output_layer.weight[tiny_gpt.VOCAB + 1 :] *= -1
    groups = ModelParallelGroups.of_megatron()
    options = SamplingOptions(20, temperature=5.0)
    return generate(model, PROMPTS, options, groups=groups, vocab_size=tiny_gpt.VOCAB)


def test_padded_vocabulary_entries_are_never_chosen(ranks):
    output = ranks(1, padded_model_output, setup=SETUP)[0]
    assert max(map(max, output)) < tiny_gpt.VOCAB


def refused(prompts):
    model = tiny_gpt.build(1, 1, "local")
    model.position_embedding_type = "learned_absolute"
    options = SamplingOptions(max_new_tokens=tiny_gpt.MAX_LENGTH - 2)
    groups = ModelParallelGroups.of_megatron()
    try:
        generate(model, prompts, options, groups=groups, vocab_size=tiny_gpt.VOCAB)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "every prompt needs at least one token"),
        ([[1], []], "every prompt needs at least one token"),
        ([[tiny_gpt.VOCAB]], "outside the vocabulary of 90"),
        ([[1, 2, 3]], "49 tokens long, the model has 48 learned positions"),
        ([[1, 2]], "accepted"),
    ],
)
def test_bad_prompts_are_refused_before_the_model_runs(ranks, prompts, message):
    assert message in ranks(1, refused, prompts, setup=SETUP)[0]


def passes(tp, pp, recompute):
    """Tokens per row of every pass of this stage's first layer, and bytes of its cache."""
    model = tiny_gpt.build(tp, pp)
    seen = []
    layer = model.decoder.layers[0]
    layer.register_forward_pre_hook(lambda *call: seen.append(_length(call)), with_kwargs=True)
    decoder = Decoder(model, ModelParallelGroups.of_megatron(), 2, 24, recompute)
    with torch.inference_mode():
        for length in (10, 1, 1, 1):
            decoder(torch.ones(2, length, dtype=torch.long))
    return seen, decoder.cache_bytes


def _length(call):
    _, inputs, options = call
    return (options.get("hidden_states") if not inputs else inputs[0]).shape[0]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_a_new_token_costs_one_token_and_the_cache_is_shared_by_all_ranks(ranks, tp, pp):
    layers, rows, length, kv_heads, head_size, bytes_per_number = 4, 2, 24, 2, 8, 4
    whole = 2 * layers * rows * length * kv_heads * head_size * bytes_per_number
    results = ranks(tp * pp, passes, tp, pp, False, setup=SETUP)
    assert results == [([10, 1, 1, 1], whole // (tp * pp))] * (tp * pp)


def test_recomputing_runs_the_whole_text_for_every_token(ranks):
    assert ranks(1, passes, 1, 1, True, setup=SETUP) == [([10, 11, 12, 13], 0)]


def selected(tp, pp, recompute):
    """Logits after rows were repeated, exchanged and dropped."""
    model = tiny_gpt.build(tp, pp)
    decoder = Decoder(model, ModelParallelGroups.of_megatron(), 2, 12, recompute)
    found = []
    with torch.inference_mode():
        decoder(torch.tensor([[3, 4, 5], [6, 7, 8]]))
        decoder.select(torch.tensor([0, 0, 1]))
        decoder(torch.tensor([[9], [10], [11]]))
        decoder.select(torch.tensor([2, 1, 1]))
        found.append(decoder(torch.tensor([[12], [13], [14]])))
        decoder.select(torch.tensor([2]))
        found.append(decoder(torch.tensor([[15]])))
    return found


def test_the_kv_cache_follows_reordered_sequences(ranks):
    expected = ranks(1, selected, 1, 1, True, setup=SETUP)[0]
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        found = ranks(tp * pp, selected, tp, pp, False, setup=SETUP)[-1]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
