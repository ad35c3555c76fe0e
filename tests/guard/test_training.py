"""Planted faults are found in trainings of 1, 2 and 4 ranks; runs without are the same runs."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from tests.guard.faults import FC1, NORM
from tests.guard.job import train
from tests.support.lazy import needs
from tests.support.trainer_job import SETUP

needs("megatron.core")

ALL = "--guard nan,spike,desync,bitflip --guard-interval 1"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SP, CP = f"{TP} --sequence-parallel", "--context-parallel-size 2"
VPP = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --mtp-num-layers 1 "
    "--moe-router-load-balancing-type aux_loss --expert-model-parallel-size 2 "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    "--transformer-impl transformer_engine"
)
FP8 = (
    "--bf16 --transformer-impl transformer_engine --ffn-hidden-size 192 --fp8-format hybrid "
    "--fp8-recipe"
)


@pytest.fixture
def run(rank_pool):
    """Train on ``world`` ranks, two micro-batches each; results by rank."""

    def run(world: int, flags: str, *given, batch: int = 4) -> list[dict]:
        job = f"--train-iters 4 --global-batch-size {batch} {flags}"
        return rank_pool.run(world, train, job, *given, setup=SETUP, backend=None, timeout=120)

    return run


def message(results: list[dict]) -> str:
    """The error, which is the same on all ranks."""
    [found] = {one["error"] for one in results}
    assert found is not None, results[0]["printed"]
    return found


# Weekly: tensor ranks and stages are in other rows, and so is dropout.
@pytest.mark.weekly_cases("4-*", "1---hidden-dropout 0.1-4")
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("world", "flags", "batch"),
    [
        (1, "--hidden-dropout 0.1", 4),
        (2, f"{VPP} --attention-dropout 0.1", 4),
        (2, f"--bf16 {ZERO} --hidden-dropout 0.1", 8),
        (2, f"{SP} {RECOMPUTED}", 4),
        (2, f"{CP} --calculate-per-token-loss", 4),
        (2, EXPERTS, 8),
        (2, f"{PP} --pipeline-schedule zb-h1", 4),
        (2, f"{PP} --variable-seq-lengths", 4),
        (4, f"{TP} {PP}", 4),
        (1, "--fp16 --initial-loss-scale 65536", 4),
        (1, f"{FP8} tensorwise", 4),
    ],
)
def test_a_run_with_all_guards_is_the_run_without(run, world, flags, batch):
    flags = f"{flags} --train-iters 2"  # what a guard leaves changed in one step shows in the next
    plain, guarded = run(world, flags, batch=batch), run(world, f"{flags} {ALL}", batch=batch)
    assert {one["error"] for one in (*plain, *guarded)} == {None}
    assert [one["digest"] for one in plain] == [one["digest"] for one in guarded]
    losses = [re.findall(r"loss: (\S+)", one[-1]["printed"]) for one in (plain, guarded)]
    assert losses[0] == losses[1] and (losses[0] or world == 1)
    assert not any("guard: " in one["printed"] for one in guarded)


# Weekly: tensor ranks, or stages, without the other.
@pytest.mark.weekly_cases("2---tensor*", "2---pipeline-model-parallel-size 2-4-*")
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("world", "flags", "batch", "first", "ranks"),
    [
        (2, VPP, 4, 1, "1"),
        (1, RECOMPUTED, 4, 1, "0"),
        (2, PP, 4, 1, "0"),
        (2, SP, 4, 1, "0, 1"),
        (2, ZERO, 8, 2, "0"),
        (4, f"{TP} {PP}", 4, 1, "0, 1"),
    ],
)
def test_nan_is_traced_to_micro_batch_module_and_operator(run, world, flags, batch, first, ranks):
    text = message(run(world, f"{flags} --guard nan", "nan", batch=batch))
    assert (
        f"step 2 (iteration 3): the loss of micro-batch {first}" in text
        and f"first: micro-batch {first}, forward, {FC1}, operator sqrt.default (of finite "
        f"tensors), on rank {ranks}; it came again"
        in text
    )


@pytest.mark.weekly_cases("1-")  # recomputed, too
@pytest.mark.slow
@pytest.mark.parametrize(("world", "flags"), [(1, ""), (2, VPP), (2, TP), (1, RECOMPUTED)])
def test_an_infinite_gradient_is_traced_to_its_backward(run, world, flags):
    text = message(run(world, f"{flags} --guard nan", "gradient"))
    assert "gradients are not finite; first: micro-batch 1, backward, " in text
    assert "operator div.Tensor (of finite tensors)" in text and "layers.1." in text


@pytest.mark.slow
def test_a_value_that_does_not_come_again_is_a_fault_of_a_device(run):
    text = message(run(2, f"{PP} --guard nan", "nan once"))
    assert "not when the step was computed again: a transient fault of a device" in text


@pytest.mark.slow
def test_where_megatron_leaves_a_step_out_it_is_left_out(run):
    results = run(1, "--guard nan --max-skipped-nan-iterations 2", "nan")
    printed = results[0]["printed"]
    assert results[0]["error"] is None and "; the step is left out" in printed
    assert f"micro-batch 1, forward, {FC1}" in printed
    # Gradients that overflow are what a loss scale is lowered for.
    scaled = run(1, "--guard nan,spike --fp16 --initial-loss-scale 1e30")
    assert scaled[0]["error"] is None and "guard: " not in scaled[0]["printed"]
    assert scaled[0]["printed"].count("skipped:   1") >= 1


def test_a_spike_is_reported_and_the_checkpoint_before_is_kept(run, tmp_path):
    saved = f"--save {tmp_path} --save-interval 2 --keep-last 1 --train-iters 22"
    [result] = run(1, f"{saved} --guard spike", "spike")
    found = re.findall(r"guard: (.*)", result["printed"])
    assert [re.search(r"the (loss|gradient norm) is", line)[1] for line in found] == [
        "loss",
        "gradient norm",
    ]
    assert all(line.startswith("step 18 (iteration 19): ") for line in found)
    assert all("micro-batch 1 has the largest loss" in line for line in found)
    assert all(f"{tmp_path}/iter_0000018, the checkpoint before, is kept" in line for line in found)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        "iter_0000018",
        "iter_0000018.keep",
        "iter_0000022",
    ]
    assert "the gradient norm is" in (tmp_path / "iter_0000018.keep").read_text()


@pytest.mark.weekly_cases("2---context*")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("world", "flags", "batch", "blamed"),
    [
        (4, f"{TP} {ZERO}", 8, "rank 3 holds another copy than 3 ranks of the same weights"),
        (2, "", 8, "ranks 0, 1 hold different copies, one of these is wrong"),
        (2, TP, 4, "ranks 0, 1 hold different copies, one of these is wrong"),
        (2, CP, 4, "ranks 0, 1 hold different copies, one of these is wrong"),
        (4, "", 16, "rank 3 holds another copy than 3 ranks of the same weights"),
    ],
)
def test_a_copy_with_a_flipped_bit_is_named(run, world, flags, batch, blamed):
    text = message(run(world, f"{flags} --guard desync --guard-interval 2", "weight", batch=batch))
    assert f"step 2 (iteration 3): copies of weights differ: {blamed}: {NORM}.weight;" in text


@pytest.mark.weekly_cases("2---tensor*", "4-*")  # tensor ranks with recomputation are daily
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("world", "flags", "batch", "number", "rank"),
    [
        (2, VPP, 4, 1, 1),
        (2, TP, 4, 1, 1),
        (2, "", 8, 3, 1),
        (2, f"{SP} {RECOMPUTED}", 4, 1, 1),
        (4, f"{TP} {CP}", 4, 1, 3),
        (1, f"{FP8} blockwise", 4, 1, 0),
    ],
)
def test_a_bit_that_flips_once_is_named(run, world, flags, batch, number, rank):
    text = message(run(world, f"{flags} --guard bitflip --guard-interval 2", "flip", batch=batch))
    assert (
        "step 2 (iteration 3): a transient fault of a device: computed three times, the first "
        f"differs in bits; first in micro-batch {number}, forward, {FC1}, output, on rank {rank};"
        in text
    )


def test_bits_of_factors_that_follow_from_earlier_steps_are_not_compared(run):
    flags = f"{FP8} delayed --guard"
    assert "--guard bitflip: cannot be combined with --fp8-recipe" in message(
        run(1, f"{flags} bitflip")
    )


@pytest.mark.slow
def test_a_step_that_is_computed_twice_is_recorded_once(run, tmp_path):
    from mindspeed.compare.recording import read

    flags = "--hidden-dropout 0.1 --train-iters 3 --record-steps 0,2 --record"
    run(1, f"{flags} {tmp_path}/plain")
    run(1, f"{flags} {tmp_path}/guarded {ALL}")
    plain, guarded = (read(tmp_path / name).tensors for name in ("plain", "guarded"))
    assert plain.keys() == guarded.keys() and {name.step for name in plain} == {0, 2}
    assert all(torch.equal(one.digest, guarded[name].digest) for name, one in plain.items())


@pytest.mark.slow
def test_a_program_that_does_not_repeat_itself_is_said_once(run):
    [result] = run(1, "--guard bitflip --guard-interval 1", "random")
    assert result["error"] is None
    [line] = re.findall(r"guard: (.*)", result["printed"])
    assert "bitflip is off" in line and f"forward, {FC1}, output, on rank 0 has other bits" in line


def test_guards_cost_one_reduction_a_step_and_one_gather_an_interval(run):
    job = f"{TP} --train-iters 3 --no-exit-signal-handler"  # whose votes are taken once a second
    seldom, losses, often = (
        run(2, f"{job} --guard {flags}", "", True)[0]["collectives"]
        for flags in (
            "desync --guard-interval 9",
            "desync,nan,spike --guard-interval 9",
            "desync --guard-interval 1",
        )
    )
    micro_batches, data_ranks, steps, kinds = 2, 1, 3, 4
    of_losses = ("all_reduce", 4 * (3 * micro_batches * data_ranks + 1))
    of_copies = ("all_gather", 8 * 2 * kinds)
    assert_added(seldom, losses, {of_losses: steps})
    assert_added(seldom, often, {of_copies: steps - 1})


def assert_added(before: Counter, after: Counter, more: dict) -> None:
    """Only these collectives are new; texts that ranks gather may have other lengths."""
    assert more.items() <= (after - before).items()
    assert after.total() - before.total() == sum(more.values())
