"""An executed step: its times by action, the costs that follow and the late stage."""

from __future__ import annotations

import json

import pytest

from mindspeed.cli.main import main
from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.pipeline.schedule.trace import read_trace, write_rank
from tests.pipeline.schedule.toy_ranks import traced


def written(folder, kind, chunks, costs, ranks=4, **changes):
    """A step that takes what the simulator says."""
    plan = build_plan(ScheduleRequest(kind=kind, costs=costs, **changes), ranks, chunks, 8)
    simulation = simulate(plan, costs)
    for rank, row in enumerate(simulation.timeline):
        write_rank(folder, plan, rank, 3, row)
    return simulation


@pytest.mark.parametrize("latency", [0, 0.2])
@pytest.mark.parametrize(("kind", "chunks"), [("zb-h1", 1), ("nanopipe", 2), ("v-half", 2)])
def test_the_costs_of_a_step_are_those_that_it_ran_with(kind, chunks, latency, tmp_path):
    costs = Costs(1.0, 1.2, 0.8, latency=latency)
    simulation = written(tmp_path, kind, chunks, costs)
    trace = read_trace(tmp_path)
    found = trace.costs()
    assert trace.plan.rows == simulation.plan.rows
    assert (found.forward, found.input_gradient, found.weight_gradient) == pytest.approx(
        (1, 1.2, 0.8)
    )
    assert found.latency == pytest.approx(latency)
    assert trace.seconds == pytest.approx(simulation.makespan)
    assert trace.idle == pytest.approx(simulation.idle)
    assert simulate(trace.plan, found).makespan == pytest.approx(simulation.makespan)
    assert trace.late_stage() is None


def test_the_late_stage_has_a_name(tmp_path, capsys):
    shares = (0.4, 0.5, 0.5, 0.6, 0.5, 0.5, 0.9, 0.5)
    written(tmp_path, "interleaved", 2, Costs(0.01, 0.01, 0.01, stage_shares=shares))
    stage, factor = read_trace(tmp_path).late_stage()
    assert (stage, factor) == (6, pytest.approx(0.9 / (sum(shares) / 8)))
    assert main(["pipeline", "trace", str(tmp_path), "--text"]) == 0
    printed = capsys.readouterr().out
    assert "late: stage 6 (rank 2) takes 1.64 of the mean stage" in printed
    assert "next time: --pipeline-costs 11,11,11,0" in printed
    assert "\nplan\n" in printed and "\nstep\n" in printed


def test_the_command_prints_draws_and_refuses(tmp_path, capsys):
    written(tmp_path, "zb-h1", 1, Costs(0.03, 0.03, 0.03, latency=0.003))
    picture, trace = tmp_path / "step.svg", tmp_path / "events.json"
    words = ["pipeline", "trace", str(tmp_path)]
    assert main([*words, "--json", "--plot", str(picture), "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["costs"] == "30,30,30,3" and found["late_stage"] is None
    assert found["seconds"] == pytest.approx(found["simulated"])
    assert "plan" in picture.read_text() and json.loads(trace.read_text())
    for wrong, text in (
        (["pipeline", "trace"], "the folder of --pipeline-trace is missing"),
        ([*words, "--pp", "4"], "--pp belongs to mindspeed pipeline plan"),
        ([*words, "--vpp", "1"], "--vpp belongs to mindspeed pipeline plan"),
        (["pipeline", "plan", str(tmp_path)], "a folder belongs to mindspeed pipeline trace"),
        (["pipeline", "search", "--plot", "x.png"], "--plot belongs to mindspeed pipeline plan"),
    ):
        assert main(wrong) != 0
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"step": 3, "actions": []}', "are not those of rank 1"),
        ('{"step": 4, "actions": null}', "has no actions"),
        ("[]", "no trace of --pipeline-trace"),
        ('{"step": 3, "actions": [["0Q1", 0, 1]]}', "no action with start and end"),
    ],
)
def test_what_is_no_trace_is_refused(content, text, tmp_path):
    written(tmp_path, "1f1b", 1, Costs())
    (tmp_path / "rank-1.json").write_text(content)
    with pytest.raises(ConfigError, match=text):
        read_trace(tmp_path)


def test_traces_of_two_steps_are_refused(tmp_path):
    written(tmp_path, "1f1b", 1, Costs())
    file = tmp_path / "rank-1.json"
    file.write_text(file.read_text().replace('"step": 3', '"step": 5'))
    with pytest.raises(ConfigError, match=r"of steps \[3, 5\]"):
        read_trace(tmp_path)


@pytest.mark.parametrize("pairs", [False, True])
def test_the_third_step_is_written_by_every_rank(pairs, ranks, tmp_path):
    plan = build_plan(ScheduleRequest(kind="dualpipev", pairs=pairs), 2, 2, 4)
    assert ranks(2, traced, plan, str(tmp_path)) == [[False, False, True, False]] * 2
    trace = read_trace(tmp_path)
    assert tuple(tuple(one.action for one in row) for row in trace.rows) == plan.rows
    assert trace.plan.paired == plan.paired
    for row in trace.rows:
        moments = [moment for one in row for moment in (one.start, one.end)]
        assert moments == sorted(moments) and moments[0] >= 0
