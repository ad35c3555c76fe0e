"""The executor on many ranks of one process, against scores written out in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from mindspeed.attention import (
    Mask,
    Plan,
    SequenceSharding,
    Sizes,
    check,
    contiguous,
    cost_metrics,
    executor,
    planners,
)
from mindspeed.attention import zigzag as zigzag_sharding
from mindspeed.attention.communication import Exchange, run_in_one_process
from mindspeed.attention.cost_metrics import calls_per_stage
from mindspeed.attention.kernels import SoftmaxOptions
from mindspeed.attention.plan_compiler import compile_plan
from mindspeed.attention.varlen_batches import MAX_SEQUENCES
from mindspeed.errors import ConfigError
from tests.support import truth

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


ALIGNED = 96
"""Divides into the chunks of 1, 2, 3, 4, 8 and 16 ranks."""

HEADS = {
    "multi-head": (4, 4, 8, 8),
    "grouped": (4, 2, 8, 8),
    "multi-query": (4, 1, 8, 8),
    "latent": (3, 3, 12, 8),
}
"""Query heads, key heads, head size, value size."""


def run(
    plan: Plan,
    qkv: truth.Tensors,
    dout: torch.Tensor,
    *,
    slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[truth.Tensors, list[executor.RankTraffic], list[int]]:
    """Output and gradients in the order of positions; every rank's traffic and kept bytes."""
    rows = [plan.sharding.positions(rank) for rank in range(plan.ranks)]
    traffic = [executor.RankTraffic() for _ in rows]
    softmax = [SoftmaxOptions(SCALE, slopes, dropout) for _ in rows]
    mine = [tuple(x[index] for x in qkv) for index in rows]
    forward = run_in_one_process(
        [
            executor.forward(
                plan, rank, *mine[rank], softmax=softmax[rank], sink=sink, traffic=traffic[rank]
            )
            for rank in range(plan.ranks)
        ]
    )
    backward = run_in_one_process(
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
    kept = [sum(x.untyped_storage().nbytes() for x in saved.values()) for *_, saved in forward]
    return tuple(torch.cat(x)[back] for x in zip(*parts, strict=True)), traffic, kept


def sharding_of(size: int, ranks: int) -> SequenceSharding:
    """Zigzag where it divides."""
    return (contiguous if size % (2 * ranks) else zigzag_sharding)(size, ranks)


def scattered_plans(mask: Mask, ranks: int) -> list[Plan]:
    """Owners of many small pieces, as adaptive shardings have them, of unequal numbers of rows."""
    generator = random.Random(ranks)
    owners = [generator.randrange(ranks) for _ in range(0, mask.size, 3)]
    pieces = [(a, min(a + 3, mask.size)) for a in range(0, mask.size, 3)]
    own = [[x for x, owner in zip(pieces, owners, strict=True) if owner == r] for r in range(ranks)]
    sharding = SequenceSharding(tuple(tuple(parts) for parts in own))
    return [planners.needed_only(mask, sharding, 3), planners.mesh(mask, sharding, ranks)]


def plans_for(mask: Mask, sharding: SequenceSharding) -> list[Plan]:
    """Every planner, with its options where there are several."""
    divisors = [n for n in range(2, sharding.ranks + 1) if sharding.ranks % n == 0]
    smallest, largest = divisors[:1], divisors[-1:]
    plans = [
        planners.ring(mask, sharding, w) for w in (1, *smallest) if w == 1 or w < sharding.ranks
    ]
    plans += [planners.mesh(mask, sharding, a) for a in sorted({*smallest, *largest})]
    return [*plans, planners.all_gather(mask, sharding), planners.needed_only(mask, sharding)]


def assert_counted(plan: Plan, sizes: Sizes, traffic: list[executor.RankTraffic]) -> None:
    """Bytes, messages and calls of the executor are those of the cost metrics."""
    price = cost_metrics(plan)
    received = zip(price.forward_bytes(sizes), price.backward_bytes(sizes), strict=True)
    assert [counted.received for counted in traffic] == [sum(both) for both in received]
    assert sum(counted.sent for counted in traffic) == sum(x.received for x in traffic)
    assert tuple(counted.messages for counted in traffic) == price.messages
    every = [*calls_per_stage(plan), *calls_per_stage(plan, "backward")]
    assert [counted.calls for counted in traffic] == [sum(n) for n in zip(*every, strict=True)]


@pytest.mark.weekly_cases(
    *(f"{mask}-16" for mask in ("full", "every token *", "two-sided *", "window", "prefix")),
    *("full-8", "documents-8", "batch-8", "prefix-8", "two-sided window-8", "window-8"),
    "documents-16",
)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("name", MASKS)
def test_every_algorithm_equals_the_single_process_reference(name: str, ranks: int) -> None:
    mask = MASKS[name]
    heads = list(HEADS.values())[(ranks + list(MASKS).index(name)) % len(HEADS)]
    *qkv, dout = truth.tensors(SIZE, *heads)
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE)
    sizes = Sizes(*heads, itemsize=8)
    plans = plans_for(mask, sharding_of(SIZE, ranks))
    for plan in (*plans, *scattered_plans(mask, ranks)):
        results, traffic, _ = run(plan, tuple(qkv), dout)
        for got, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=EXACT, rtol=EXACT)
        assert_counted(plan, sizes, traffic)


