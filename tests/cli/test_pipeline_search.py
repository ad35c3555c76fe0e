"""``mindspeed pipeline search`` writes what a search finds, with its flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed.cli.main import main

PROFILES = Path(__file__).parents[1] / "pipeline" / "automated" / "profiles"


def test_writes_the_result_and_prints_before_and_after(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ["pipeline", "search", "--profile", str(PROFILES / "moe.json"), "--out", str(out)]
    assert main(words) == 0
    text = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert f"flags   {' '.join(result['flags'])}" in text
    assert "before" in text and "MiB on the fullest rank" in text
    first = out.read_bytes()
    assert main(words) == 0
    assert out.read_bytes() == first, "a profile has one result"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--out x.json", "--profile is missing"),
        ("--profile nothing.json --out x.json", "there is no such file"),
        ("--profile moe.json --out x.json --memory 0.001", "no division of the layers fits"),
        ("--profile moe.json --out x.json --mode perf", "remove the virtual stages"),
    ],
)
def test_says_what_is_wrong(flags, message, capsys, monkeypatch):
    monkeypatch.chdir(PROFILES)
    assert main(["pipeline", "search", *flags.split()]) != 0
    assert message in capsys.readouterr().err
