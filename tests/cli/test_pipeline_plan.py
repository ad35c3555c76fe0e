"""``mindspeed pipeline plan``: table, JSON, pictures, files, errors."""

from __future__ import annotations

import json
import re

import pytest

from mindspeed.cli.main import main
from mindspeed.pipeline.schedule.comparison import ENTRIES, ScheduleJob, compare
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.csv_file import read_plan


def plan(*words: object) -> int:
    return main(["pipeline", "plan", *map(str, words)])


def prices(*words: object, capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    assert plan(*words, "--json") == 0
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)["schedules"]}


def test_the_table_has_every_schedule_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--pp", 4, "--vpp", 2, "--microbatches", 8) == 0
    printed = capsys.readouterr().out
    for name in ENTRIES:
        assert re.search(rf"^ *{name}\s", printed, re.MULTILINE), name
    assert "15.8 %" in printed and "5.9 %" in printed


def test_json_has_the_figures_of_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    found = prices("--pp", 8, "--vpp", 2, "--microbatches", 64, "--schedule",
                   "1f1b,interleaved,nanopipe,recompute-in-bubble", "--latency", 0.3,
                   capsys=capsys)  # fmt: skip
    assert round(100 * found["nanopipe"]["bubble"], 1) == 4.0
    assert round(100 * found["interleaved"]["bubble"], 1) == 9.2
    assert found["1f1b"]["peak_memory"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert found["recompute-in-bubble"]["peak_chunks"][0] == 16
    assert found["interleaved"]["messages"] == 2 * 15 * 64


def test_what_does_not_exist_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    found = prices("--pp", 8, "--microbatches", 8, capsys=capsys)
    assert "needs at least 16" in found["dualpipev"]["reason"]
    assert "model chunks" in found["interleaved"]["reason"]
    assert plan("--pp", 8, "--microbatches", 8, "--schedule", "dualpipev") != 0
    assert "no schedule exists" in capsys.readouterr().err


def test_a_slow_last_stage_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pp", 4, "--vpp", 2, "--microbatches", 16, "--schedule", "1f1b,interleaved")
    found = prices(*words, "--stage-costs", "1,1,1,1,1,1,1,2", capsys=capsys)
    # 1F1B has four stages of two of these: the last takes 3 / 2 of the others.
    assert found["1f1b"]["busy"] == pytest.approx([48, 48, 48, 72])
    assert found["interleaved"]["busy"] == pytest.approx([48, 48, 48, 72])


def test_sizes_give_the_number_of_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "1,2,3,4,5,5,5,5,5,5,5,5,5,4,3,2"
    equal = prices("--pp", 4, "--sizes", ",".join("4" * 16), "--schedule", "1f1b", capsys=capsys)
    found = prices("--pp", 4, "--sizes", sizes, "--schedule", "1f1b", capsys=capsys)
    # The costs are those of a micro-batch of the mean size, 4.
    bubble = [4 * (one["1f1b"]["makespan"] - 3 * 16) for one in (equal, found)]
    assert bubble == [36, 25]


def test_a_memory_limit_bounds_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    found = prices("--pp", 4, "--vpp", 2, "--microbatches", 16, "--pipeline-memory-limit", 1.0,
                   capsys=capsys)  # fmt: skip
    priced = {name: one for name, one in found.items() if "bubble" in one}
    assert "auto" in priced and "aiao" not in priced
    assert all(max(one["peak_memory"]) <= 5.5 + 1e-9 for one in priced.values())


def test_files_are_written_read_and_drawn(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "zb.csv", tmp_path / "zb.svg"
    words = ("--pp", 2, "--microbatches", 4)
    assert plan(*words, "--schedule", "zb-h1", "--dump", file, "--plot", picture, "--text") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^0 F0-* F1-* \.+B0", printed, re.MULTILINE)
    (again,) = compare(ScheduleJob(2, 1, 4), [str(file)])
    (named,) = compare(ScheduleJob(2, 1, 4), ["zb-h1"])
    assert read_plan(file).rows == again.simulation.plan.rows == named.simulation.plan.rows
    assert again.simulation.timeline == named.simulation.timeline
    trace = tmp_path / "zb.json"
    assert plan(*words, "--schedule", "zb-h1", "--trace", trace, "--reduction", 2) == 0
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert sum(e["dur"] for e in events if e["tid"] == 0) == 12e6  # 4 micro-batches: F, I and W
    assert [e["name"] for e in events if e["tid"] == 1] == ["0G"]
    drawn = picture.read_text()
    assert "weight gradients" in drawn and "zb-h1" in drawn
    assert plan(*words, "--schedule", file) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pp", 4), "--microbatches is missing"),
        (("--pp", 1, "--microbatches", 4), "--pp"),
        (("--pp", 4, "--microbatches", 4, "--schedule", "zbh1"), "'zbh1' is none of all"),
        (("--pp", 4, "--microbatches", 4, "--schedule", "no.csv"), "no.csv"),
        (("--pp", 4, "--microbatches", 4, "--sizes", "1,2"), "--sizes has 2 numbers"),
        (("--pp", 4, "--sizes", "1,x"), "--sizes 1,x"),
        (("--pp", 4, "--sizes", "1,nan"), "--sizes 1,nan"),
        (("--pp", 4, "--microbatches", 4, "--stage-costs", "1,1"), "--stage-costs has 2 numbers"),
        (("--pp", 4, "--microbatches", 4, "--forward", 0), "--forward"),
        (("--pp", 4, "--microbatches", 4, "--dump", "x.csv"), "--dump writes one schedule"),
        (("--pp", 4, "--microbatches", 4, "--plot", "x.gif"), "the file must end in"),
        (("--pp", 4, "--microbatches", 4, "--trace", "x.txt"), "the file must end in .json"),
        (("--pp", 4, "--microbatches", 4, "--mode", "perf"), "--mode belongs to mindspeed pipelin"),
        (("--pp", 256, "--vpp", 64, "--microbatches", 4096), "the pattern repeats"),
        (
            ("--pp", 4, "--microbatches", 4, "--pipeline-memory-limit", 0.1),
            "no schedule exists",
        ),
    ],
)
def test_bad_input_is_one_message(words, message, capsys: pytest.CaptureFixture[str]) -> None:
    with_code = 0
    try:
        with_code = plan(*words)
    except SystemExit as end:
        with_code = int(end.code or 0)
    assert with_code != 0
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out or message == "no schedule exists"  # refused before anything is printed


