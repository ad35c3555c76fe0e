"""``--unaligned-linear`` with an unmodified ``pretrain_gpt.py``."""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 171 --num-attention-heads 10 "
    "--kv-channels 8 --group-query-attention --num-query-groups 5 --swiglu --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --position-embedding-type rope "
    "--seq-length 63 --max-position-embeddings 63 --attention-dropout 0 --hidden-dropout 0 "
    "--make-vocab-size-divisible-by 256 --use-cpu-initialization "
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist"
)
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --unaligned-linear"
STAGES = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"


def test_losses_and_checkpoints_are_those_of_one_rank(tmp_path):
    """Two iterations on two ranks, from their own initial weights; the others in other layouts."""

    def run(ranks, flags):
        return pretrain(tmp_path, ranks, *f"{MODEL} {TRAINING} {flags}".split())

    plain = run(1, "")
    where = tmp_path / "saved"
    first = run(2, f"{TENSOR} --save {where} --save-interval 2 --exit-interval 2")
    assert "query groups 3, 2 (largest / mean 1.20); MLP channels 86, 85" in first.output
    assert first.losses[0] == pytest.approx(plain.losses[0], rel=2e-6)
    for ranks, flags in ((1, ""), (4, f"{TENSOR} {STAGES}")):
        rest = run(ranks, f"--load {where} {flags}")
        assert rest.losses == pytest.approx(plain.losses[2:], rel=2e-6)
        assert rest.grad_norms == pytest.approx(plain.grad_norms[2:], rel=1e-3)
