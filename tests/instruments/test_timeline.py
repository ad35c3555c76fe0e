"""Timelines as text and as a Chrome trace."""

from __future__ import annotations

import json

from mindspeed.instruments.timeline import Interval, Timeline, text, write_trace

LINE = Timeline(
    [
        Interval("compute", "compute", "attention", 0.0, 4.0, "forward", (("chunk", 0),)),
        Interval("ep", "communication", "dispatch", 4.0, 6.0, "forward"),
        Interval("compute", "wait", "dispatch", 4.0, 6.0),
        Interval("compute", "compute", "experts", 6.0, 10.0, "backward"),
        Interval("ep", "communication", "nothing", 6.0, 6.0),
        Interval("copies", "copy", "offload", 9.0, 12.0),
    ],
    ("compute", "ep", "copies"),
    thin={"copies": "compute"},
    marks=(6.0, 10.0),
)


def test_waits_are_dots_and_marks_are_bars() -> None:
    assert text(LINE, 48).splitlines() == [
        "compute attention------ ........experts--------",
        "ep                      dispatc |",
    ]


def test_names_are_cut_or_take_more_columns() -> None:
    assert text(LINE, 40, lambda one: 20 * "n").splitlines()[0] == (
        "compute nnnnnnnnnnnn ......nnnnnnnnnnnn"
    )
    whole = text(LINE, 40, lambda one: 20 * "n", idle="_", whole_names=True).splitlines()
    assert whole[1] == "ep      " + 42 * "_" + 20 * "n" + " |"


def test_a_trace_has_a_process_for_each_timeline_and_a_thread_for_each_lane(tmp_path) -> None:
    file = tmp_path / "trace.json"
    write_trace({"layer": LINE, "other": Timeline(LINE.intervals, lane_title="rank")}, file, "two")
    trace = json.loads(file.read_text())
    assert trace["otherData"] == {"title": "two"}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    first, second = names[:4], names[4:]
    assert first == ["layer", "compute", "ep", "copies"]
    assert second == ["other", "rank compute", "rank ep", "rank copies"]
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events] == [
        (0, "attention", 0.0, 4e6),
        (0, "dispatch", 4e6, 2e6),
        (0, "experts", 6e6, 4e6),
        (1, "dispatch", 4e6, 2e6),
        (2, "offload", 9e6, 3e6),
    ]
    assert events[0]["args"] == {"phase": "forward", "chunk": 0}