def test_flags_of_plan_are_refused_by_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "search", "--profile", "p.json", "--out", "o.json", "--text"]) == 1
    assert "--text belongs to mindspeed pipeline plan" in capsys.readouterr().err


def test_costs_of_joined_stages() -> None:
    job = ScheduleJob(2, 2, 4, Costs(), stage_costs=(1.0, 3.0, 1.0, 1.0))
    assert job.costs_for(2).stage_shares == (0.5, 1.5, 0.5, 0.5)
    assert job.costs_for(1).stage_shares == (2.0, 1.0)


def test_the_front_is_printed_drawn_and_limited(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--pp", 4, "--vpp", 2, "--microbatches", 8, "--front")
    picture = tmp_path / "front.svg"
    assert plan(*words, "--schedule", "1f1b,v-half", "--plot", picture) == 0
    printed = capsys.readouterr().out
    assert re.search(r"steps 1 1 1 1, turns 1 1 1, period 10 +1 +0.25 +50.5 +52.5 %", printed)
    assert re.search(r"zb-v +4 +1 +25.5 +5.9 %", printed)
    assert {"1f1b", "v-half", "v-auto"} <= set(re.findall(r"[\w-]+", picture.read_text()))
    assert plan(*words, "--json", "--pipeline-memory-limit", 0.4) == 0
    points = json.loads(capsys.readouterr().out)["front"]
    # Relative to the interleaved schedule of two chunks, which keeps 5.5.
    assert [one["memory"] for one in points] == [1, 1.5, 2]
    assert plan(*words, "--pipeline-memory-limit", 0.1) != 0
    assert "below the first point of the front: 1 A (steps" in capsys.readouterr().err
    assert plan(*words, "--text") != 0
    assert "--text shows one schedule" in capsys.readouterr().err


def test_a_limit_as_printed_has_the_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--pp", 3, "--microbatches", 6, "--front") == 0
    limits = re.findall(r" (0\.\d+|1) +[\d.]+ +[\d.]+ %", capsys.readouterr().out)
    for limit in limits:
        assert plan("--pp", 3, "--microbatches", 6, "--schedule", "v-auto", "--json",
                    "--pipeline-memory-limit", limit) == 0  # fmt: skip
        (found,) = json.loads(capsys.readouterr().out)["schedules"]
        assert max(found["peak_memory"]) == pytest.approx(3 * float(limit), abs=0.004)


def test_pairs_are_priced_and_written(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pp", 8, "--vpp", 2, "--microbatches", 32, "--exchange", 0.5)
    some = ("--schedule", "interleaved,dualpipev,zb-h1")
    alone, together = (prices(*words, *some, *more, capsys=capsys) for more in ((), ("--pairs",)))
    assert [alone[name]["makespan"] for name in ("interleaved", "dualpipev")] == [177.5, 170.5]
    assert [together[name]["makespan"] for name in ("interleaved", "dualpipev")] == [122.5, 122.5]
    assert "has no pairs" in together["zb-h1"]["reason"]
    file = tmp_path / "pairs.csv"
    assert plan(*words, "--pairs", "--schedule", "dualpipev", "--dump", file) == 0
    capsys.readouterr()
    steps = {
        x: prices(*words[:6], "--exchange", x, "--schedule", file, capsys=capsys)[str(file)]
        for x in (0, 0.5)
    }
    assert plan(*words[:6], "--schedule", file) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"pairs run one member after the other.* a step 3.5% longer", printed)
    # Without an exchange the members of pairs run one after the other.
    assert [steps[x]["makespan"] for x in (0, 0.5)] == [99.5, 122.5]
