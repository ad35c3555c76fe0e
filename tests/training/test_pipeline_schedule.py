"""The trainer with ``--pipeline-schedule``: the digits of Megatron's own schedules.

Dropout is on: random numbers are drawn in the same order.
"""

from __future__ import annotations

import json

import pytest

from mindspeed.cli.pipeline_output import costs_flag
from mindspeed.pipeline.schedule.csv_file import read_plan
from mindspeed.pipeline.schedule.trace import read_trace
from tests.support.trainer_job import SETUP, train

PP2 = "--pipeline-model-parallel-size 2 --hidden-dropout 0.1"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
CASES = {
    "evaluation": (f"{PP2} --eval-interval 2 --eval-iters 1", "1f1b"),
    "split, evaluation": (f"{PP2} --eval-interval 2 --eval-iters 1", "zb-h1"),
    "loss per token": (f"{PP2} --calculate-per-token-loss", "zb-h1"),
    "loss scale": (f"{VPP2} --fp16 --initial-loss-scale 256", "nanopipe"),
    "bf16": (f"{VPP2} --bf16", "nanopipe"),
    "batch ramp-up": (
        f"{PP2} --train-samples 24 --rampup-batch-size 4 2 12",
        "zb-h1",
    ),
    "adapters": (f"{VPP2} --lora-target-modules all-linear --lora-r 4", "nanopipe"),
    "frozen first stage": (f"{PP2} --lora-target-modules lm_head --lora-r 4", "zb-h1"),
    "recomputation": (
        f"{VPP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "nanopipe",
    ),
    "experts": (
        f"{PP2} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --transformer-impl transformer_engine "
        "--moe-aux-loss-coeff 0.1",
        "zb-h1",
    ),
}


def records(ranks, folder, flags, world_size=2):
    file = folder / "metrics.jsonl"
    file.unlink(missing_ok=True)
    if "--train-samples" not in flags:
        flags += " --train-iters 3"
    found = [*flags.split(), "--metrics-file", str(file)]
    results = ranks(world_size, train, found, setup=SETUP, backend=None, timeout=240)
    assert {result["error"] for result in results} == {None}
    lines = map(json.loads, file.read_text().splitlines())
    wanted = ("loss", "norm", "scale")
    figures = [{k: v for k, v in line.items() if any(w in k for w in wanted)} for line in lines]
    return figures, [result["digest"] for result in results]


@pytest.mark.weekly_cases(
    "evaluation", "loss per token", "bf16", "frozen first stage", "recomputation", "loss scale"
)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_schedule_trains_like_megatrons(case, ranks, tmp_path):
    flags, schedule = CASES[case]
    if "--lora" in flags:
        weights = tmp_path / "weights"
        save = ["--train-iters", "1", "--lr", "0", "--save", str(weights)]
        ranks(1, train, save, setup=SETUP, backend=None, timeout=240)
        flags += f" --load {weights} --lr 0.1"
    figures, digests = records(ranks, tmp_path, flags)
    plan = tmp_path / "plan.csv"
    more = f"--pipeline-schedule {schedule} --pipeline-schedule-dump {plan}"
    assert records(ranks, tmp_path, f"{flags} {more}") == (figures, digests)
    assert any("lm_loss" in line for line in figures)
    ops = {action.op for _, action in read_plan(plan)}
    assert ("W" in ops) == (schedule != "1f1b")


@pytest.mark.slow
def test_experts_on_several_ranks_train_with_overlapping_reductions(ranks, tmp_path):
    experts, _ = CASES["experts"]
    flags = (
        f"{experts} --num-layers-per-virtual-pipeline-stage 1 --expert-model-parallel-size 2 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    )
    expected = records(ranks, tmp_path, flags, 4)
    assert records(ranks, tmp_path, f"{flags} --pipeline-schedule nanopipe", 4) == expected


@pytest.mark.slow
def test_a_dumped_schedule_is_a_schedule(ranks, tmp_path):
    plan = tmp_path / "plan.csv"
    flags = f"{PP2} --pipeline-schedule zb-h1 --pipeline-schedule-dump {plan}"
    expected = records(ranks, tmp_path, flags)
    assert records(ranks, tmp_path, f"{PP2} --pipeline-schedule {plan}") == expected


@pytest.mark.slow
def test_a_traced_step_gives_the_costs_of_the_next_run(ranks, tmp_path):
    folder = tmp_path / "trace"
    flags = f"{PP2} --pipeline-schedule zb-h1"
    expected = records(ranks, tmp_path, flags)
    assert records(ranks, tmp_path, f"{flags} --pipeline-trace {folder}") == expected
    trace = read_trace(folder)
    assert trace.step == 3 and min(trace.work()) > 0
    costs = costs_flag(trace)
    assert records(ranks, tmp_path, f"{flags} --pipeline-costs {costs}") == expected
