"""Products that overlap with their collectives, with an unmodified ``pretrain_gpt.py``."""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import LOCAL, MODEL, TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

TENSOR = "--tensor-model-parallel-size 2"
SEQUENCE = f"{TENSOR} --sequence-parallel"
# Flags of a run, and those that are added to it.
CASES = {
    "coc, all-reduce, local spec": (f"{LOCAL} {TENSOR}", ["--use-ascend-coc --coc-parallel-num 8"]),
    "Megatron's flag, mc2, half batches": (
        f"{MODEL} {SEQUENCE} --overlap-grad-reduce",
        [
            "--tp-comm-overlap",
            "--use-ascend-mc2",
            "--half-batch-overlap --micro-batch-size 2",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_printed_losses_are_those_of_a_run_without_it(tmp_path, case):
    given, added = CASES[case]
    base = f"{given} {TRAINING}".split()
    plain = pretrain(tmp_path, 2, *base)
    for flags in added:
        ours = pretrain(tmp_path, 2, *base, *flags.split())
        assert ours.losses == pytest.approx(plain.losses, rel=2e-6)
        assert ours.grad_norms == pytest.approx(plain.grad_norms, rel=1e-3)
