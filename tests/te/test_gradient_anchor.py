"""An anchor takes the weight gradients of experts, unless they are computed elsewhere."""

from __future__ import annotations

import pytest

from tests.support.lazy import needs
from tests.te import gradient_anchor_job as job

needs("megatron.core")


@pytest.mark.parametrize(
    ("delayed", "divided", "taken"),
    [(False, None, True), (False, False, True), (False, True, False), (True, None, False)],
    ids=["at once", "whole backward", "divided backward", "delayed"],
)
def test_which_weights_are_taken(ranks, delayed, divided, taken):
    ((names, inside, after),) = ranks(1, job.taken, delayed, divided, setup="tests.support.warm")
    assert names == (["0.weight0", "0.weight1"] if taken else [])
    assert inside is taken
    assert not after
