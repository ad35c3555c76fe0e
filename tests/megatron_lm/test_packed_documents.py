"""Packed documents in unmodified ``pretrain_gpt.py``: the losses of Megatron's dense mask.

Megatron itself masks documents in the local layer spec only, on one context-parallel rank; that run
(``--optimization-level 1``, without the feature) is the oracle. Two rows with different documents
in a micro-batch; tolerances as in ``test_matrix``.
"""

from __future__ import annotations

import pytest

from mindspeed.adaptor.versions import at_least
from tests.megatron_lm.launch import Run, pretrain
from tests.support import documents_job

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

MODEL = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0 --hidden-dropout 0"
)
VOCABULARY = documents_job.EOD + at_least("0.18")  # whose last id ends a document since then
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --lr-decay-iters 10 "
    f"--seed 1234 --split 1,0,0 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} "
    "--eval-iters 0 "
    "--eval-interval 1000 --log-interval 1 --distributed-timeout-minutes 5"
)
RESETS = "--reset-attention-mask --reset-position-ids --eod-mask-loss --calculate-per-token-loss"
LOCAL = "--transformer-impl local"
CP, TP = "--context-parallel-size 2", "--tensor-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.fixture(scope="module")
def run(rank_pool, tmp_path_factory):
    """``run(ranks, flags)``: four iterations from one set of weights."""
    folder = tmp_path_factory.mktemp("packed")
    data, weights = folder / "documents", folder / "weights"
    setup = "tests.support.warm"
    rank_pool.run(1, documents_job.write_documents, str(data), setup=setup, backend=None)
    common = f"{MODEL} {TRAINING} --data-path {data}"
    first = f"--save {weights} --save-interval 1 --train-iters 1 --lr 0 --min-lr 0"
    pretrain(folder, 1, *f"{common} {first}".split(), timeout=600)
    load = f"--load {weights} --finetune --no-load-optim --no-load-rng"

    def train(ranks: int, flags: str) -> Run:
        return pretrain(folder, ranks, *f"{common} {load} {flags}".split(), timeout=600)

    return train


@pytest.fixture(scope="module")
def dense(run) -> Run:
    return run(1, f"{RESETS} {LOCAL} --optimization-level 1")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, LOCAL),
        (2, f"{TP} --sequence-parallel"),
        (2, f"{CP} {LOCAL} --context-parallel-algo megatron_cp_algo"),
        (2, f"{CP} --context-parallel-algo adaptive_cp_algo --adaptive-cp-granularity 4"),
        (4, f"{CP} {TP} --context-parallel-algo kvallgather_cp_algo {LOCAL}"),
        (4, f"{CP} --pipeline-model-parallel-size 2 {RECOMPUTE}"),
        (4, f"--pipeline-model-parallel-size 4 {LOCAL}"),
        (4, f"--pipeline-model-parallel-size 2 {TP} --variable-seq-lengths"),
    ],
    ids=str,
)
def test_losses_are_those_of_the_dense_mask(run, dense, ranks, flags):
    ours = run(ranks, f"{RESETS} {flags}")
    assert len(ours.losses) == 4
    assert ours.losses == pytest.approx(dense.losses, rel=2e-6)
    assert ours.grad_norms == pytest.approx(dense.grad_norms, abs=2e-3)


def test_the_comparison_can_fail_without_resets(run, dense):
    ours = run(1, "--eod-mask-loss --calculate-per-token-loss")
    assert ours.losses[0] != pytest.approx(dense.losses[0], rel=1e-5)


def test_context_parallel_without_per_token_loss_is_refused(run):
    with pytest.raises(AssertionError, match="needs --calculate-per-token-loss"):
        run(2, f"--reset-attention-mask {CP}")
