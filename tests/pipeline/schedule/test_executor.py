"""Plans train as Megatron's own schedules do, to the last bit."""

from __future__ import annotations

from tests.pipeline.schedule.step_ranks import Layout, compare

SETUP = "tests.support.warm"


def test_plans_equal_megatrons_schedules_on_two_ranks(ranks):
    layouts = {
        "one chunk": (Layout(pipeline=2), [(4, "1f1b")]),
        "local spec": (Layout(pipeline=2, spec="local"), [(4, "1f1b")]),
        "two chunks": (Layout(pipeline=2, chunks=2), [(4, "interleaved")]),
    }
    for found in ranks(2, compare, layouts, setup=SETUP):
        assert found == {name: [] for name in layouts}
