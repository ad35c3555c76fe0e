"""The report of an accelerator, without one: its commands exist, and what is cut off is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import accelerator_report as tool
from accelerator_report import Machine, Part, Report

MACHINE = Machine("cuda", "NVIDIA H200", 1, "h200", "")


def test_every_command_of_the_report_parses(capsys):
    assert tool.main(["--dry"]) == 0
    said = capsys.readouterr().out
    assert "NVIDIA H200" in said
    assert "Ascend910B2" in said
    assert all(said.count(f"\n  {part.name} ") == 2 for part in tool.PARTS)


@pytest.mark.parametrize(
    "command",
    [
        "benchmarks/ops.py --device cuda --no-such-flag",
        "benchmarks/no_such_file.py",
        "-m pytest -m cuda tests/ops/test_rms_norm.py",
        "-m torch.distributed.run --nproc-per-node 8 -m mindspeed calibrate --bass h100",
    ],
)
def test_the_dry_run_refuses_a_command_that_would_not_start(command, capsys):
    assert tool.dry([MACHINE], [Part("wrong", "", 1, (command,))]) == 1
    assert "cuda wrong: " in capsys.readouterr().err


def test_each_part_leaves_its_files_and_the_report_says_how_it_ended(tmp_path):
    copy = (
        "import shutil, time; shutil.copy('"
        + str(tmp_path / "h200-report.json")
        + "', '{out}.json')"
    )
    parts = [
        Part("good", "", 60, (f"-S -c \"{copy}; print('fast')\"",)),
        Part("bad", "", 60, ("-S -c \"raise SystemExit('no such kernel')\"", "-S -c never")),
        Part("long", "", 1, (f'-S -c "{copy}; time.sleep(600)"',)),
        Part("several", "", 60, ("-S -c 0",), least=2),
        Part("other", "", 60, ("-S -c 0",), devices=("npu",)),
        Part("loop", "", 60, ("-S -c {megatron}",)),
    ]
    tool.measure(Report(MACHINE, tmp_path), parts, 600)
    found = json.loads((tmp_path / "h200-report.json").read_text())["parts"]
    states = {name: one["state"] for name, one in found.items()}
    assert states == {
        "good": "ran", "bad": "failed", "long": "cut", "several": "skipped", "other": "skipped",
        "loop": "skipped",
    }  # fmt: skip
    assert found["good"]["said"] == "fast"
    assert found["bad"]["why"] == ["no such kernel"]
    assert found["several"]["why"] == "needs 2 devices, here is 1"
    assert "MEGATRON_LM_PATH" in found["loop"]["why"]
    # What the report said while a part ran is what would be left if it were killed then.
    during = json.loads((tmp_path / "h200-good.json").read_text())["parts"]
    assert (during["good"]["state"], during["long"]["why"]) == ("cut", "not reached")
    assert (tmp_path / "h200-long.json").is_file()
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "h200-good.json", "h200-long.json", "h200-report.json",
    ]  # fmt: skip


def test_parts_that_time_does_not_reach_are_skipped_and_earlier_ones_kept(tmp_path):
    (tmp_path / "h200-report.json").write_text('{"parts": {"early": {"state": "ran"}}}')
    report = Report(MACHINE, tmp_path)
    report.read()
    tool.measure(report, [Part("late", "", 60, ("-S -c 0",))], 0)
    parts = json.loads((tmp_path / "h200-report.json").read_text())["parts"]
    assert parts["early"]["state"] == "ran"
    assert (parts["late"]["state"], parts["late"]["why"]) == ("skipped", "no time was left")


@pytest.mark.parametrize(
    "name, preset, slug",
    [
        ("NVIDIA H200", "h200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100", "h100-80gb-hbm3"),
        ("NVIDIA GB200", "gb200", "gb200"),
        ("Ascend910B2", "ascend-910b", "ascend910b2"),
        ("NVIDIA GeForce RTX 4090", "generic", "geforce-rtx-4090"),
    ],
)
def test_devices_have_the_preset_of_their_name(name, preset, slug):
    assert tool.preset_of(name) == preset
    assert Machine("cuda", name, 1, preset, "").slug == slug


def test_the_table_of_devices_says_what_the_files_show(tmp_path, monkeypatch):
    pytest.importorskip("tomllib")  # Python 3.11
    import hardware_table

    monkeypatch.setattr(hardware_table, "RESULTS", tmp_path)
    assert "emulated" in hardware_table.table(0)
    states = {"exact": {"state": "ran"}, "ops": {"state": "cut"}, "jobs": {"state": "failed"}}
    states["memory"] = {"state": "skipped"}  # in this run: an earlier one left its file
    found = {"device": "Ascend910B2", "kind": "npu", "count": 8, "torch": "2.13.0", "parts": states}
    (tmp_path / "ascend910b2-report.json").write_text(json.dumps(found))
    (tmp_path / "ascend910b2-ops.json").write_text(json.dumps(found))
    (tmp_path / "ascend910b2-memory.json").write_text("{}")
    said = hardware_table.table(0)
    assert (
        "| 8 x Ascend910B2 (torch 2.13.0) | ran | exactness of every operator, "
        "[ways to save memory](benchmarks/results/ascend910b2-memory.json); "
        "cut off [operators](benchmarks/results/ascend910b2-ops.json); "
        "failed memory and seconds beside the planned ones |" in said
    )
    assert "emulated" not in said
    assert "several GPUs" not in said
    assert set(hardware_table.PARTS) == {part.name for part in tool.PARTS} | {"calibration"}
