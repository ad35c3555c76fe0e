"""A user's forward step and loss: Megatron-LM's contract, in training, validation and the log."""

from __future__ import annotations

import functools
import json
from argparse import Namespace

import pytest
import torch

from mindspeed.errors import ConfigError, TrainingError
from mindspeed.training.forward_step import checked, forward_step, sum_reports
from tests.support.trainer_job import SETUP, metrics
from tests.training.forward_step_job import run_the_example, train

PP = "--pipeline-model-parallel-size 2"
MTP = "--mtp-num-layers 1"
LORA = "--lora-target-modules query_key_value dense"
HELD_OUT = "--eval-interval 2 --eval-iters 1"


@pytest.fixture(scope="module")
def run(rank_pool, tmp_path_factory):
    """Trains two steps and validates; all runs of a model begin with the same weights."""
    folder = tmp_path_factory.mktemp("forward_step")
    file, weights = folder / "metrics.jsonl", {}

    def go(world, step, flags):
        file.unlink(missing_ok=True)
        words = f"--metrics-file {file} {flags}".split()
        errors = rank_pool.run(world, train, words, step, setup=SETUP, backend=None, timeout=240)
        assert set(errors) == {None}, errors
        return [json.loads(line) for line in file.read_text().splitlines()]

    @functools.cache
    def run(world, step, flags="", model=""):
        if model not in weights:
            weights[model] = folder / f"weights{len(weights)}"
            go(1, None, f"{model} --train-iters 1 --lr 0 --save {weights[model]}")
        load = f"--load {weights[model]} --finetune --no-load-optim --no-load-rng --train-iters 2"
        return go(world, step, f"{model} {load} {HELD_OUT} {flags}")

    return run


def column(records, name):
    return [record[name] for record in records if name in record]


@pytest.mark.weekly_cases("lora")
@pytest.mark.slow
@pytest.mark.parametrize(("model", "flags"), [(MTP, ""), ("", LORA)], ids=["mtp", "lora"])
def test_a_user_step_equal_to_the_default_gives_equal_losses(run, model, flags):
    default, own = (run(2, step, f"{PP} {flags}", model) for step in (None, "sum"))
    names = ("lm_loss", "grad_norm", "validation_loss", *(["mtp_1 loss"] if model else []))
    for name in names:
        assert column(own, name) == column(default, name) != []


@pytest.mark.slow
def test_an_additional_loss_is_trained_and_reported_on_one_stage_and_on_two(run):
    plain, one, two = run(1, "sum"), run(1, "penalised"), run(2, "penalised", PP)
    for name in ("lm_loss", "squared loss", "validation_loss", "squared loss validation"):
        assert column(two, name) == pytest.approx(column(one, name), rel=1e-5)
    assert column(one, "squared loss")[0] > column(one, "lm_loss")[0] ** 2  # Jensen
    assert column(one, "lm_loss")[0] == column(plain, "lm_loss")[0]  # the same weights
    assert column(one, "grad_norm")[0] > 1.5 * column(plain, "grad_norm")[0]
    assert column(one, "lm_loss")[1] != column(plain, "lm_loss")[1]


def test_means_are_means_over_micro_batches_and_data_parallel_ranks(run):
    sums, means = run(1, "sum"), run(2, "mean")
    assert column(means, "lm_loss") == pytest.approx(column(sums, "lm_loss"), rel=1e-6)
    assert column(means, "grad_norm") == pytest.approx(column(sums, "grad_norm"), rel=1e-4)
    assert column(means, "data rank") == [0.5, 0.5]


def test_a_wrong_return_is_one_error(ranks):
    (error,) = ranks(1, train, [], "triple", setup=SETUP, backend=None, timeout=240)
    assert error == (
        "TrainingError: forward_step must return a pair (output tensor, loss function), not a "
        "tuple of 3"
    )


def test_the_example_of_the_documentation_runs(ranks, tmp_path):
    file, curves = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    flags = f"--train-iters 2 --metrics-file {file} --tensorboard-dir {curves}".split()
    ranks(1, run_the_example, flags, setup=SETUP, backend=None, timeout=240)
    assert all(record["squared loss"] > record["lm_loss"] for record in metrics(file))
    (events,) = curves.iterdir()
    assert b"squared loss" in events.read_bytes()


