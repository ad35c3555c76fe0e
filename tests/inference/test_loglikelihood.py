"""Log-probabilities under TP and PP against log_softmax of the unsplit model."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import needs

needs("megatron.core")

from mindspeed.inference.generate import ModelParallelGroups
from mindspeed.inference.loglikelihood import loglikelihood
from tests.inference import tiny_gpt

SETUP = "tests.support.warm"
PAIRS = [
    ([5, 6, 7, 8, 9], [10]),
    ([5, 6, 7, 8, 9], [11]),  # shares its row with the one above
    ([12], [13, 14, 15]),
    (list(range(20, 40)), [1, 2]),
    ([3, 4], list(range(40, 60))),
]


def scored(tp, pp, implementation, pairs, tokens_per_batch):
    """Scores, and the shapes of all forward passes of this rank."""
    model = tiny_gpt.build(tp, pp, implementation)
    shapes = []
    model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    groups = ModelParallelGroups.of_megatron()
    options = {"vocab_size": tiny_gpt.VOCAB, "tokens_per_batch": tokens_per_batch}
    return loglikelihood(model, pairs, groups=groups, **options), shapes


def scores_by_definition(pairs):
    model = tiny_gpt.build(1, 1, "local")
    output = []
    for context, continuation in pairs:
        tokens = torch.tensor([[*context, *continuation]])
        logprobs = tiny_gpt.logits_of_full_pass(model, tokens)[0].double().log_softmax(-1)
        steps = logprobs[len(context) - 1 : -1]
        total = sum(float(step[token]) for step, token in zip(steps, continuation, strict=True))
        greedy = steps.argmax(-1).tolist() == list(continuation)
        output.append((total, greedy, steps.argmax(-1).tolist()))
    return output


@pytest.fixture(scope="module")
def truth(rank_pool):
    return rank_pool.run(1, scores_by_definition, PAIRS, setup=SETUP)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp", "implementation"),
    [
        (1, 1, "local"),
        (1, 1, "transformer_engine"),
        (2, 1, "local"),
        (1, 2, "transformer_engine"),
        (2, 2, "transformer_engine"),
    ],
)
def test_scores_equal_the_definition_on_every_rank(ranks, truth, tp, pp, implementation):
    results = ranks(tp * pp, scored, tp, pp, implementation, PAIRS, 40, setup=SETUP)
    for scores, _ in results:
        for (logprob, greedy), (expected, expected_greedy, _) in zip(scores, truth, strict=True):
            assert logprob == pytest.approx(expected, abs=1e-4)
            assert greedy is expected_greedy


def test_the_models_own_choices_are_greedy_and_no_others(ranks, rank_pool, truth):
    """Continue each context with what the model finds likeliest, step by step."""
    context, _ = PAIRS[0]
    own = truth[0][2]
    second = rank_pool.run(1, scores_by_definition, [([*context, *own], [0])], setup=SETUP)[0]
    both = [*own, second[0][2][0]]
    pairs = [(context, both), (context, [*own, (both[1] + 1) % tiny_gpt.VOCAB])]
    scores = ranks(2, scored, 2, 1, "local", pairs, 4096, setup=SETUP)[0][0]
    assert [greedy for _, greedy in scores] == [True, False]


def test_single_token_continuations_share_a_sequence(ranks):
    context = [1, 2, 3, 4]
    pairs = [(context, [token]) for token in (10, 11, 12, 13)]
    scores, shapes = ranks(1, scored, 1, 1, "local", pairs, 4096, setup=SETUP)[0]
    assert shapes == [(1, 4)]
    assert len({logprob for logprob, _ in scores}) == 4


def test_batches_respect_the_token_limit_and_a_long_row_goes_alone(ranks):
    pairs = [(list(range(length)), [1]) for length in (30, 9, 8, 10, 2)]
    _, shapes = ranks(1, scored, 1, 1, "local", pairs, 20, setup=SETUP)[0]
    assert shapes == [(1, 30), (2, 10), (2, 8)]


def padded_vocabulary():
    """All probability that the model gives to padded entries must go to real ones."""
    model = tiny_gpt.build(1, 1, "local")
    with torch.no_grad():
        model.output_layer.weight[tiny_gpt.VOCAB :] = 100 * model.output_layer.weight[0]
    groups = ModelParallelGroups.of_megatron()
    pairs = [([1, 2, 3], [token]) for token in range(tiny_gpt.VOCAB)]
    return loglikelihood(model, pairs, groups=groups, vocab_size=tiny_gpt.VOCAB)


def test_padded_vocabulary_entries_have_no_probability(ranks):
    scores = ranks(1, padded_vocabulary, setup=SETUP)[0]
    assert sum(torch.tensor(p).exp() for p, _ in scores) == pytest.approx(1.0, abs=1e-5)
    assert sum(greedy for _, greedy in scores) == 1


def refused(pairs):
    model = tiny_gpt.build(1, 1, "local")
    model.position_embedding_type = "learned_absolute"
    try:
        loglikelihood(
            model, pairs, groups=ModelParallelGroups.of_megatron(), vocab_size=tiny_gpt.VOCAB
        )
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([([], [1])], "at least one token each"),
        ([([1], [])], "at least one token each"),
        ([([1], [tiny_gpt.VOCAB])], "ids outside the vocabulary of 90"),
        ([([1] * tiny_gpt.MAX_LENGTH, [1, 1])], "49 tokens long, the model has 48 learned"),
        ([([1] * tiny_gpt.MAX_LENGTH, [1])], "accepted"),
        ([], "accepted"),
    ],
)
def test_bad_pairs_are_refused(ranks, pairs, message):
    assert message in ranks(1, refused, pairs, setup=SETUP)[0]
