"""Adapters whose parameters are gathered while layers compute train as with gathered ones."""

from __future__ import annotations

import pytest

from tests.training.one_rank import column
from tests.training.test_layouts import MOE


@pytest.mark.slow
def test_overlapped_parameter_gather(one_rank):
    lora = "--lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1 --lr 0.05"
    distributed = f"{lora} --use-distributed-optimizer"
    reference = one_rank(MOE)
    expected = reference.train(2, distributed)
    records = reference.train(2, f"{distributed} --overlap-grad-reduce --overlap-param-gather")
    assert column(records, "lm_loss") == pytest.approx(column(expected, "lm_loss"), rel=1e-6)