@pytest.mark.parametrize("heads", HEADS)
def test_heads_head_sizes_and_lengths_that_do_not_divide(heads: str) -> None:
    size, ranks = 37, 6
    *qkv, dout = truth.tensors(size, *HEADS[heads])
    mask = Mask.documents((0, 9, size))
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE)
    for plan in plans_for(mask, contiguous(size, ranks)):
        results, *_ = run(plan, tuple(qkv), dout)
        torch.testing.assert_close(results, expected, atol=EXACT, rtol=EXACT)


class TestCache:
    """Keep what arrived, or send it again."""

    mask = Mask.documents((0, 30, 31, ALIGNED))
    sizes = Sizes(4, 2, 8, 6, itemsize=8)

    @pytest.mark.slow
    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_gradients_are_the_same_bit_for_bit_and_bytes_are_as_counted(self, ranks: int) -> None:
        qkv, dout = truth.tensors(ALIGNED)[:3], truth.tensors(ALIGNED)[3]
        for plan in plans_for(self.mask, zigzag_sharding(ALIGNED, ranks)):
            plain, _, _ = run(plan, qkv, dout)
            for policy in planners.kv_cache.POLICIES:
                cached = planners.with_cache(plan, policy)
                check(cached)
                results, traffic, kept = run(cached, qkv, dout)
                assert all(torch.equal(a, b) for a, b in zip(results, plain, strict=True))
                assert_counted(cached, self.sizes, traffic)
                assert tuple(kept) == cost_metrics(cached).saved_bytes(self.sizes)

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_formulas(self, ranks: int) -> None:
        others, sizes = ranks - 1, Sizes(4, 2, 8, 8, itemsize=2)
        sharding = zigzag_sharding(ALIGNED, ranks)
        unit = ALIGNED // ranks * sizes.row  # keys and values of a rank
        for plan, home in (
            (planners.all_gather(Mask.full(ALIGNED), sharding), 0),
            (planners.needed_only(Mask.full(ALIGNED), sharding), 0),
            (planners.ring(Mask.full(ALIGNED), sharding), 1),  # the last chunk stays anyway
        ):
            for policy, sent, kept in (
                (None, others - home, home),
                ("half", (others - home) / 2, (others + home) / 2),
                ("full", 0, others),
            ):
                price = cost_metrics(planners.with_cache(plan, policy))
                assert set(price.forward_bytes(sizes)) == {others * unit}
                assert set(price.backward_bytes(sizes)) == {(sent + others) * unit}
                assert set(price.saved_bytes(sizes)) == {kept * unit}

    def test_unknown_policies(self) -> None:
        plan = planners.ring(self.mask, zigzag_sharding(ALIGNED, 2))
        with pytest.raises(ConfigError, match="policy 'most' is not one of full, half"):
            planners.with_cache(plan, "most")


