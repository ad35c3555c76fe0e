"""Micro-batches of different sizes in the trainer: losses and gradients of equal ones."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.documents_job import write_documents
from tests.support.trainer_job import SETUP, runs

TP, PP = (f"--{name}-model-parallel-size 2" for name in ("tensor", "pipeline"))
CP = "--context-parallel-size 2 --context-parallel-algo"
SIZES = "--optimized-pipeline --manual-mbs 1,2,3,2"
TE = "--transformer-impl transformer_engine"
RESETS = "--reset-attention-mask --reset-position-ids"


def flags_for(prefix: str, *more: str) -> list[str]:
    common = "--no-mock-data --split 1,0,0 --eod-mask-loss --calculate-per-token-loss"
    return [*common.split(), "--data-path", prefix, *" ".join(more).split()]


@pytest.fixture(scope="module")
def run(rank_pool, tmp_path_factory):
    """Trains three steps on some ranks from one set of weights; returns the metrics."""
    folder = tmp_path_factory.mktemp("sizes")
    prefix = str(folder / "documents")
    rank_pool.run(1, write_documents, prefix, setup=SETUP, backend=None, timeout=120)
    return runs(rank_pool, folder, partial(flags_for, prefix))


@pytest.fixture(scope="module")
def equal(run) -> list[dict]:
    return run(1)


@pytest.fixture(scope="module")
def equal_with_resets(run) -> list[dict]:
    return run(1, RESETS)


def check(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected) == 2
    for mine, other in zip(found, expected, strict=True):
        assert mine["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


@pytest.mark.weekly_cases(
    "4---pipeline-model-parallel-size 2 --global-batch-size 8 *",
    "4---pipeline-model-parallel-size 4 *",
)
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, f"{PP} {SIZES}"),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (
                (4, f"{PP} {TP} --sequence-parallel {SIZES} {TE}"),
                (4, f"{PP} --global-batch-size 8 --optimized-pipeline --manual-mbs 1,3"),
                (2, f"{PP} --num-layers-per-virtual-pipeline-stage 1 {SIZES}"),
                (4, "--pipeline-model-parallel-size 4 --optimized-pipeline"),
            )
        ),
    ],
    ids=str,
)
def test_losses_are_those_of_equal_sizes(run, equal, world, flags):
    check(run(world, flags), equal)


@pytest.mark.slow
def test_context_parallel_ranks_plan_documents_of_the_real_sizes(run, equal_with_resets):
    flags = f"{PP} {CP} adaptive_cp_algo --adaptive-cp-granularity 4 {RESETS} {SIZES}"
    check(run(4, flags), equal_with_resets)


@pytest.mark.slow
def test_auxiliary_losses_weigh_samples_equally(rank_pool, tmp_path):
    experts = (
        "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64 "
        "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 1 --moe-z-loss-coeff 0.1 --mtp-num-layers 1 "
        "--mtp-loss-scaling-factor 1"
    )
    run = runs(rank_pool, tmp_path, lambda *flags: f"{experts} {TE} {' '.join(flags)}".split())
    expected, found = run(1), run(2, f"{PP} {SIZES}")
    check(found, expected)
    names = {"mtp_1 loss", "seq_load_balancing_loss", "z_loss", "lm_loss"}
    for mine, other in zip(found, expected, strict=True):
        assert {name: mine[name] for name in names} == pytest.approx(
            {name: other[name] for name in names}, rel=1e-5
        )
