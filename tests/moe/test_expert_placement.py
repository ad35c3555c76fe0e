"""Experts in other slots: the same losses to the bit, from any checkpoint."""

from __future__ import annotations

import random

import pytest
import torch

from mindspeed.moe.load.megatron_exchange import better
from mindspeed.moe.load.placed import moves
from mindspeed.moe.load.slots import inverse, nearest, slots_of, write
from tests.support.trainer_job import SETUP, metrics
from tests.training.matrix_job import train
from tests.training.test_layouts import MOE

EXPERTS = 8
MODEL = (
    f"{MOE} --num-experts {EXPERTS} --moe-router-topk 3 --expert-model-parallel-size 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --clip-grad 0 "
    "--train-iters 6 --lr-decay-iters 6 --weight-decay 0.1"
)


def test_rows_by_slot_and_back():
    generator = torch.Generator().manual_seed(1)
    routing_map = torch.rand(20, EXPERTS, generator=generator) < 0.3
    slots = [5, 2, 1, 7, 0, 4, 3, 6]
    rows = int(routing_map.sum())
    source, place = moves(routing_map, slots, rows)
    numbers = routing_map.t().nonzero()  # expert and token of each row, by number
    expected = routing_map[:, inverse(slots)].t().nonzero()
    found = numbers[source]
    assert [slots[expert] for expert in found[:, 0].tolist()] == expected[:, 0].tolist()
    assert found[:, 1].tolist() == expected[:, 1].tolist()
    assert torch.equal(source[place], torch.arange(rows))


def a_placement(path, seed):
    chance = random.Random(seed)
    layers = {}
    for layer in (1, 2, 4):  # the third has its experts in order
        slots = list(range(EXPERTS))
        chance.shuffle(slots)
        layers[layer] = slots
    write(path, 2, layers)
    assert slots_of([1, 0, 1, 0], 2) == [2, 0, 3, 1]
    return f"--moe-expert-placement {path}"


FORMS = {
    "adamw": (2, "", ""),
    "distributed, overlap": (
        4,
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
        "--moe-alltoall-overlap-comm --moe-zero-memory level1",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_six_steps_with_two_exchanges_equal_those_without_to_the_bit(form, ranks, tmp_path):
    world, optimizer, program = FORMS[form]
    file, first, second = tmp_path / "metrics.jsonl", tmp_path / "first", tmp_path / "second"

    def run(*flags):
        file.unlink(missing_ok=True)
        words = f"{MODEL} {optimizer} {program} --metrics-file {file} {' '.join(flags)}".split()
        ranks(world, train, words, setup=SETUP, backend=None, timeout=240)
        return [
            (one["iteration"], one["lm_loss"], one["load_balancing_loss"]) for one in metrics(file)
        ]

    run(f"--save {first} --exit-interval 2")
    plain = run(f"--load {first}")
    one, other = (a_placement(tmp_path / f"{seed}.json", seed) for seed in (1, 2))
    placed = run(f"--load {first} --save {second} --exit-interval 4 {one}")
    placed += run(f"--load {second} {other}")
    assert [iteration for iteration, *_ in placed] == list(range(3, 7))
    assert placed == plain


def test_an_exchange_moves_few_experts_and_only_where_it_helps():
    before = slots_of([0, 0, 0, 1, 1, 1, 2, 2, 2], 3)
    # The same groups of experts under other names of ranks: nothing moves.
    assert nearest([2, 2, 2, 0, 0, 0, 1, 1, 1], before, 3) == before
    after = nearest([2, 2, 0, 2, 0, 0, 1, 1, 1], before, 3)
    assert sorted(after) == list(range(9))
    assert [expert for expert in range(9) if after[expert] != before[expert]] == [2, 3]
    assert better([10] * 9, before, 3) is None
    uneven = [30, 30, 30, 10, 10, 10, 10, 10, 10]
    found = better(uneven, before, 3)
    assert found is not None and sorted(found) == list(range(9))
    assert better(uneven, found, 3) is None


IN_RUN = {
    "fp32, all-reduce": (2, "", ""),
    "bf16": (2, "--bf16", "--moe-alltoall-overlap-comm"),
    "distributed, replicas, gathered late": (
        4,
        "--bf16 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
        "--overlap-grad-reduce --overlap-param-gather",
        "",
    ),
}


@pytest.mark.weekly_cases("fp32, all-reduce")
@pytest.mark.slow
@pytest.mark.parametrize("form", IN_RUN)
def test_exchanges_in_a_run_change_no_loss_and_leave_a_plain_checkpoint(form, ranks, tmp_path):
    world, optimizer, program = IN_RUN[form]
    file, saved = tmp_path / "metrics.jsonl", tmp_path / "saved"

    def run(*flags):
        file.unlink(missing_ok=True)
        words = f"{MODEL} {optimizer} {program} --metrics-file {file} {' '.join(flags)}".split()
        found = ranks(world, counted, words, setup=SETUP, backend=None, timeout=240)
        assert len({tuple(one) for one in found}) == 1  # all ranks move the same
        return found[0], [(one["iteration"], one["lm_loss"]) for one in metrics(file)]

    _, plain = run()
    moved, exchanged = run(f"--moe-exchange-interval 2 --save {saved} --exit-interval 4")
    assert sum(moved) > 0
    _, resumed = run(f"--load {saved}")  # experts in order
    assert [*exchanged, *resumed] == plain


def counted(flags):
    """Train; experts moved by each exchange."""
    from mindspeed.moe.load.megatron_exchange import ExpertStates

    moved, exchange = [], ExpertStates.exchange

    def watched(self, *args):
        moved.append(exchange(self, *args))
        return moved[-1]

    ExpertStates.exchange = watched
    try:
        train(flags)
    finally:
        ExpertStates.exchange = exchange
    return moved
