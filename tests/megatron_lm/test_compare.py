"""``--record`` in an unmodified ``pretrain_gpt.py`` plus the import line."""

from __future__ import annotations

import shlex

import pytest

from tests.megatron_lm.launch import pretrain
from tests.support.trainer_job import TINY, train

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

SCRIPT_ONLY = shlex.split(
    "--max-position-embeddings 64 --eval-iters 0 --eval-interval 10 --distributed-backend gloo "
    "--group-query-attention --num-workers 0"
)
STEPS = shlex.split("--train-iters 2")


def test_the_script_and_our_trainer_record_the_same_tensors(tmp_path, ranks):
    from mindspeed.compare.recording import read
    from mindspeed.compare.walk import compare
    from tests.support.trainer_job import SETUP

    theirs, ours = tmp_path / "script", tmp_path / "trainer"
    pretrain(tmp_path, 2, *TINY, *SCRIPT_ONLY, *STEPS, "--record", str(theirs))
    flags = [*STEPS, "--group-query-attention", "--record", str(ours)]
    assert ranks(2, train, flags, setup=SETUP, backend=None)[0]["error"] is None
    result = compare(read(theirs), read(ours))
    assert result.equal, result.first
    assert not result.before and not result.only
    assert len(result.rows) > 550
