"""Pipelines in unmodified ``pretrain_gpt.py``: other sizes and orders, the same losses.

Micro-batches of different sizes read the samples of equal ones; where lengths may vary, too, stages
learn shapes from headers. Losses to 2e-6, gradient norms as they are printed.
"""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import pretrain

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

FLAGS = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --seq-length 32 --max-position-embeddings 32 "
    "--attention-dropout 0 --hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --split 90,10,0 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 "
    "--lr 1e-2 --lr-decay-iters 10 --eval-iters 1 --eval-interval 2 --log-interval 1 "
    "--pipeline-model-parallel-size 2 --distributed-timeout-minutes 5"
)
SIZES = "--optimized-pipeline --manual-mbs 1,2,3,2"


@pytest.mark.parametrize(
    ("ranks", "common", "flags"),
    [
        (2, "", f"{SIZES} --variable-seq-lengths"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel", SIZES),
    ],
    ids=["lengths", "tensor-parallel"],
)
def test_other_sizes_have_the_losses_of_equal_ones(tmp_path, ranks, common, flags):
    expected = pretrain(tmp_path, ranks, *f"{FLAGS} {common}".split(), timeout=300)
    found = pretrain(tmp_path, ranks, *f"{FLAGS} {common} {flags}".split(), timeout=300)
    assert len(found.losses) == 4
    assert found.losses == pytest.approx(expected.losses, rel=2e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, abs=1.1e-3)
