"""Flags of mixtures of experts with an unmodified ``pretrain_gpt.py``."""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import MOE, TRAINING
from tests.support import trainer_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron_lm,
    pytest.mark.usefixtures("forked_scripts"),
]


def test_hidden_all_to_all_prints_the_digits_of_the_plain_schedule(tmp_path):
    experts = "--bf16 --expert-model-parallel-size 2 --use-distributed-optimizer"

    def run(flags):
        found = pretrain(tmp_path, 2, *f"{MOE} {TRAINING} {experts} {flags}".split())
        return found.losses, found.grad_norms

    assert run("--moe-fb-overlap --overlap-grad-reduce") == run("")


TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2"


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (TENSOR, "--moe-experts-pipeline-degree 2"),
        (
            "--expert-model-parallel-size 2",
            "--balanced-moe-experts --balanced-moe-hot-expert-num 1",
        ),
    ],
    ids=["groups", "hot"],
)
def test_programs_print_the_digits_of_the_plain_layer(layout, flags, tmp_path):
    def run(more):
        return pretrain(tmp_path, 2, *f"{MOE} {TRAINING} {layout} {more}".split())

    plain, ours = run(""), run(flags)
    assert ours.losses == pytest.approx(plain.losses, rel=2e-6)
    assert ours.grad_norms == pytest.approx(plain.grad_norms, rel=1e-3)


def test_extended_groups_and_shared_experts_print_the_digits_of_megatrons_flags(tmp_path):
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel --moe-ffn-hidden-size 64"

    def run(flags):
        found = pretrain(tmp_path, 2, *f"{MOE} {TRAINING} {tensor} {flags}".split())
        return found.losses, found.grad_norms

    assert run("--moe-tp-extend-ep --n-shared-experts 2") == run(
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
        "--moe-shared-expert-intermediate-size 128"
    )


def test_experts_in_pieces_print_the_digits_of_megatrons_layer(tmp_path):
    expert = (
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm"
    )

    def run(flags):
        found = pretrain(tmp_path, 2, *f"{MOE} {TRAINING} {expert} {flags}".split())
        return found.losses, found.grad_norms

    losses, norms = run("")
    piped = run("--use-pipe-experts --pipe-experts-multi-data 2 --overlap-grad-reduce")
    assert piped[0] == pytest.approx(losses, rel=1e-6)
    assert piped[1] == pytest.approx(norms, rel=1e-4)


def test_hidden_dispatch_prints_the_losses_of_megatrons_layer(tmp_path):
    experts = "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 64"

    def run(flags):
        found = pretrain(tmp_path, 2, *f"{MOE} {TRAINING} {experts} {flags}".split())
        return found.losses, found.grad_norms

    losses, norms = run("--moe-token-dispatcher-type alltoall")
    for flags in (
        "alltoall --moe-alltoall-exchange dedup --moe-alltoall-overlap-comm --overlap-grad-reduce",
        "allgather --moe-allgather-overlap-comm --overlap-grad-reduce",
    ):
        hidden = run(f"--moe-token-dispatcher-type {flags}")
        assert hidden[0] == pytest.approx(losses, rel=1e-6)
        assert hidden[1] == pytest.approx(norms, rel=1e-4)


def test_attention_in_chunks_prints_the_digits_of_megatrons_layer(tmp_path):
    expert = (
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm"
    )

    def run(flags):
        found = pretrain(tmp_path, 2, *f"{MOE} {TRAINING} {expert} {flags}".split())
        return found.losses, found.grad_norms

    losses, norms = run("")
    chunked = run("--ampipe-degree 4 --overlap-grad-reduce")
    assert chunked[0] == pytest.approx(losses, rel=1e-6)
    assert chunked[1] == pytest.approx(norms, rel=1e-4)


def test_experts_that_keep_nothing_print_the_digits_of_those_that_keep_all(tmp_path):
    experts = (
        "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 64 "
        "--moe-alltoall-overlap-comm --use-distributed-optimizer --overlap-grad-reduce"
    )

    def run(flags):
        found = pretrain(tmp_path, 2, *f"{MOE} {TRAINING} {experts} {flags}".split())
        return found.losses, found.grad_norms

    plain = run("")
    assert run("--moe-zero-memory level1 --moe-zero-memory-num-layers 1") == plain
    scale = "--moe-adaptive-recompute-activation-scale 1.05"
    assert run(f"--moe-zero-memory level0 --moe-adaptive-recompute-activation {scale}") == plain


def test_hidden_all_to_all_prints_the_digits_of_megatrons_layer(tmp_path):
    experts = (
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
        "--moe-shared-expert-intermediate-size 64 --use-distributed-optimizer"
    )

    def run(flags):
        found = pretrain(tmp_path, 2, *f"{MOE} {TRAINING} {experts} {flags}".split())
        return found.losses, found.grad_norms

    losses, norms = run("")
    hidden = run("--moe-alltoall-overlap-comm --overlap-grad-reduce --overlap-param-gather")
    assert hidden[0] == pytest.approx(losses, rel=1e-6)
    assert hidden[1] == pytest.approx(norms, rel=1e-4)


def test_deepspeeds_model_prints_the_digits_of_megatrons(tmp_path):
    """Without drops its gate is Megatron's router; drops and noise are replayed."""
    deepspeed = "--moe-model-type deepspeed_moe"

    def run(flags):
        return pretrain(tmp_path, 2, *f"{MOE} {TRAINING} {flags}".split())

    def equal(found, expected):
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)

    expert = "--expert-model-parallel-size 2"
    window = f"{deepspeed} --moe-no-drop --moe-dynamic-padding --moe-alltoall-overlap-comm"
    equal(run(f"{window} {expert} --use-distributed-optimizer --overlap-grad-reduce"), run(expert))
    drops = (
        f"{deepspeed} --moe-router-topk 1 --moe-train-capacity-factor 0.6 --expert-interval 2 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
        "--noisy-gate-policy Jitter --moe-token-dispatcher-type allgather"
    )
    recomputed = (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--moe-alltoall-overlap-comm"
    )
    equal(run(f"{drops} {expert} {recomputed}"), run(f"{drops} {expert}"))


def test_our_trainer_prints_the_digits_of_the_script(rank_pool, tmp_path):
    """From their own initial weights: routers, experts and dropout masks are drawn alike."""
    job = (
        "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --hidden-dropout 0.1 "
        "--bf16 --group-query-attention --max-position-embeddings 64 --eval-iters 0"
    )
    flags = [*trainer_job.TINY, *job.split(), "--train-iters", "3"]
    script = pretrain(tmp_path, 2, *flags, "--eval-interval", "1000")
    file = tmp_path / "metrics.jsonl"
    given = {"setup": trainer_job.SETUP, "backend": None, "timeout": 240}
    flags += ["--metrics-file", str(file)]
    results = rank_pool.run(2, trainer_job.train, flags, **given)
    assert {result["error"] for result in results} == {None}
    records = trainer_job.metrics(file)
    assert script.losses == tuple(float(f"{record['lm_loss']:.6E}") for record in records)
    assert script.grad_norms == tuple(round(record["grad_norm"], 3) for record in records)