ONE, TWO = torch.ones(()), torch.ones(2)
COUNT = torch.tensor(3, dtype=torch.int)
LOSS = torch.ones((), requires_grad=True)
WRONG = {
    "no-tuple": (LOSS, r"must return \(loss, num_tokens, reports\) or \(loss, reports\), not a te"),
    "four": ((LOSS, COUNT, {}, {}), "not a tuple of 4"),
    "vector-loss": ((TWO, COUNT, {}), r"scalar tensor as loss, not a tensor of shape \(2,\)"),
    "number-loss": ((1.0, COUNT, {}), "scalar tensor as loss, not float"),
    "no-gradient": ((ONE, COUNT, {}), "loss without a gradient"),
    "float-count": ((LOSS, ONE, {}), "num_tokens as an integer scalar tensor, not a tensor of"),
    "number-count": ((LOSS, 3, {}), "num_tokens as an integer scalar tensor, not int"),
    "list-of-reports": ((LOSS, COUNT, [TWO]), "reports as a dict, not list"),
    "number-report": ((LOSS, COUNT, {"x": 1.0}), "report 'x' as a tensor .* not float"),
    "wide-report": ((LOSS, COUNT, {"x": torch.ones(3)}), r"report 'x' .* shape \(3,\)"),
    "report-of-the-log": ((LOSS, COUNT, {"grad_norm": ONE}), "'grad_norm': the log has"),
    "unnamed-report": ((LOSS, COUNT, {1: ONE}), "reports by str, not int"),
}
NEEDS = {
    "overlap_moe_expert_parallel_comm": "return_schedule_plan",
    "num_microbatches_with_partial_activation_checkpoints": "checkpoint_activations_microbatch",
}
FLAGS = {**dict.fromkeys(NEEDS, False), "calculate_per_token_loss": False}


def loss_of(returned, **flags):
    args = Namespace(**FLAGS | flags)
    step = checked(lambda data, model: (LOSS, lambda output: returned), args, {"grad_norm"})
    output, loss_function = step(None, None)
    return loss_function(output)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_loss_function_is_named(case):
    returned, message = WRONG[case]
    with pytest.raises(TrainingError, match=message):
        loss_of(returned)


def test_a_mean_is_refused_where_gradients_are_divided_by_tokens():
    assert len(loss_of((LOSS, {}))) == 2
    with pytest.raises(TrainingError, match="with --calculate-per-token-loss"):
        loss_of((LOSS, {}), calculate_per_token_loss=True)


@pytest.mark.parametrize("flag", NEEDS)
def test_a_schedule_with_one_more_argument_needs_a_step_that_takes_it(flag):
    args = Namespace(**FLAGS | {flag: True})
    checked(lambda data, model, **more: None, args, ())
    with pytest.raises(ConfigError, match=rf"--{flag.replace('_', '-')} needs .* {NEEDS[flag]}"):
        checked(lambda data, model: None, args, ())


def test_the_default_step_makes_schedule_plans():
    checked(forward_step, Namespace(**FLAGS | {"overlap_moe_expert_parallel_comm": True}), ())


def test_collected_outputs_do_not_depend_on_the_loss():
    loss = torch.full((1,), 6.0, requires_grad=True) * 1
    returned, _, collected = loss_of((loss, COUNT, {"lm loss": torch.tensor([6.0, 3.0])}))
    returned /= 3  # as Megatron's schedules do
    assert collected.loss.item() == 6 and collected.loss.shape == ()
    assert sum_reports([collected, collected])["lm loss"].tolist() == [12, 6]


def test_micro_batches_must_report_the_same_names():
    first, second = (loss_of((LOSS, COUNT, {name: ONE}))[-1] for name in "ab")
    with pytest.raises(TrainingError, match=r"\['a'\] for micro-batch 0 and \['b'\] for .* 1"):
        sum_reports([first, second])
