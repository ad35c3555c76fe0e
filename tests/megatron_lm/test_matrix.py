"""Unmodified ``pretrain_gpt.py`` plus one import line: every layout equals the one-rank run.

Megatron's default flags: Transformer Engine spec, fused gradient accumulation, persistent layer
norm. fp32 losses are compared at a relative tolerance of 2e-6 (the printed digits), gradient norms
at 1e-3 (three printed decimals); bf16 losses at 1e-2.
"""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import pretrain

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0 --hidden-dropout 0"
)
MOE = (
    f"{MODEL} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
)
MLA = (
    f"{MODEL.replace('--group-query-attention --num-query-groups 4 ', '')} "
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16"
)
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-3 --lr-decay-iters 10 "
    "--seed 1234 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 "
    "--eval-interval 1000 --log-interval 1 --distributed-timeout-minutes 2 --no-save-optim"
)

LAYOUTS = {
    "data-parallel": (2, MODEL, ""),
    "tensor-parallel": (2, MODEL, "--tensor-model-parallel-size 2"),
    "sequence-parallel": (2, MODEL, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline": (2, MODEL, "--pipeline-model-parallel-size 2"),
    "virtual-pipeline": (
        2,
        MODEL,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "distributed-optimizer": (2, MODEL, "--use-distributed-optimizer"),
    "overlap-grad-reduce": (2, MODEL, "--overlap-grad-reduce"),
    "overlap-param-gather": (
        2,
        MODEL,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "full-recompute": (
        2,
        MODEL,
        "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "selective-recompute": (1, MODEL, "--recompute-granularity selective"),
    "tensor-x-pipeline-sequence-parallel": (
        4,
        MODEL,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer",
    ),
    "moe-expert-parallel": (2, MOE, "--expert-model-parallel-size 2"),
    "mla-tensor-parallel": (2, MLA, "--tensor-model-parallel-size 2"),
    "local-spec": (2, MODEL, "--transformer-impl local --tensor-model-parallel-size 2"),
    "local-spec-sequence-parallel": (
        2,
        MODEL,
        "--transformer-impl local --tensor-model-parallel-size 2 --sequence-parallel",
    ),
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The reference run of a model, made once."""
    runs = {}

    def get(model: str, extra: str = ""):
        if (model, extra) not in runs:
            flags = f"{model} {TRAINING} {extra}".split()
            runs[model, extra] = pretrain(tmp_path_factory.mktemp("one_rank"), 1, *flags)
        return runs[model, extra]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_the_one_rank_run(layout, one_rank, tmp_path):
    nproc, model, flags = LAYOUTS[layout]
    run = pretrain(tmp_path, nproc, *f"{model} {TRAINING} {flags}".split())
    reference = one_rank(model)
    assert len(run.losses) == 3
    assert run.losses == pytest.approx(reference.losses, rel=2e-6)
    assert run.grad_norms == pytest.approx(reference.grad_norms, abs=2e-3)


def test_bf16_tensor_parallel_follows_the_fp32_run(one_rank, tmp_path):
    flags = f"{MODEL} {TRAINING} --bf16 --tensor-model-parallel-size 2".split()
    run = pretrain(tmp_path, 2, *flags)
    assert run.losses == pytest.approx(one_rank(MODEL).losses, rel=1e-2)


def test_the_reference_can_fail_another_seed_gives_other_losses(one_rank, tmp_path):
    flags = f"{MODEL} {TRAINING.replace('--seed 1234', '--seed 4321')}".split()
    run = pretrain(tmp_path, 1, *flags)
    assert run.losses != pytest.approx(one_rank(MODEL).losses, rel=2e-6)
