"""Cadam, averages of weights, and states in host memory, in our trainer."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.trainer_job import SETUP, metrics
from tests.training.optimizer_states_job import stored_averages, train_and_count

SHARDED = "--use-distributed-optimizer --bf16"
MODES = {"fp32": "", "bf16": "--bf16", "sharded": SHARDED, "sharded-fp32": SHARDED.split()[0]}
BUCKETS = "--no-dist-ckpt-optim-fully-reshardable"  # the layout of the buffers
CADAM = "--optimizer cadam --adam-beta1 0.965"
EMA = "--optimizer-selection fused_ema_adamw --ema-decay 0.9"


@pytest.fixture
def run(rank_pool, tmp_path):
    """Trains; returns the metrics and what each rank says."""
    file = tmp_path / "metrics.jsonl"

    def run(world, flags):
        file.unlink(missing_ok=True)
        words = f"{flags} --metrics-file {file}".split()
        found = rank_pool.run(world, train_and_count, words, setup=SETUP, backend=None, timeout=240)
        assert {each["error"] for each in found} == {None}, found
        return [(r["lm_loss"], r["grad_norm"]) for r in metrics(file)], found

    return run


@pytest.fixture(scope="module")
def plain_run(rank_pool, tmp_path_factory):
    """``plain_run(mode)``: a run of four steps with states on the device, made once for each mode.

    Returns:
        Metrics, what each rank says, and the directory with the checkpoint of iteration 2.
    """
    made = {}

    def get(mode):
        if mode not in made:
            folder = tmp_path_factory.mktemp("plain")
            file, save = folder / "metrics.jsonl", folder / "save"
            flags = f"{MODES[mode]} --lr 1e-3 --train-iters 4 --save {save} --save-interval 2"
            words = f"{flags} --metrics-file {file}".split()
            found = rank_pool.run(2, train_and_count, words, setup=SETUP, backend=None, timeout=240)
            assert {each["error"] for each in found} == {None}, found
            made[mode] = [(r["lm_loss"], r["grad_norm"]) for r in metrics(file)], found, save
        return made[mode]

    return get


def same_weights(first, second):
    assert [each["digest"] for each in first] == [each["digest"] for each in second]


def quick(*fast):
    """The modes; all but ``fast`` are slow."""
    return [pytest.param(m, marks=[pytest.mark.slow] * (m not in fast)) for m in MODES]


@pytest.mark.weekly_cases(
    "cadam-fp32",
    "cadam-sharded",
    "ema-bf16",
    "ema-sharded-fp32",
    "cadam-sharded-fp32",
    "ema-fp32",
    "ema-sharded",
)
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", quick("sharded"))
@pytest.mark.parametrize("optimizer", [CADAM, EMA], ids=["cadam", "ema"])
def test_training_resumes_bit_for_bit(run, tmp_path, optimizer, mode):
    flags = f"{MODES[mode]} {optimizer} --lr 1e-3 --train-iters 4"
    if mode == "sharded":
        flags += f" {BUCKETS}"
    whole, first = run(2, f"{flags} --save {tmp_path / 'save'} --save-interval 2")
    rest, second = run(2, f"{flags} --load {tmp_path / 'save'} --ckpt-step 2")
    assert rest == whole[2:]
    same_weights(first, second)
    assert whole[-1][0] < whole[0][0]


@pytest.mark.weekly_cases("2-1-cadam", "1-2-ema", "2-1-ema")
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [CADAM, EMA], ids=["cadam", "ema"])
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_another_number_of_ranks_continues(run, tmp_path, optimizer, before, after):
    flags = f"{SHARDED} {optimizer} --lr 1e-3 --train-iters 4"
    whole, _ = run(before, f"{flags} --save {tmp_path / 'save'} --save-interval 2")
    rest, _ = run(after, f"{flags} --load {tmp_path / 'save'} --ckpt-step 2")
    assert np.array(rest) == pytest.approx(np.array(whole[2:]), rel=2e-3)


def test_cadam_keeps_6_bytes_per_weight_and_4_per_row(run):
    _, found = run(2, f"{SHARDED} {CADAM} --train-iters 1")
    for each in found:  # Megatron has the main weights, 4 bytes
        assert each["device"] == 2 * each["numel"] + 4 * each["rows"]


@pytest.mark.slow
def test_averages_are_those_of_one_rank(run, tmp_path, ranks):
    averages = []
    for world in (1, 2):
        save = tmp_path / str(world)
        _, found = run(world, f"{SHARDED} {EMA} --train-iters 3 --save {save}")
        assert all(each["device"] == 12 * each["numel"] for each in found)
        averages += ranks(1, stored_averages, str(save / "iter_0000003"), setup=SETUP)
    one, two = averages
    assert one.keys() == two.keys() and len(one) == 9
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=0, atol=2e-3)


@pytest.mark.weekly_cases("sharded-fp32")
@pytest.mark.slow
@pytest.mark.parametrize("mode", quick("sharded")[2:])
def test_swapped_states_train_and_resume_as_on_the_device(run, plain_run, tmp_path, mode):
    flags = f"{MODES[mode]} --lr 1e-3 --train-iters 4"
    swap = f"{flags} --swap-optimizer --swap-optimizer-times 4"
    plain, expected, saved = plain_run(mode)
    swapped, found = run(2, f"{swap} --save {tmp_path / 'swapped'} --save-interval 2")
    assert swapped == plain
    same_weights(found, expected)
    width = 12 if "--bf16" in flags else 8
    for each in found:
        assert each["device"] == 0 and each["host"] == width * each["numel"]
        assert each["copied"] == (4 * width * each["numel"],) * 2
        assert each["peak"] <= 2 * width * each["numel"] / 4
    for source, with_swap in ((saved, swap), (tmp_path / "swapped", flags)):
        rest, again = run(2, f"{with_swap} --load {source} --ckpt-step 2")
        assert rest == plain[2:]
        same_weights(again, expected)


@pytest.mark.weekly_cases("fp32", "bf16")
@pytest.mark.slow
@pytest.mark.parametrize("mode", quick("bf16")[:3])
def test_virtual_states_train_and_resume_as_on_the_device(run, plain_run, tmp_path, mode):
    flags = f"{MODES[mode]} --lr 1e-3 --train-iters 4"
    virtual = f"{flags} --virtual-optimizer all"
    plain, expected, _ = plain_run(mode)
    mapped, found = run(2, f"{virtual} --save {tmp_path / 'save'} --save-interval 2")
    assert mapped == plain
    same_weights(found, expected)
    for each in found:
        assert each["device"] == 0 and each["host"] == 8 * each["numel"]
    rest, again = run(2, f"{flags} --load {tmp_path / 'save'} --ckpt-step 2")
    assert rest == plain[2:]
    same_weights(again, expected)
