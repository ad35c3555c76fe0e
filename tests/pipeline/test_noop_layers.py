"""A model with no-op layers is the model without them, wherever the layers stand.

Losses and every gradient are compared with the smaller model on one rank, in fp32; the pipeline
sums in another order, hence a relative tolerance of 1e-5.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from mindspeed.pipeline.noop_layers import indices_of, problem_of, with_noop, without_noop
from tests.pipeline.noop_ranks import MOE, Case, run_all

SETUP = "tests.support.warm"
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES = {
    "one-rank": Case((0, 2)),
    "one-rank-local": Case((3,), spec="local"),
    "one-rank-recompute": Case((1,), config=RECOMPUTE),
    "one-rank-moe": Case((1, 2), config=MOE),
    "pipeline": Case((0, 3), pipeline=2),
    "pipeline-local": Case((2,), spec="local", pipeline=2),
    "pipeline-moe": Case((0, 1), config=MOE, pipeline=2),
    "pipeline-first-stage-empty": Case((0, 1), pipeline=2),
    "pipeline-last-stage-empty": Case((2, 3), pipeline=2),
    "virtual-pipeline": Case((0,), pipeline=2, chunks=2),
    "virtual-pipeline-moe": Case((2,), config=MOE, pipeline=2, chunks=2),
    "virtual-pipeline-chunks-in-the-middle-empty": Case((1, 2), pipeline=2, chunks=2),
    "virtual-pipeline-recompute": Case(
        (3, 6), num_layers=8, pipeline=2, chunks=2, config=RECOMPUTE
    ),
}


def smaller(case: Case) -> Case:
    """The same model without the no-op layers, on one rank."""
    config = dict(case.config)
    if "moe_layer_freq" in config:
        config["moe_layer_freq"] = without_noop(config["moe_layer_freq"], case.noop_layers)
    num_layers = case.num_layers - len(case.noop_layers)
    plain = {"noop_layers": (), "pipeline": 1, "chunks": None}
    return replace(case, num_layers=num_layers, config=config, **plain)


@pytest.fixture(scope="module")
def steps(rank_pool):
    """(step with no-op layers merged over ranks, step of the smaller model) by case."""
    one = {name: case for name, case in CASES.items() if case.pipeline == 1}
    two = {name: case for name, case in CASES.items() if case.pipeline == 2}
    models = {f"smaller {name}": smaller(case) for name, case in CASES.items()}
    (found,) = rank_pool.run(1, run_all, {**one, **models}, setup=SETUP, timeout=240)
    first, last = rank_pool.run(2, run_all, two, setup=SETUP, timeout=240)
    for name in two:
        found[name] = replace(
            last[name],
            gradients={**first[name].gradients, **last[name].gradients},
            checkpoint=first[name].checkpoint | last[name].checkpoint,
        )
    return {name: (found[name], found[f"smaller {name}"]) for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_of_the_smaller_model(name, steps):
    step, expected = steps[name]
    assert step.losses == pytest.approx(expected.losses, rel=1e-5)
    assert step.gradients.keys() == expected.gradients.keys()
    for key, gradient in step.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_hold_what_those_of_the_smaller_model_hold(name, steps):
    step, expected = steps[name]
    assert step.checkpoint == expected.checkpoint


def test_initialisation_is_that_of_the_smaller_model(steps):
    step, expected = steps["one-rank"]
    assert step.projection_std == expected.projection_std == 0.02 / math.sqrt(2 * 2)


def test_another_layer_gives_other_losses(steps):
    """The comparison can fail."""
    assert steps["one-rank"][0].losses != pytest.approx(steps["one-rank-local"][0].losses, rel=1e-5)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ((4,), "names layer 4; the 4 layers are 0 to 3"),
        ((1, 1), "names layer 1 twice"),
        ((0, 1, 2, 3), "names all 4 layers"),
    ],
)
def test_impossible_indices_are_refused_before_training(indices, text):
    assert text in problem_of(indices, 4)
    with pytest.raises(ConfigError, match=re.escape(text)):
        resolve({"noop_layers": indices, "num_layers": 4}, "cpu")


def test_a_negative_index_is_outside_the_range_of_the_flag():
    assert "names layer -1" in problem_of((-1,), 4)
    with pytest.raises(ConfigError, match="--noop-layers -1 must be from 0"):
        resolve({"noop_layers": (-1,), "num_layers": 4}, "cpu")


@pytest.mark.parametrize("noop_layers", [(), (0,), (1, 3), (3, 4)])
def test_lists_over_layers_lose_and_regain_the_noop_layers(noop_layers):
    layers = [0 if index in noop_layers else index + 1 for index in range(5)]
    assert with_noop(without_noop(layers, noop_layers), noop_layers) == layers


def test_text_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="--noop-layers takes a whole number, not 'x'"):
        resolve({"noop_layers": ["0,x"], "num_layers": 4}, "cpu")
    for wrong in ("x", "-1"):  # what is read before the flags are checked
        with pytest.raises(ConfigError, match=f"--noop-layers takes numbers from 0, not '{wrong}'"):
            indices_of([f"0,{wrong}"])
    assert indices_of(["0, 7", "3"]) == indices_of((0, 7, 3)) == (0, 7, 3)
    assert indices_of(None) == ()


def test_features_that_need_whole_layers_are_refused():
    values = {"noop_layers": (0,), "num_layers": 4, "overlap_moe_expert_parallel_comm": True}
    with pytest.raises(ConfigError, match="--overlap-moe-expert-parallel-comm"):
        resolve(values, "cpu")


@pytest.mark.parametrize("given", [["0,2"], ["0", "2"], ["0,", "2"], (0, 2), "0,2"])
def test_both_spellings_of_a_list_are_accepted(given):
    configuration = resolve({"noop_layers": given, "num_layers": 4}, "cpu")
    assert configuration.features["noop-layers"].noop_layers == (0, 2)
