"""An unmodified ``pretrain_gpt.py`` prints the same digits with ``--use-nanopipe`` as without."""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import MOE, TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

JOB = (
    f"{MOE} {TRAINING} --transformer-impl local --bf16 --hidden-dropout 0.1 "
    "--attention-dropout 0.1 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1"
)


def test_printed_losses_are_those_of_megatrons_schedule(tmp_path):
    """Experts of the local spec in bf16, with dropout."""
    plain = pretrain(tmp_path, 2, *JOB.split())
    ours = pretrain(tmp_path, 2, *JOB.split(), "--use-nanopipe")
    assert ours.losses == plain.losses
    assert ours.grad_norms == plain.grad_norms
