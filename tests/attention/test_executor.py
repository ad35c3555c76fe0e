"""The executor on many ranks of one process, against scores written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed.attention import Layout, Mask, Plan, Sizes, contiguous, executor, figures, planners
from mindspeed.attention import zigzag as zigzag_layout
from mindspeed.attention.kernels import Softmax
from mindspeed.attention.layout import length
from mindspeed.attention.transport import Post, run_together

from . import truth

SIZE, SCALE = 48, 0.3
EXACT = 1e-12

MASKS = {
    "causal": Mask.causal(SIZE),
    "full": Mask.full(SIZE),
    "window": Mask.causal(SIZE, 5),
    "documents": Mask.documents((0, 1, 3, 3, 20, 21, SIZE)),
    "prefix": Mask.documents((0, 3, 20, SIZE), prefix=4),
    "two-sided window": Mask.documents((0, 20, SIZE), causal=False, window=(3, 2)),
    "batch": Mask.batch([Mask.causal(SIZE // 2), Mask.documents((0, 7, SIZE // 2))]),
    "every token its own document": Mask.documents(range(SIZE + 1)),
}


def run(
    plan: Plan, qkv: truth.Tensors, dout: torch.Tensor, **options: torch.Tensor | None
) -> tuple[truth.Tensors, list[executor.Traffic]]:
    """Output and gradients in the order of positions, and every rank's traffic."""
    rows = [plan.layout.positions(rank) for rank in range(plan.ranks)]
    traffic = [executor.Traffic() for _ in rows]
    softmax = [Softmax(SCALE, options.get("slopes")) for _ in rows]
    sink = options.get("sink")
    mine = [tuple(x[index] for x in qkv) for index in rows]
    forward = run_together(
        [
            executor.forward(
                plan, rank, *mine[rank], softmax=softmax[rank], sink=sink, traffic=traffic[rank]
            )
            for rank in range(plan.ranks)
        ]
    )
    backward = run_together(
        [
            executor.backward(
                plan, rank, dout[rows[rank]], *mine[rank], *forward[rank],
                softmax=softmax[rank], traffic=traffic[rank],
            )
            for rank in range(plan.ranks)
        ]
    )  # fmt: skip
    back = torch.cat(rows).argsort()
    parts = [(out[0], *grads) for out, grads in zip(forward, backward, strict=True)]
    return tuple(torch.cat(x)[back] for x in zip(*parts, strict=True)), traffic


def plans_for(mask: Mask, layout: Layout) -> list[Plan]:
    windows = [w for w in (1, 2, 3) if w == 1 or (layout.ranks % w == 0 and w < layout.ranks)]
    plans = [planners.ring(mask, layout, window) for window in windows]
    return [*plans, planners.all_gather(mask, layout), planners.needed_only(mask, layout)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", MASKS)
def test_every_algorithm_is_the_single_process_truth(name: str, ranks: int) -> None:
    mask, (*qkv, dout) = MASKS[name], truth.tensors(SIZE)
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE)
    row = Sizes(4, 2, 8, 6, itemsize=8).row
    for layout in (zigzag_layout(SIZE, ranks), contiguous(SIZE, ranks)):
        for plan in plans_for(mask, layout):
            results, traffic = run(plan, tuple(qkv), dout)
            for got, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(got, wanted, atol=EXACT, rtol=EXACT)
            price = figures(plan)
            gives = [move for stage in plan.backward for move in stage.give]
            for rank, counted in enumerate(traffic):
                returned = sum(length(move.ranges) for move in gives if move.dst == rank)
                rows = price.fetched[rank] + price.refetched[rank] + returned
                assert counted.received == rows * row
                assert counted.messages == price.messages[rank]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 1), (6, 3)])
def test_heads_lengths_and_value_sizes(heads: int, groups: int) -> None:
    size = 37
    *qkv, dout = truth.tensors(size, heads, groups, 8, 4)
    mask = Mask.documents((0, 9, size))
    plan = planners.needed_only(mask, contiguous(size, 5))
    results, _ = run(plan, tuple(qkv), dout)
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE)
    torch.testing.assert_close(results, expected, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("algorithm", [planners.ring, planners.needed_only])
def test_alibi_uses_positions_of_the_whole_sequence(algorithm) -> None:
    *qkv, dout = truth.tensors(SIZE)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    mask = MASKS["documents"]
    results, _ = run(algorithm(mask, zigzag_layout(SIZE, 4)), tuple(qkv), dout, slopes=slopes)
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE, slopes=slopes)
    torch.testing.assert_close(results, expected, atol=EXACT, rtol=EXACT)


def test_a_sink_takes_its_share_once() -> None:
    *qkv, dout = truth.tensors(SIZE)
    sink = torch.tensor([0.1, -1.0, 2.0, 0.0], dtype=torch.float64)
    mask = MASKS["causal"]
    results, _ = run(planners.ring(mask, zigzag_layout(SIZE, 4)), tuple(qkv), dout, sink=sink)
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE, sink=sink)[:4]
    torch.testing.assert_close(results, expected, atol=EXACT, rtol=EXACT)


def error_of_key_gradients(algorithm, ranks: int) -> float:
    """Relative error of dk in bf16 against float64 of the same rounded inputs."""
    size = 256
    *qkv, dout = (x.bfloat16() for x in truth.tensors(size, 4, 4, 64, 64))
    mask = Mask.causal(size)
    results, _ = run(algorithm(mask, zigzag_layout(size, ranks)), tuple(qkv), dout)
    exact = truth.attend(*(x.double() for x in (*qkv, dout)), mask.dense(), scale=SCALE)
    return float((results[2].double() - exact[2]).norm() / exact[2].norm())


def test_gradients_that_go_straight_home_are_more_precise_than_travelling_ones() -> None:
    direct = [error_of_key_gradients(planners.needed_only, ranks) for ranks in (4, 16)]
    travelling = [error_of_key_gradients(planners.ring, ranks) for ranks in (4, 16)]
    assert direct[1] < 1.15 * direct[0]  # flat in the number of ranks
    assert travelling[1] > 1.05 * direct[1]


def test_rows_that_see_nothing_are_zero() -> None:
    *qkv, dout = truth.tensors(8)
    blind = Mask(8, Mask.causal(4).regions)
    (out, dq, dk, dv), _ = run(planners.ring(blind, contiguous(8, 2)), tuple(qkv), dout)
    assert not out[4:].any() and not dq[4:].any() and not dk[4:].any() and not dv[4:].any()
    assert all(math.isfinite(float(x.sum())) for x in (out, dq, dk, dv))


def test_a_message_that_nobody_sends_stops_all_ranks() -> None:
    def waits():
        yield (yield Post(0, True, torch.zeros(0, 3), (), ((1, 2),)))

    def ends():
        yield (yield Post(0, True, torch.zeros(0, 3), (), ()))

    with pytest.raises(RuntimeError, match=r"ranks \[0\] wait for messages that nobody sends"):
        run_together([waits(), ends()])
