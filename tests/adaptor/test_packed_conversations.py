"""The repair of Megatron-LM's packed conversations: the defect without it, and with it."""

from __future__ import annotations

import math
import types
from functools import partial

import pytest
import torch

from mindspeed.adaptor.repairs.data import packed_conversations as repair
from tests.adaptor import conversation_ranks


def test_a_conversation_may_fill_the_sequence():
    def truncated(self, idx):
        tokens = [5, 6]
        tokens.extend(self.config.tokenizer.pad)
        return tokens + [self.config.tokenizer.pad] * 2 + [self.config.tokenizer.eod]

    config = types.SimpleNamespace(tokenizer=conversation_ranks.Tokenizer())
    data = types.SimpleNamespace(config=config)
    with pytest.raises(TypeError):
        truncated(data, 0)
    assert repair.truncate(truncated)(data, 0) == [5, 6, 0, 0, 0, 1]
    assert torch.tensor([0, 5]).eq(repair._Padding(0)).tolist() == [True, False]


def test_a_micro_batch_without_targets_does_not_end_an_evaluation():
    """Megatron-LM takes the mean of the losses of micro-batches."""

    def evaluate(forward_step):
        reports = [step(torch.ones(()))[-1]["loss"] for _, step in map(forward_step, (0, 1))]
        values = torch.vstack(reports)
        return float((values[:, 0] / values[:, 1]).mean())

    def loss(number, output, non_loss_data=False):
        return (
            {} if non_loss_data else (output, number, {"loss": torch.tensor([6.0, 2.0]) * number})
        )

    def forward_step(number):
        return torch.ones(()), partial(loss, number)

    assert math.isnan(evaluate(forward_step))
    assert repair.divide_by_one_at_least(evaluate)(forward_step) == 1.5
    _, step = repair._with_targets(forward_step)(0)
    assert step(torch.ones(()), non_loss_data=True) == {}


@pytest.mark.megatron_lm
@pytest.mark.slow
def test_conversations_of_megatron_lm_are_cut(ranks, megatron_lm):
    texts = ["abc", "abcdefgh", "abcdefghijkl"]
    samples = conversation_ranks.samples_of_megatron
    (found,) = ranks(1, samples, str(megatron_lm), texts, timeout=120)
    for text, sample in zip(texts, found, strict=True):
        tokens = ([*map(ord, text), 1] + [0] * 8)[:8]
        assert sample["tokens"].tolist() == tokens
        assert sample["labels"].tolist() == [*tokens[1:], 0]
        assert sample["cu_seqlens"].tolist() == [0, 8]


@pytest.mark.megatron_lm
@pytest.mark.slow
def test_inner_stages_of_megatron_lm_know_the_borders(ranks, megatron_lm):
    read = conversation_ranks.documents_of_stages
    found = ranks(3, read, str(megatron_lm), True, timeout=120)
    assert found == [[0, 3, 8]] * 3
    found = ranks(3, read, str(megatron_lm), False, timeout=120)
    assert found == [[[0, 3, 8]], [], [[0, 3, 8]]]
