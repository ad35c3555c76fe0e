"""``--use-nanopipe`` with an unmodified ``pretrain_gpt.py``, in fp32 and bf16, with dropout."""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import LOCAL, MOE, TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

PIPELINE = "--pipeline-model-parallel-size 2"
CHUNKS = f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
CASES = {
    "one chunk, local spec": (f"{LOCAL} {PIPELINE}", ""),
    "experts, bf16, swap": (f"{MOE} {CHUNKS} --bf16", "--use-nanopipe-swap"),
}


@pytest.mark.parametrize("case", CASES)
def test_printed_losses_are_those_of_megatrons_schedule(tmp_path, case):
    given, added = CASES[case]
    base = f"{given} {DROPOUT} {TRAINING}".split()
    plain = pretrain(tmp_path, 2, *base)
    ours = pretrain(tmp_path, 2, *base, "--use-nanopipe", *added.split())
    assert ours.losses == plain.losses
    assert ours.grad_norms == plain.grad_norms