def test_a_mesh_sends_what_its_formula_says() -> None:
    ranks, rows = 8, ALIGNED // 8
    sizes = Sizes(heads=4, groups=4, head_size=16, value_size=16)
    sharding = zigzag_sharding(ALIGNED, ranks)
    keys, queries = rows * sizes.row, rows * sizes.query_row
    numbers = rows * sizes.statistics_row
    for a, b in ((1, 8), (2, 4), (4, 2), (8, 1)):
        price = cost_metrics(planners.mesh(Mask.full(ALIGNED), sharding, a))
        forward = (a - 1) * (2 * queries + numbers) + (b - 1) * keys
        backward = (a - 1) * (3 * queries + 2 * numbers) + 2 * (b - 1) * keys
        assert set(price.forward_bytes(sizes)) == {forward}
        assert set(price.backward_bytes(sizes)) == {backward}
        assert price.balance == 1.0
        assert cost_metrics(planners.mesh(Mask.causal(ALIGNED), sharding, a)).balance > 0.97
    # The table of the best meshes: ranks, query heads for each key head.
    best = {(8, 1): 4, (8, 4): 2, (8, 8): 1, (16, 1): 4, (16, 8): 2, (64, 1): 8, (64, 8): 4}
    assert {key: planners.mesh_side(key[0], key[1], 1) for key in best} == best


def test_dropout_of_the_backward_pass_is_that_of_the_forward_pass() -> None:
    """Values of one column each show the probabilities that were kept: a dense oracle with them."""
    size, heads, p = 32, 2, 0.25
    q, k, _, _ = truth.tensors(size, heads, heads, 8, 8)
    values = torch.eye(size, dtype=torch.float64)[:, None].expand(size, heads, size).contiguous()
    dout = torch.randn(size, heads, size, dtype=torch.float64, generator=torch.Generator())
    mask = Mask.documents((0, 9, 11, size))
    plans = plans_for(mask, zigzag_sharding(size, 4))
    for plan in (*plans, *(planners.with_cache(plan, "full") for plan in plans)):
        torch.manual_seed(11)
        (out, *grads), *_ = run(plan, (q, k, values), dout, dropout=p)
        kept = (out != 0).permute(1, 0, 2).double() / (1 - p)
        share = kept[:, mask.dense()].count_nonzero() / (heads * mask.area())
        assert 0.65 < share < 0.85
        expected = truth.attend(q, k, values, dout, mask.dense(), scale=SCALE, kept=kept)
        torch.testing.assert_close((out, *grads), expected, atol=EXACT, rtol=EXACT)


