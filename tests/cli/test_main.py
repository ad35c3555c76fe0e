"""The command line: help, unknown commands, listings, errors in one piece."""

from __future__ import annotations

import json

import pytest

from mindspeed.cli.main import COMMANDS, GROUPS, main
from tests.support import forked


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in COMMANDS)
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(COMMANDS) <= set(grouped)


def test_every_command_has_help(ranks):
    words = [[command, "--help"] for command in COMMANDS]
    (answers,) = ranks(1, forked.run_all, words, setup="tests.support.warm", backend=None)
    for (command, _), (status, text) in zip(words, answers, strict=True):
        assert status == 0 and len(text) > 100, (command, text)


def test_unknown_command_suggests_the_closest(capsys):
    assert main(["pretrian"]) == 2
    assert "closest: pretrain" in capsys.readouterr().err


def test_a_misspelt_flag_of_any_command_suggests_the_closest(capsys):
    assert main(["attention", "plan", "--hedas", "4", "--cp=2"]) == 1
    text = capsys.readouterr().err
    assert (
        text
        == "mindspeed attention: unknown flag --hedas; did you mean --heads, --help, --head-dim?\n"
    )
    assert main(["doctor", "here"]) == 1
    assert "unexpected argument 'here': no flag takes it" in capsys.readouterr().err


def test_without_a_command_the_way_comes_before_the_list(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 0
    way, _, rest = capsys.readouterr().out.partition("\n\n")
    commands = [line.split("mindspeed ")[1].split()[0] for line in way.splitlines()]
    assert commands == ["quickstart", "finetune", "chat"] and set(commands) <= set(COMMANDS)
    assert rest.startswith("usage: ")


def test_features_as_json_and_dry_run(capsys):
    assert main(["features", "--json"]) == 0
    names = {feature["name"] for feature in json.loads(capsys.readouterr().out)}
    assert {"profiling", "noop-layers"} <= names
    assert main(["features", "--enabled", "--", "--noop-layers", "1", "--tensor-x", "2"]) == 0
    text = capsys.readouterr().out
    assert "noop-layers" in text
    assert "left to Megatron: --tensor-x 2" in text


def test_explain_prints_flags_and_unknown_names_fail(capsys):
    assert main(["features", "--explain", "profiling"]) == 0
    text = capsys.readouterr().out
    assert "--profile-level" in text and "read docs/features/profiling.md" in text
    assert main(["features", "--explain", "profling"]) == 1
    assert "no feature 'profling'" in capsys.readouterr().err


def test_patches_check_accepts_the_installed_megatron(capsys):
    assert main(["patches", "--check"]) == 0
    assert "0 broken" in capsys.readouterr().out


def test_doctor_reports_this_machine(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "megatron-core" in text
    assert "cpu" in text


def test_operators_as_table_json_and_explanation(capsys):
    assert main(["ops"]) == 0
    assert "rms_norm" in capsys.readouterr().out
    assert main(["ops", "--json", "--explain", "rms_norm"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["public"] == "mindspeed.ops.rms_norm.rms_norm"
    assert one["devices"]["cpu"] == {"runs": "reference", "refused": {}, "note": ""}
    assert one["devices"]["npu"]["refused"] == {"torch_npu": "torch_npu is not installed"}
    assert main(["ops", "--explain", "rms_norm"]) == 0
    assert "refused: torch_npu is not installed" in capsys.readouterr().out
    assert main(["ops", "--explain", "moe_permute"]) == 0
    assert "npu, torch_npu: the plain formula runs for maps" in capsys.readouterr().out
    assert main(["ops", "--explain", "rms_nrom"]) == 1
    assert "no operator 'rms_nrom'" in capsys.readouterr().err
