"""Adaptive plans: predictions hold to the byte, ranks agree, budgets are kept, results stay."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from mindspeed.memory.adaptive import Adaptation
from mindspeed.memory.adaptive.profile import StepReplay
from mindspeed.memory.solver import Budget, LayerCosts, NothingFits, PlanCandidate, peak
from tests.memory import adaptive_ranks as jobs
from tests.support import gpt_ranks
from tests.support.trainer_job import SETUP

STEPS = ["--adaptive-recompute-profiling-step", "2"]
SIZE = "--adaptive-recompute-device-size"
# The rotary table, which layers share, is kept for layers that compute attention as a whole again.
ROTARY = 4 * gpt_ranks.SEQUENCE * 8
PEAK = re.compile(r"step (\d+) needed ([\d.]+) MiB; next plan: ([\d.]+) MiB")


@pytest.mark.weekly_cases("layernorm-gelu-bias-local")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spec"), [("rmsnorm-swiglu-gqa", "te"), ("layernorm-gelu-bias", "local")]
)
def test_twenty_random_plans_keep_the_predicted_bytes(ranks, name, spec):
    ((found, candidates),) = ranks(
        1, jobs.predicted_and_executed, name, spec, 20, setup=SETUP, timeout=200
    )
    assert candidates == 66
    assert len({expected for expected, *_ in found}) > 10
    assert {takes_table for *_, takes_table in found} == {False, True}
    for (kept, host), executed, takes_table in found:
        assert executed == (kept if takes_table else kept - ROTARY, host)


@pytest.mark.weekly_cases("rmsnorm-swiglu-gqa-3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers"),
    [("rmsnorm-swiglu-gqa", 2), ("rmsnorm-swiglu-gqa", 3), ("moe-grouped", 2)],
)
def test_no_plan_needs_less_than_the_smallest_peak_that_is_predicted(ranks, name, layers):
    """All choices between four plans of so many layers run, and need what was predicted."""
    ((pairs, smallest, needed),) = ranks(
        1, jobs.every_plan, name, "te", layers, setup=SETUP, timeout=280
    )
    assert len(pairs) == 4**layers
    for predicted, measured in pairs:
        assert predicted == pytest.approx(measured, rel=0.005)
    assert smallest == min(predicted for predicted, _ in pairs)
    assert smallest == pytest.approx(needed, rel=0.005)
    assert needed <= 1.001 * min(measured for _, measured in pairs)


@pytest.fixture(scope="module")
def train(rank_pool):
    """``train(world, flags, prepare, *args)``: results of all ranks, and what the first printed."""

    def run(world, flags, *prepare, env=None):
        options = {"setup": SETUP, "backend": None, "timeout": 240, "env": env}
        found = rank_pool.run(world, jobs.train, flags, *prepare, **options)
        return [result for result, _ in found], found[0][1]

    return run


@pytest.fixture(scope="module")
def plain(train):
    """One rank without the feature."""
    return train(1, [])


def losses(printed):
    return re.findall(r"lm loss: (\S+) .*? grad norm: (\S+)", printed)


@pytest.mark.slow
def test_budget_is_kept_and_weights_are_those_of_plain_training(train, plain):
    results, printed = train(1, [SIZE, "7", *STEPS])
    assert results == plain[0]
    peaks = [tuple(map(float, found)) for found in PEAK.findall(printed)]
    assert [step for step, *_ in peaks] == [2, 3, 4, 5]
    assert all(needed <= 7 and planned <= 7 for _, needed, planned in peaks)
    assert peaks[0][1] < peaks[1][1]  # the first steps need least
    assert "recompute" in printed


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-grouped-gemm "
EXPERTS += "--moe-token-dispatcher-type alltoall --transformer-impl transformer_engine"
PIPELINE = "--pipeline-model-parallel-size 2 --num-layers 6 --global-batch-size 16"


@pytest.mark.weekly_cases("six layers", "experts")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "flags", "budget"),
    [
        (1, "--num-layers 6", 10),
        (2, PIPELINE, 6),
        (1, f"--num-layers 3 --global-batch-size 32 {EXPERTS}", 9),
    ],
    ids=["six layers", "1f1b", "experts"],
)
def test_peaks_of_steps_are_predicted_within_two_percent(train, world, flags, budget):
    own = [SIZE, str(budget), "--adaptive-recompute-profiling-step", "4", "--train-iters", "9"]
    _, printed = train(world, [*flags.split(), *own])
    steps = [tuple(map(float, found)) for found in PEAK.findall(printed)]
    assert [step for step, *_ in steps] == [4, 5, 6, 7]
    for (_, _, predicted), (_, needed, _) in itertools.pairwise(steps):
        assert predicted == pytest.approx(needed, rel=0.02)
    assert steps[-1][1] > steps[0][1]


@pytest.mark.slow
def test_the_suites_spelling_is_the_same_feature(train, plain):
    flags = ["--auto-recompute-device-size", "7", "--auto-recompute-profiling-step", "2"]
    results, printed = train(1, flags)
    assert results == plain[0] and len(PEAK.findall(printed)) == 4


@pytest.mark.slow
def test_ranks_with_different_clocks_agree(train):
    tensor = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    flags = [*tensor, "--global-batch-size", "4"]
    expected, _ = train(2, flags)
    results, printed = train(2, [*flags, SIZE, "6", *STEPS], jobs.different_clocks)
    assert results == expected
    assert len(PEAK.findall(printed)) == 4


def test_different_sites_are_refused_on_all_ranks_before_the_first_step(train):
    results, printed = train(2, [SIZE, "7", *STEPS], jobs.different_sites)
    for result in results:
        assert "the activation plan of ranks 1 differs from that of rank 0" in result["error"]
    assert "iteration " not in printed


@pytest.mark.slow
def test_out_of_memory_is_survived_by_swapping(train, plain):
    """The profiled step is repeated with the same numbers, activations on the host."""
    flags = ["--adaptive-recompute-device-swap", *STEPS]
    env = {"MIN_SWAP_TENSOR_SIZE": "1024"}
    results, printed = train(1, flags, jobs.out_of_memory, 1, 6, env=env)
    assert results == plain[0]
    assert losses(printed) == losses(plain[1]) and len(losses(printed)) == 6
    assert printed.count("is repeated: pretended") == 1


@pytest.mark.slow
def test_a_repeated_step_counts_tokens_and_losses_once(ranks):
    function = jobs.counted_in_a_repeated_step
    setup = "tests.support.warm"
    ((runs, expected),) = ranks(1, function, False, setup=setup, timeout=120)
    ((again, found),) = ranks(1, function, True, setup=setup, timeout=120)
    assert (runs, again) == (3, 5)
    assert {"load_balancing_loss", "z_loss", "mtp", "loss"} <= set(expected)
    assert sum(name.endswith("local_tokens_per_expert") for name in expected) == 3
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.weekly
@pytest.mark.slow
def test_out_of_memory_after_the_choice_takes_a_smaller_budget(train, plain):
    results, printed = train(1, [SIZE, "7", *STEPS], jobs.out_of_memory, 4, 6)
    assert results == plain[0]
    assert printed.count("is repeated: pretended") == 1
    assert printed.count("memory is exhausted; next plan") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "hint"),
    [
        (1, "--adaptive-recompute-device-swap moves activations to the host"),
        (2, "only a run of one rank can repeat a step"),
    ],
)
def test_out_of_memory_that_cannot_be_survived_says_the_numbers(train, world, hint):
    results, _ = train(world, [SIZE, "7", *STEPS], jobs.out_of_memory, 1, 6)
    for result in results:
        assert re.search(
            rf"{SIZE}: out of memory in step 1 \(\d+ of [\d,]+ MiB allocated, budget 7 MiB\): "
            rf"pretended; {hint}",
            result["error"],
        )


@pytest.mark.slow
def test_budget_that_nothing_meets_names_the_smallest_peak(train):
    results, _ = train(1, [SIZE, "5", *STEPS])
    assert re.search(
        rf"{SIZE}: no plan fits into 5.0 MiB: the smallest predicted peak is 5.\d MiB, .*; it is "
        r"reached with 4 x .*; step 2 needed 5.\d MiB",
        results[0]["error"],
    )


KEEP, AGAIN = PlanCandidate("keep", 10, 0.0), PlanCandidate("again", 2, 1.0, transient=8)


def adaptation(device, layers=10, **beside):
    budget = Budget(device, **beside)
    return Adaptation([LayerCosts((KEEP, AGAIN))] * layers, budget, [AGAIN] * layers)


def kept(solution):
    return sum(one.kept for one in solution.chosen)


def test_budget_is_approached_from_below():
    """30 bytes apart from layers: peaks grow to the budget, never above."""
    state, truth = adaptation(device=100, static=30), Budget(0, static=30)
    peaks = [peak(state.layers, state.in_force, truth)]
    while not state.finished:
        state.next(peaks[-1])
        peaks.append(peak(state.layers, state.in_force, truth))
    assert peaks == sorted(peaks)
    assert 90 < peaks[-1] <= 100
    assert len(peaks) == 5


@pytest.mark.parametrize("device", [100, 135])
def test_a_peak_at_the_loss_does_not_count_second_runs(device):
    """40 bytes at the loss, 20 in backward: 60 are left for layers, or 95, less than all keep."""
    state = adaptation(device, static=20, head=20)
    needed = peak(state.layers, state.in_force, state.budget)
    assert needed == 40 + 20
    for _ in range(4):
        assert needed <= device
        state.next(needed)
        needed = peak(state.layers, state.in_force, Budget(0, static=20, head=20))
    assert device - 8 <= needed <= device


def test_a_peak_above_the_prediction_is_believed():
    state = adaptation(device=100, static=30)
    first = kept(state.next(58))
    predicted = peak(state.layers, state.in_force, state.budget)
    assert kept(state.next(predicted + 30)) < first
    assert kept(state.next(1000)) == 20  # what keeps least
    with pytest.raises(NothingFits):
        state.next(1000)


PARTS = PlanCandidate("parts", 3, 0.5, transient=4)
WHOLE = PlanCandidate("whole", 2, 1.0, transient=20)


def in_parts(device, bounds=()):
    budget = Budget(device, static=30)
    return Adaptation([LayerCosts((KEEP, PARTS, WHOLE))] * 6, budget, [WHOLE] * 6, bounds)


def test_a_plan_is_tried_before_a_budget_is_refused():
    """8 bytes more than predicted, but perhaps not with the plan that needs least."""
    state = in_parts(device=53)
    assert state.next(8 + 30 + 6 * 2 + 20).peak == 52
    while not state.finished:
        assert peak(state.layers, state.next(52).chosen, Budget(0, static=30)) <= 53


def test_a_budget_is_refused_when_the_tried_plan_needs_more():
    state = in_parts(device=53)
    state.next(8 + 30 + 6 * 2 + 20)
    with pytest.raises(NothingFits, match="the smallest predicted peak is"):
        state.next(60)


def test_a_plan_whose_backward_was_not_measured_is_tried():
    least = PlanCandidate("parts", 3, 0.5, transient=0)
    state = in_parts(device=49, bounds=[LayerCosts((KEEP, least, WHOLE))] * 6)
    assert {one.plan for one in state.next(30 + 6 * 2 + 20).chosen} == {"parts"}
    assert {one.transient for one in state.in_force} == {4}


def test_a_budget_below_every_plan_is_refused_at_once():
    with pytest.raises(NothingFits):
        in_parts(device=51).next(30 + 6 * 2 + 20)


def test_replay_starts_again_and_has_the_attributes_of_the_source():
    class Source:
        length = 3

        def __init__(self):
            self._items = iter("abc")

        def __next__(self):
            return next(self._items)

    data = StepReplay(Source())
    assert [next(data) for _ in range(2)] == ["a", "b"]
    again = data.from_the_start()
    assert [next(again) for _ in range(3)] == ["a", "b", "c"]
    assert again.length == 3
    assert StepReplay(None).from_the_start() is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"adaptive_recompute_profiling_step": 5},
            "--adaptive-recompute-profiling-step: has no effect without "
            "--adaptive-recompute-device-size, --adaptive-recompute-device-swap or "
            "--adaptive-memory-optimization",
        ),
        (
            {"adaptive_recompute_device_size": 80 << 30},
            "--adaptive-recompute-device-size 85899345920: is in MiB; did you mean 81920?",
        ),
        (
            {"adaptive_recompute_device_swap": True, "recompute_granularity": "full"},
            "--adaptive-recompute-device-swap: cannot be combined with --recompute-granularity",
        ),
        (
            {"adaptive_recompute_device_swap": True, "adaptive_memory_optimization": True},
            "--adaptive-recompute-device-swap: cannot be combined with "
            "--adaptive-memory-optimization",
        ),
        (
            {"adaptive_memory_optimization": True, "train_iters": 10},
            "--adaptive-recompute-profiling-step 10: leaves no step of --train-iters 10",
        ),
    ],
)
def test_refused(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(values, "cpu")
