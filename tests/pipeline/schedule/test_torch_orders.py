"""The schedules of torch.distributed.pipelining, through its csv files.

The same order has the same price; another order of torch's is never faster than ours.
"""

import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from mindspeed.pipeline.schedule.checker import check
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.csv_file import read_plan, write_plan
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate

# Name in torch -> our request, whether the rows are equal.
SAME = {
    "Interleaved1F1B": (ScheduleRequest(kind="interleaved"), True),
    "DualPipeV": (ScheduleRequest(kind="dualpipev", split_cooldown=True), True),
    "LoopedBFS": (ScheduleRequest(kind="aiao", strict=True), False),  # backwards in reverse
    "InterleavedZeroBubble": (ScheduleRequest(kind="zb-h1"), False),
    "ZBVZeroBubble": (ScheduleRequest(kind="zb-v"), False),
}
SIZES = [(2, 4), (4, 8), (4, 16), (8, 16)]
COSTS = [
    Costs(),
    Costs(latency=0.1),
    Costs(1, 1.5, 0.75),
    Costs(1, 1.2, 0.9, latency=0.05),
    Costs(1, 0.8, 1.2, latency=0.3),
]


def torch_schedule(name, p, v, m):
    stages = [
        SimpleNamespace(
            num_stages=p * v, group_size=p, group_rank=0, stage_index=stage, is_last=False,
            has_backward=True, submod=None, stage_index_to_group_rank=None,
        )
        for stage in range(v)
    ]  # fmt: skip
    return torch_schedules.get_schedule_class(name)(stages, m)


def imported(name, p, v, m, tmp_path):
    file = tmp_path / "torch.csv"
    torch_schedule(name, p, v, m)._dump_csv(str(file), format="compute_only")
    plan = read_plan(file, ranks=p, chunks=v, num_microbatches=m)
    check(plan)
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_imported_orders_have_our_price(name, tmp_path):
    request, equal = SAME[name]
    for p, m in SIZES:
        theirs = imported(name, p, 2, m, tmp_path)
        for costs in COSTS:
            ours = build_plan(replace(request, costs=costs), p, 2, m)
            found, expected = simulate(theirs.without_pairs(), costs), simulate(ours, costs)
            if equal:
                assert theirs.rows == ours.rows
            if name in ("Interleaved1F1B", "DualPipeV", "LoopedBFS"):
                assert found.makespan == pytest.approx(expected.makespan)
                assert found.peak_memory == expected.peak_memory
            elif costs == Costs():
                assert found.bubble == pytest.approx(expected.bubble)
                assert max(found.peak_memory) == max(expected.peak_memory)
            elif name == "ZBVZeroBubble":
                # With uneven times ours may need the memory of half a micro-batch for it.
                assert expected.makespan <= found.makespan * 1.006
                more = replace(request, costs=costs, memory_limit=p + 0.5)
                faster = simulate(build_plan(more, p, 2, m), costs).makespan
                assert min(faster, expected.makespan) <= found.makespan + 1e-9
            else:
                assert expected.makespan <= found.makespan + 1e-9
            assert max(expected.peak_memory) <= max(found.peak_memory)


@pytest.mark.parametrize(("p", "m", "step"), [(4, 16, 60.5), (8, 32, 122.5)])
def test_pairs_of_torchs_dualpipev_are_read_and_ours_are_faster(p, m, step, tmp_path):
    """Torch runs the members one after the other; its table priced as if they overlapped."""
    costs = Costs(exchange=0.5, layers=8)
    theirs = imported("DualPipeV", p, 2, m, tmp_path)
    request = ScheduleRequest(kind="dualpipev", pairs=True, costs=costs)
    ours = simulate(build_plan(request, p, 2, m), costs).makespan
    assert theirs.paired and ours == step < simulate(theirs, costs).makespan


def test_our_1f1b_is_that_of_torch():
    """Op by op: torch's listing counts the forwards of inner ranks from 1 and more."""
    for p, m in SIZES:
        stage = SimpleNamespace(
            num_stages=p, group_size=p, group_rank=0, stage_index=0, is_last=False,
            has_backward=True, submod=None,
        )  # fmt: skip
        theirs = torch_schedules.get_schedule_class("1F1B")(stage, m)._get_pipeline_order()
        ours = build_plan(ScheduleRequest(), p, 1, m)
        for rank, row in enumerate(ours.rows):
            found = [one.computation_type.value for one in theirs[rank] if one is not None]
            assert found == [action.op.replace("G", "REDUCE_GRAD") for action in row]


def test_torch_reads_our_files(tmp_path):
    for kind in ("interleaved", "nanopipe", "zb-h1", "aiao"):
        plan = build_plan(ScheduleRequest(kind=kind), 4, 2, 8)
        write_plan(tmp_path / "ours.csv", plan)
        runtime = torch_schedule("Interleaved1F1B", 4, 2, 8)
        runtime._load_csv(str(tmp_path / "ours.csv"), format="compute_only")
        rows = [
            [str(action) for action in row if action is not None]
            for _, row in sorted(runtime.pipeline_order.items())
        ]
        assert rows == [[str(a) for a in row if a.op != "G"] for row in plan.rows]
        with open(tmp_path / "ours.csv", newline="") as file:
            assert rows == list(csv.reader(file))
        assert all(runtime.pipeline_order_with_comms.values())
