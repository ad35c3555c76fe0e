"""The bubble and the memory of every schedule: published tables and closed formulas."""

import pytest

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate

# Bubble in % and peak memory in A with tF = tI = tW = 1, no latency. Columns: p = 4, 8, 16, each
# with m = 8, 16, 64; "-" where the schedule does not exist.
SIZES = [(p, m) for p in (4, 8, 16) for m in (8, 16, 64)]
TABLE_A = {
    ("1f1b", 1): "27.3/4 15.8/4 4.5/4 46.7/8 30.4/8 9.9/8 65.2/8 48.4/16 19.0/16",
    ("zb-h1", 1): "11.1/4 5.9/4 1.5/4 22.6/8 12.7/8 3.5/8 48.9/8 23.8/16 7.2/16",
    ("interleaved", 2): "15.8/5.5 8.6/5.5 2.3/5.5 30.4/8 17.9/11.5 5.2/11.5 - 31.9/16 10.5/23.5",
    ("nanopipe", 2): "5.9/5.5 3.0/5.5 0.8/5.5 12.7/8 6.8/11.5 1.8/11.5 - 13.5/16 3.8/23.5",
    ("zb-h1", 2): "5.9/4 3.0/4 0.8/4 12.7/8 6.8/8 1.8/8 - 13.5/16 3.8/16",
    ("zb-v", 2): "5.9/4 3.0/4 0.8/4 12.7/8 6.8/8 1.8/8 39.2/8 13.5/16 3.8/16",
    ("aiao", 2): "15.8/7.5 8.6/11.5 2.3/35.5 30.4/8 17.9/15.5 5.2/39.5 - 31.9/16 10.5/47.5",
    ("interleaved", 4): "8.6/4.8 4.5/4.8 1.2/4.8 17.9/8 9.9/9.8 2.7/9.8 - 19.0/16 5.5/19.8",
    ("nanopipe", 4): "3.0/4.8 1.5/4.8 0.4/4.8 6.8/8 3.5/9.8 0.9/9.8 - 7.2/16 1.9/19.8",
    ("zb-h1", 4): "3.0/4 1.5/4 0.4/4 6.8/8 3.5/8 0.9/8 - 7.2/16 1.9/16",
}


def test_interleaving_divides_the_bubble_by_the_chunks():
    for v in (1, 2, 4):
        simulation = simulate(build_plan(ScheduleRequest(), 8, v, 64))
        assert simulation.bubble_time == pytest.approx(7 * 3 / v)
        assert max(simulation.peak_memory) == (8 if v == 1 else 8 + 7 / v)
    slow = simulate(build_plan(ScheduleRequest(), 8, 2, 64), Costs(latency=0.1))
    assert round(100 * slow.bubble, 1) == 6.6
