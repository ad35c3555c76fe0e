"""``--guard`` in an unmodified ``pretrain_gpt.py`` plus the import line."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.megatron_lm.launch import pretrain
from tests.support.trainer_job import TINY

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

FLAGS = shlex.split(
    "--max-position-embeddings 64 --eval-iters 0 --eval-interval 10 --distributed-backend gloo "
    "--num-workers 0 --group-query-attention --train-iters 4 --pipeline-model-parallel-size 2"
)
GUARD = ["--guard", "nan,spike,desync,bitflip", "--guard-interval", "2"]


def test_a_guarded_run_is_the_same_run(tmp_path):
    plain = pretrain(tmp_path, 2, *TINY, *FLAGS)
    guarded = pretrain(tmp_path, 2, *TINY, *FLAGS, *GUARD)
    assert guarded.losses == plain.losses and guarded.grad_norms == plain.grad_norms
    assert not re.search(r"guard: step", guarded.output)


def test_a_value_that_is_not_finite_is_traced(tmp_path):
    """A learning rate of 1e30 makes weights, then values, that are not finite."""
    with pytest.raises(AssertionError) as caught:
        pretrain(tmp_path, 2, *TINY, *FLAGS, *GUARD, "--lr", "1e30", "--clip-grad", "0")
    text = str(caught.value)
    found = re.search(
        r"TrainingError: (step \d+ \(iteration \d+\): .* not finite; first: .*)", text
    )
    assert found, text[-3000:]
    assert "operator" in found[1] and "it came again when the step was repeated" in found[1]
