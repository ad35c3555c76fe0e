"""Flags of features that do not exist yet are refused from every source."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import planned_flags, registry
from tests.support.trainer_job import SETUP, TINY
from tests.training.command_line import parse_all

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    tomllib = pytest.importorskip("tomllib")
    table = tomllib.loads((ROOT / "docs/features.toml").read_text("utf-8"))
    return [row for area in table["area"] for row in area["features"]]


def test_planned_flags_are_those_of_the_feature_table(rows):
    done = {
        flag for row in rows if row.get("test") for flag in re.findall(r"--[\w-]+", row["flag"])
    }
    known = set(registry.add_arguments(argparse.ArgumentParser())._option_string_actions)
    open_rows = {row["en"]: row for row in rows if not row.get("test")}
    assert set(planned_flags.FEATURES) <= set(open_rows), "a feature exists now: delete its line"
    assert not set(planned_flags.FLAGS) & done
    megatrons = {"--moe-token-dispatcher-type", "--optimizer"}
    for row in open_rows.values():
        missing = set(re.findall(r"--[\w-]+", row["flag"])) - set(planned_flags.FLAGS) - megatrons
        assert not missing - known, f"{row['en']}: {missing} are neither flags nor refused"


def test_the_trainer_refuses_each_on_the_command_line_and_in_recipes(rank_pool):
    flags = sorted(planned_flags.FLAGS)
    cases = [([*TINY, flag, "x"],) for flag in flags]
    cases += [(TINY, f"features: {{{flag[2:].replace('-', '_')}: 1}}") for flag in flags]
    (answers,) = rank_pool.run(1, parse_all, cases, setup=SETUP, backend=None, timeout=120)
    for flag, answer in zip([*flags, *flags], answers, strict=True):
        assert f"{flag} is not available yet (" in (answer["error"] or "no error"), flag


def test_megatron_lms_parser_refuses_them_too(capsys):
    parser = registry.add_arguments(argparse.ArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--auto-tuning"])
    said = "--auto-tuning is not available yet (Auto tuning: search for the parallel configuration)"
    assert said in capsys.readouterr().err


def test_a_flag_that_megatron_has_itself_is_left_alone():
    parser = argparse.ArgumentParser()
    parser.add_argument("--auto-tuning", action="store_true")
    assert registry.add_arguments(parser).parse_args(["--auto-tuning"]).auto_tuning


def test_python_is_refused_too():
    with pytest.raises(ConfigError, match="--auto-tuning is not available yet"):
        registry.refuse_unknown(["auto_tuning"])
