"""A loss that is not finite, and the reasons to stop early."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from mindspeed.errors import TrainingError
from mindspeed.training.forward_step import MicroBatchLoss
from tests.support import fault
from tests.support.forked import run_all
from tests.support.lazy import Lazy
from tests.support.trainer_job import SETUP, command, metrics, train

SkippedSteps = Lazy("mindspeed.training.step", "SkippedSteps")
PP2 = ["--pipeline-model-parallel-size", "2"]


def run(ranks, flags, *fault_and_args):
    return ranks(2, train, flags, *fault_and_args, setup=SETUP, backend=None, timeout=240)


def test_a_loss_that_is_not_finite_names_iteration_rank_and_micro_batch(ranks):
    (result,) = ranks(
        1, train, [], fault.bad_loss_in_step, 3, 2, setup=SETUP, backend=None, timeout=240
    )
    assert "iteration 3, rank 0, micro-batch 2: the loss is nan" in result["error"]


def test_a_step_with_non_finite_loss_can_be_skipped_a_limited_number_of_times(ranks, tmp_path):
    file = tmp_path / "metrics.jsonl"
    flags = [*PP2, "--max-skipped-nan-iterations", "1", "--metrics-file", str(file)]
    results = run(ranks, flags, fault.bad_loss_in_step, 2, 0)
    assert [result["error"] for result in results] == [None, None]
    records = metrics(file)
    assert [r["skipped_iterations"] for r in records] == [0, 1, 0, 0, 0, 0]
    assert [r["iteration"] for r in records if r["lm_loss"] is None] == [2]
    rates = [record["learning_rate"] for record in records]
    assert rates[1] == rates[2] and len(set(rates)) == 5  # the schedule waits for a step


def test_sigterm_on_one_rank_saves_on_all_and_ends_without_error(ranks, tmp_path):
    results = run(ranks, [*PP2, "--save", str(tmp_path)], fault.signal_in_step, 1, 1)
    assert [result["error"] for result in results] == [None, None]
    (stopped,) = {result["iteration"] for result in results}
    assert 1 <= stopped < 6
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(stopped)


@pytest.mark.parametrize(
    "flags, last", [(["--exit-interval", "4"], 4), (["--exit-duration-in-mins", "0"], 1)]
)
def test_training_stops_at_an_interval_and_when_time_is_up(flags, last, ranks, tmp_path):
    (result,) = ranks(
        1, train, [*flags, "--save", str(tmp_path)], setup=SETUP, backend=None, timeout=240
    )
    assert result["iteration"] == last
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last)


def test_the_batch_grows_with_the_samples_consumed(ranks, tmp_path):
    """2 more after every 4 samples, 8 from sample 12 on; an incomplete last batch is left out."""
    file = tmp_path / "metrics.jsonl"
    flags = ["--train-samples", "48", "--rampup-batch-size", "2", "2", "12", "--metrics-file"]
    flags.append(str(file))
    (result,) = ranks(1, train, flags, setup=SETUP, backend=None, timeout=240)
    assert result["error"] is None
    assert [r["global_batch_size"] for r in metrics(file)] == [2, 2, 4, 6, 8, 8, 8, 8]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("iterations", [2, 12])
def test_fp16_with_a_loss_that_is_never_finite_fails(iterations, ranks):
    """Each step is skipped, which is how loss scaling works; but nothing is trained."""
    flags = ["--fp16", "--train-iters", str(iterations)]
    fault_and_args = [fault.weights_that_are_not_numbers]
    (result,) = ranks(1, train, flags, *fault_and_args, setup=SETUP, backend=None, timeout=240)
    steps = min(iterations, 8)
    assert f"iteration {steps}: the loss is not finite and {steps} steps in a row were" in (
        result["error"] or "no error"
    )


@pytest.mark.parametrize(
    "steps, said",
    [
        ([(False, 1.0, 2.0**32)] * 40 + [(True, 1.0, 1.0)], None),
        ([(False, float("nan"), 8.0)] * 7 + [(True, 1.0, 8.0)] + [(False, 1.0, 8.0)] * 99, None),
        ([(False, float("nan"), 8.0)] * 8, "the loss is not finite and 8 steps"),
        ([(False, 1.0, 1.0)] * 7 + [(True, 1.0, 1.0)] + [(False, 1.0, 1.0)] * 7, None),
        ([(False, 1.0, 1.0)] * 8, "the gradients overflow at the smallest loss scale"),
    ],
)
def test_skipped_steps_are_limited(steps, said):
    def scale_of(value):
        return lambda: torch.tensor(value)

    watch = SkippedSteps(Namespace(fp16=True, loss_scale=None, min_loss_scale=1.0))
    error = None
    try:
        for number, (updated, loss, scale) in enumerate(steps, start=1):
            losses = [MicroBatchLoss(torch.tensor(loss), None, {})]
            watch.after_step(updated, losses, scale_of(scale), number)
    except TrainingError as problem:
        error = str(problem)
    assert said is None or said in (error or "no error")
    assert (error is None) == (said is None)


@pytest.mark.slow
@pytest.mark.parametrize("length", ["--train-iters", "--train-samples"])
def test_a_finished_job_that_is_started_again_is_a_success_in_one_line(length, ranks, tmp_path):
    """Also when its data are gone: nothing is read, built, trained, evaluated or saved."""
    number = "2" if length == "--train-iters" else "16"
    words = ["pretrain", *command([length, number])]
    words += ["--save", str(tmp_path / "c"), "--auto-resume"]
    ((first, again, other),) = ranks(
        1,
        run_all,
        [words, words, [*words, "--tensorboard-dir", str(tmp_path / "c")]],
        setup=SETUP,
        backend=None,
        timeout=240,
    )
    assert first[0] == 0, first[1]
    for status, output in (again, other):
        assert status == 0
        (line,) = output.splitlines()
        assert "nothing left to do" in line and "iter_0000002" in line
    assert [path.name for path in (tmp_path / "c").glob("events*")] == []


@pytest.mark.slow
def test_a_finished_job_whose_last_checkpoint_is_damaged_trains_it_again(ranks, tmp_path):
    flags = [*PP2, "--save", str(tmp_path), "--save-interval", "1", "--train-iters", "2"]
    run(ranks, flags)
    (tmp_path / "iter_0000002" / "common.pt").write_bytes(b"")
    results = run(ranks, [*flags, "--auto-resume"])
    assert [(result["error"], result["iteration"]) for result in results] == [(None, 2)] * 2
    assert (tmp_path / "iter_0000002" / "common.pt").stat().st_size > 0
    results = run(ranks, [*flags, "--auto-resume"])
    assert [result["error"] for result in results] == [None, None]
