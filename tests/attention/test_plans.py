"""Plans of every algorithm: verified, with the costs of the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mindspeed.attention import (
    Mask,
    Plan,
    SequenceSharding,
    Sizes,
    WrongPlanError,
    check,
    contiguous,
    cost_metrics,
    planners,
    zigzag,
)
from mindspeed.attention import plan as make
from mindspeed.attention.plan import Stage
from mindspeed.attention.planning import ALGORITHMS
from mindspeed.errors import ConfigError


def plans(mask: Mask, sharding: SequenceSharding) -> Iterator[Plan]:
    """Every planner with every option that divides."""
    for window in range(1, max(sharding.ranks, 2)):
        if sharding.ranks % window == 0:
            yield planners.ring(mask, sharding, window)
    for side in range(2, sharding.ranks + 1):
        if sharding.ranks % side == 0:
            yield planners.mesh(mask, sharding, side)
    yield planners.all_gather(mask, sharding)
    for steps in (1, 2, 3):
        yield planners.needed_only(mask, sharding, steps)
    yield planners.with_cache(planners.ring(mask, sharding), "half")
    yield planners.with_cache(planners.needed_only(mask, sharding), "full")


@st.composite
def masks(draw: st.DrawFn, size: int = 96) -> Mask:
    boundaries = sorted(draw(st.lists(st.integers(0, size), max_size=8)))
    causal = draw(st.booleans())
    window = draw(st.one_of(st.none(), st.tuples(st.integers(0, 20), st.integers(0, 20))))
    prefix = draw(st.integers(0, 5))
    cu_seqlens = (0, *boundaries, size)
    return Mask.documents(cu_seqlens, causal=causal, window=window, prefix=prefix)


@given(mask=masks(), ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 16]), even=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_plan_is_proven(mask: Mask, ranks: int, even: bool) -> None:
    sharding = zigzag(96, ranks) if even else contiguous(96, ranks)
    for plan in plans(mask, sharding):
        check(plan)
        price = cost_metrics(plan)
        assert sum(price.area) == mask.area()
        assert sum(price.dkv_sent) == sum(
            b - a for s in plan.backward for m in s.dkv for a, b in m.ranges
        )


def test_lengths_that_do_not_divide() -> None:
    sharding = contiguous(101, 7)
    for plan in plans(Mask.causal(101), sharding):
        check(plan)


class TestWrongPlansAreRefused:
    plan = planners.ring(Mask.causal(32), zigzag(32, 4))

    def broken(self, **changes: object) -> Plan:
        return replace(self.plan, **changes)

    def stage(self, number: int, **changes: object) -> tuple[Stage, ...]:
        stages = list(self.plan.forward)
        stages[number] = replace(stages[number], **changes)
        return tuple(stages)

    def test_verification_finds_a_missing_pair(self) -> None:
        work = list(self.plan.forward[1].work)
        work[2] = work[2][1:]
        with pytest.raises(WrongPlanError, match="ring: forward computes"):
            check(self.broken(forward=self.stage(1, work=tuple(work))))

    def test_verification_finds_a_pair_computed_twice(self) -> None:
        work = list(self.plan.forward[1].work)
        work[2] = (work[2][0], *work[2][:-1])
        with pytest.raises(WrongPlanError, match="computes"):
            check(self.broken(forward=self.stage(1, work=tuple(work))))

    def test_verification_finds_absent_keys(self) -> None:
        with pytest.raises(WrongPlanError, match="forward 1: rank 0 has no keys"):
            check(self.broken(forward=self.stage(1, kv=())))

    def test_verification_finds_a_sender_without_the_data(self) -> None:
        moves = tuple(m._replace(buffer=-1) for m in self.plan.forward[2].kv)
        with pytest.raises(WrongPlanError, match="lacks"):
            check(self.broken(forward=self.stage(2, kv=moves)))

    def test_verification_finds_a_gradient_that_does_not_reach_its_owner(self) -> None:
        stages = list(self.plan.backward)
        stages[-2] = replace(stages[-2], dkv=())
        with pytest.raises(WrongPlanError, match="gradients of 8 keys do not leave rank"):
            check(self.broken(backward=tuple(stages)))

    def test_verification_finds_queries_that_the_sender_does_not_own(self) -> None:
        one = planners.mesh(Mask.causal(32), zigzag(32, 4), 2)
        stage = one.forward[1]
        asks = tuple(move._replace(src=(move.src + 2) % 4) for move in stage.q)
        forward = (one.forward[0], replace(stage, q=asks))
        with pytest.raises(WrongPlanError, match=r"mesh 2 x 2: forward 1: .* lacks"):
            check(replace(one, forward=forward))
        forward = (one.forward[0], replace(stage, q=()))
        with pytest.raises(WrongPlanError, match="does not own"):
            check(replace(one, forward=forward))

    def test_verification_finds_values_without_keys(self) -> None:
        half = planners.with_cache(planners.all_gather(Mask.causal(32), zigzag(32, 4)), "half")
        with pytest.raises(WrongPlanError, match="all-gather: rank 0 has not kept the keys"):
            check(replace(half, saved_k=()))

    def test_verification_finds_a_token_without_owner(self) -> None:
        sharding = SequenceSharding((((0, 4),), ((5, 8),)))
        with pytest.raises(WrongPlanError, match="position 4 has no owner"):
            check(planners.ring(Mask.causal(8), sharding))


class TestFigures:
    size, rows = 64 * 16, 64 * 2
    sizes = Sizes(heads=8, groups=2, head_size=16, value_size=16)

    @pytest.mark.parametrize("ranks", [2, 4, 8, 16])
    @pytest.mark.parametrize("window", [1, 2, 4])
    def test_ring(self, ranks: int, window: int) -> None:
        if window >= ranks:
            window = 1
        rows = self.size // ranks
        price = cost_metrics(
            planners.ring(Mask.causal(self.size), zigzag(self.size, ranks), window)
        )
        assert set(price.kv_received) == {(ranks - 1) * rows}
        # The last chunk is kept and a rank's own keys need no way home: one transfer fewer.
        assert set(price.kv_received_backward) == {(ranks - 2) * rows}
        assert set(price.dkv_sent) == {(ranks - 1) * rows}
        assert price.balance == 1.0
        assert self.sizes.row == 2 * 2 * 16 * 2

    @pytest.mark.parametrize(("ranks", "expected"), [(4, 4 / 7), (8, 8 / 15), (16, 16 / 31)])
    def test_contiguous_shardings_are_not_balanced(self, ranks: int, expected: float) -> None:
        price = cost_metrics(planners.ring(Mask.causal(1 << 14), contiguous(1 << 14, ranks)))
        assert price.balance == pytest.approx(expected, rel=2e-3)

    @pytest.mark.parametrize("window", [2, 4, 8])
    def test_few_transfers_of_a_double_ring_cross_windows(self, window: int) -> None:
        ranks = 16
        plan = planners.ring(Mask.causal(self.size), zigzag(self.size, ranks), window)
        moves = [move for stage in plan.forward for move in stage.kv]
        crossing = [move for move in moves if move.src // window != move.dst // window]
        assert len(moves) == ranks * (ranks - 1)
        assert len(crossing) == ranks * (ranks // window - 1)
        for stage in plan.forward:  # what crosses has a whole round to arrive
            if any(move.src // window != move.dst // window for move in stage.kv):
                assert plan.forward.index(stage) - stage.posted == window

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_each_stage_of_a_ring_is_equal_work(self, ranks: int) -> None:
        plan = planners.ring(Mask.causal(self.size), zigzag(self.size, ranks))
        rows = self.size // ranks
        for stage in plan.forward:
            areas = [sum(region.area() for region in own) for own in stage.work]
            assert max(areas) - min(areas) == 0
            assert areas[0] in (rows * rows // 2, rows * rows // 2 + rows // 2)

    def test_all_gather_and_needed_only(self) -> None:
        ranks, rows = 8, self.size // 8
        mask, sharding = Mask.causal(self.size), zigzag(self.size, 8)
        everything, needed = (
            cost_metrics(planners.all_gather(mask, sharding)),
            cost_metrics(planners.needed_only(mask, sharding)),
        )
        assert set(everything.kv_received) == {(ranks - 1) * rows}
        assert max(needed.kv_received) == (ranks - 1) * rows
        assert sum(needed.kv_received) == 3 * ranks * (ranks - 1) * rows // 4
        assert needed.balance == everything.balance == 1.0

    def test_a_window_needs_few_keys_of_contiguous_neighbours(self) -> None:
        size, ranks = 1 << 17, 8
        whole = size - size // ranks
        contiguous_rows = cost_metrics(
            planners.needed_only(Mask.causal(size, 4096), contiguous(size, ranks))
        )
        zigzag_rows = cost_metrics(
            planners.needed_only(Mask.causal(size, 4096), zigzag(size, ranks))
        )
        assert max(contiguous_rows.kv_received) / whole == pytest.approx(0.036, abs=1e-3)
        assert max(zigzag_rows.kv_received) / whole == pytest.approx(0.071, abs=1e-3)


def test_all_ranks_make_the_same_plan() -> None:
    one, two = (planners.needed_only(Mask.causal(64), zigzag(64, 4)) for _ in range(2))
    assert one.digest == two.digest
    assert one.digest != planners.needed_only(Mask.causal(64), contiguous(64, 4)).digest


class TestPlan:
    """From a mask and a number of ranks."""

    documents = Mask.documents((0, 200, 210, 768))

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_every_algorithm_has_a_sharding(self, algorithm: str) -> None:
        made = make(self.documents, 4, algorithm, granularity=8, cache="half")
        check(made)
        assert made.ranks == 4
        assert made.saved_k

    def test_a_given_sharding(self) -> None:
        sharding = contiguous(768, 4)
        assert make(self.documents, 4, "mesh", sharding=sharding, queries=4).sharding is sharding
        with pytest.raises(ConfigError, match="the sharding is for 4 ranks, the plan for 2"):
            make(self.documents, 2, "ring", sharding=sharding)

    def test_ulysses_is_refused_as_a_plan(self) -> None:
        with pytest.raises(ConfigError, match=r"'ulysses' is not one of ring.*ulysses_attention"):
            make(self.documents, 4, "ulysses")


@pytest.mark.parametrize("window", [0, 3, 8])
def test_windows_that_do_not_divide_the_ranks(window: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"--cp-window-size {window} must be in \[1, 8\) and divide 8"
    ):
        planners.ring(Mask.causal(64), zigzag(64, 8), window)


def test_lengths_that_zigzag_cannot_shard() -> None:
    with pytest.raises(ConfigError, match=r"S=100 must be divisible by 2\*CP=16"):
        zigzag(100, 8)
