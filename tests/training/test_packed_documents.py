"""Packed documents train like separate ones, in every layout, with every context parallelism.

Losses and gradient norms of the first steps, fp32, relative 1e-6 and 1e-4, two rows with different
documents in a micro-batch. The oracle of one rank is Megatron's dense block-diagonal mask.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support.documents_job import packed_and_dense, train_and_watch_plans, write_documents
from tests.support.trainer_job import SETUP, runs, train

TP, PP = (f"--{name}-model-parallel-size 2" for name in ("tensor", "pipeline"))
CP = "--context-parallel-size 2"
TE = "--transformer-impl transformer_engine"
RESETS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def flags_for(prefix: str, *more: str) -> list[str]:
    return ["--no-mock-data", "--data-path", prefix, "--split", "1,0,0", *" ".join(more).split()]


@pytest.fixture(scope="module")
def prefix(rank_pool, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("documents") / "documents")
    rank_pool.run(1, write_documents, path, setup=SETUP, backend=None, timeout=120)
    return path


@pytest.fixture(scope="module")
def run(rank_pool, prefix, tmp_path_factory):
    """Trains two steps on some ranks from one set of weights; returns the metrics."""
    return runs(rank_pool, tmp_path_factory.mktemp("runs"), partial(flags_for, prefix))


@pytest.fixture(scope="module")
def one_rank(run) -> list[dict]:
    return run(1, RESETS, "--calculate-per-token-loss")


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_one_rank_has_the_losses_and_gradients_of_the_dense_mask(prefix, ranks, positions):
    flags = flags_for(prefix, RESETS, "--position-embedding-type", positions)
    (found,) = ranks(1, packed_and_dense, flags, setup=SETUP, backend=None, timeout=120)
    assert 64 in found["boundaries"] and found["boundaries"][-1] == 128
    assert len(found["boundaries"]) > 8
    packed, dense = found["packed"], found["dense"]
    torch.testing.assert_close(packed["losses"], dense["losses"], rtol=1e-5, atol=1e-5)
    for name, gradient in dense["gradients"].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            packed["gradients"][name], gradient, rtol=1e-5, atol=5e-6 * scale, msg=name
        )


@pytest.mark.weekly_cases(
    "4-*ulysses_cp_algo",
    "2-*--context-parallel-algo megatron_cp_algo",
    "4---pipeline-model-parallel-size 4",
    "4---context-parallel-size 2 --pipeline*",
    "2---pipeline-model-parallel-size 2 --schedules-method dualpipev",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, f"{CP} {TE} --context-parallel-algo megatron_cp_algo"),
        (4, f"{CP} {PP} {RECOMPUTE} {TE} --context-parallel-algo kvallgather_cp_algo"),
        (1, TE),
        (2, f"{TP} --sequence-parallel {TE}"),
        (2, f"{PP} --num-layers-per-virtual-pipeline-stage 1 {RECOMPUTE}"),
        (2, f"{CP} --context-parallel-algo adaptive_cp_algo --adaptive-cp-granularity 4"),
        (2, f"{CP} --context-parallel-algo ulysses_cp_algo"),
        (4, f"{CP} {TP} --sequence-parallel --context-parallel-algo ulysses_cp_algo"),
        (4, "--pipeline-model-parallel-size 4"),
        (2, f"{PP} --schedules-method dualpipev"),
        (2, f"{PP} --pipeline-schedule zb-v"),
    ],
    ids=str,
)
def test_every_layout_gives_the_losses_of_one_rank(run, one_rank, world, flags):
    ours = run(world, RESETS, "--calculate-per-token-loss", flags)
    assert len(ours) == len(one_rank) == 2
    for mine, other in zip(ours, one_rank, strict=True):
        assert mine["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


DELTA_NET = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 12 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --attention-output-gate"
)


@pytest.fixture(scope="module")
def delta_nets(rank_pool, prefix, tmp_path_factory):
    """:func:`run` with gated delta nets, and what one rank gives."""
    base = partial(flags_for, prefix, RESETS, "--calculate-per-token-loss", DELTA_NET)
    run = runs(rank_pool, tmp_path_factory.mktemp("delta-nets"), base)
    return run, run(1, "")


@pytest.mark.weekly_cases("ring", "stages")  # counted in planner/test_counts_context.py
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, f"{CP} --context-parallel-algo adaptive_cp_algo --adaptive-cp-granularity 4"),
        (4, f"{CP} {TP} --sequence-parallel --context-parallel-algo ulysses_cp_algo {RECOMPUTE}"),
        (2, f"{CP} --context-parallel-algo megatron_cp_algo"),
        (4, f"{CP} {PP} --context-parallel-algo kvallgather_cp_algo"),
    ],
    ids=["adaptive", "tensor", "ring", "stages"],
)
def test_gated_delta_nets_share_documents_in_every_layout(delta_nets, world, flags):
    """Their layers exchange tokens for heads, whatever shards the sequence."""
    run, alone = delta_nets
    for mine, other in zip(run(world, flags), alone, strict=True):
        assert mine["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_the_comparison_can_fail_without_resets_losses_differ(run, one_rank):
    ours = run(1, "--eod-mask-loss --calculate-per-token-loss")
    assert ours[0]["lm_loss"] != pytest.approx(one_rank[0]["lm_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_thread_plans_the_next_micro_batch_while_one_is_trained(prefix, ranks):
    flags = flags_for(
        prefix, RESETS, "--calculate-per-token-loss --train-iters 2", CP,
        "--context-parallel-algo adaptive_cp_algo --adaptive-cp-granularity 4",
    )  # fmt: skip
    for result in ranks(2, train_and_watch_plans, flags, setup=SETUP, backend=None, timeout=120):
        assert result["error"] is None, result
        # Four micro-batches a step; the last of all has none to read behind it.
        assert result["order"] == ["read", *["read", "train"] * 7, "train"]
        assert len(result["threads"]) == 8
        assert all(name.startswith("plan-ahead") for name in result["threads"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            f"{CP} --reset-attention-mask",
            "packed data with context parallelism needs --calculate-per-token-loss",
        ),
        ("--fix-sub-seq-length 16", "changes nothing alone"),
        ("--fix-sub-seq-length 0 --reset-attention-mask", "0 must be at least 1"),
        ("--reset-attention-mask --optimization-level 1", "needs --optimization-level 2"),
        (
            f"{CP} {DELTA_NET} --linear-num-key-heads 1 --linear-num-value-heads 1",
            "--linear-num-value-heads 1 over 1 tensor-parallel and 2 context-parallel ranks",
        ),
    ],
)
def test_unsupported_configurations_are_refused(prefix, ranks, flags, said):
    world = 2 if CP in flags else 1
    results = ranks(world, train, flags_for(prefix, flags), setup=SETUP, backend=None, timeout=120)
    assert all(said in result["error"] for result in results), results