class TestFewCalls:
    """Hundreds of documents are a handful of operator calls."""

    size, ranks = 1 << 15, 8

    def mask(self, count: int) -> Mask:
        generator = random.Random(3)
        bounds = sorted(generator.sample(range(1, self.size), count - 1))
        return Mask.documents((0, *bounds, self.size))

    @pytest.mark.parametrize("count", [100, 300])
    def test_calls_do_not_grow_with_documents(self, count: int) -> None:
        mask, sharding = self.mask(count), zigzag_sharding(self.size, self.ranks)
        adaptive = planners.adaptive(mask, self.ranks)
        for plan in (planners.needed_only(mask, sharding), planners.ring(mask, sharding), adaptive):
            assert max(cost_metrics(plan).regions) > count // 8
            for stage in (*calls_per_stage(plan), *calls_per_stage(plan, "backward")):
                assert max(stage) <= (6 if plan is adaptive else 2)

    def test_documents_of_one_process_are_one_call_without_a_copy(self) -> None:
        plan = planners.ring(self.mask(100), contiguous(self.size, 1))
        (call,) = compile_plan(plan, 0, "forward").stages[0].calls
        assert len(call.batch.sequences) == 100
        assert call.q_rows.as_slice == call.k_rows.as_slice == slice(0, self.size)

    def test_a_batch_has_no_more_sequences_than_operators_accept(self) -> None:
        plan = planners.ring(
            Mask.documents(range(0, 2 * MAX_SEQUENCES + 3, 2)), contiguous(2002, 1)
        )
        assert calls_per_stage(plan) == ((2,),)

    def test_no_query_occurs_twice_in_a_call(self) -> None:
        plan = planners.adaptive(self.mask(40), self.ranks)
        for rank in range(self.ranks):
            for step in compile_plan(plan, rank, "backward").stages:
                for call in step.calls:
                    for index in (call.q_rows, call.k_rows):
                        rows = index.tensor(torch.device("cpu")).tolist()
                        assert len(rows) == len(set(rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["documents", "two-sided window", "prefix"])
def test_alibi_uses_positions_of_the_whole_sequence(name: str) -> None:
    *qkv, dout = truth.tensors(SIZE)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    mask = MASKS[name]
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE, slopes=slopes)
    for plan in (*plans_for(mask, zigzag_sharding(SIZE, 4)), *scattered_plans(mask, 4)):
        results, *_ = run(plan, tuple(qkv), dout, slopes=slopes)
        torch.testing.assert_close(results, expected, atol=EXACT, rtol=EXACT)


def test_the_sink_is_added_once() -> None:
    *qkv, dout = truth.tensors(SIZE)
    sink = torch.tensor([0.1, -1.0, 2.0, 0.0], dtype=torch.float64)
    mask = MASKS["window"]
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE, sink=sink)[:4]
    for plan in plans_for(mask, zigzag_sharding(SIZE, 4)):
        results, *_ = run(plan, tuple(qkv), dout, sink=sink)
        torch.testing.assert_close(results, expected, atol=EXACT, rtol=EXACT)


def error_of_key_gradients(algorithm, ranks: int) -> float:
    """Relative error of dk in bf16 against float64 of the same rounded inputs."""
    size = 256
    *qkv, dout = (x.bfloat16() for x in truth.tensors(size, 4, 4, 64, 64))
    mask = Mask.causal(size)
    results, *_ = run(algorithm(mask, zigzag_sharding(size, ranks)), tuple(qkv), dout)
    exact = truth.attend(*(x.double() for x in (*qkv, dout)), mask.dense(), scale=SCALE)
    return float((results[2].double() - exact[2]).norm() / exact[2].norm())


@pytest.mark.slow
def test_gradients_sent_to_their_owner_are_more_precise_than_those_of_a_ring() -> None:
    direct = [error_of_key_gradients(planners.needed_only, ranks) for ranks in (4, 16)]
    in_a_ring = [error_of_key_gradients(planners.ring, ranks) for ranks in (4, 16)]
    assert direct[1] < 1.15 * direct[0]  # flat in the number of ranks
    assert in_a_ring[1] > 1.05 * direct[1]


def test_fully_masked_rows_are_zero() -> None:
    *qkv, dout = truth.tensors(8)
    blind = Mask(8, Mask.causal(4).regions)
    for plan in plans_for(blind, contiguous(8, 4)):
        (out, dq, dk, dv), *_ = run(plan, tuple(qkv), dout)
        assert not out[4:].any() and not dq[4:].any() and not dk[4:].any() and not dv[4:].any()
        assert all(math.isfinite(float(x.sum())) for x in (out, dq, dk, dv))


def test_an_unsent_message_stops_all_ranks() -> None:
    def waits():
        yield (yield Exchange(0, True, torch.zeros(0, 3), (), ((1, 2),)))

    def ends():
        yield (yield Exchange(0, True, torch.zeros(0, 3), (), ()))

    with pytest.raises(RuntimeError, match=r"ranks \[0\] wait for messages that nobody sends"):
        run_in_one_process([waits(), ends()])
