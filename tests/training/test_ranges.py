"""Every number has a declared range, and one check enforces it wherever the number comes from."""

from __future__ import annotations

import argparse
import importlib
import math
from dataclasses import dataclass

import pytest

from mindspeed.cli.main import COMMANDS
from mindspeed.errors import ConfigError
from mindspeed.flags import add_flags, check_value, flag, flags_of, parse_value
from mindspeed.ranges import (
    ABOVE_ZERO,
    COUNT,
    FINITE,
    PROBABILITY,
    SIZE,
    HelpFormatter,
    Range,
    number,
    range_of,
    whole,
    whole_number,
)
from tests.support.trainer_job import SETUP
from tests.training.command_line import range_report


@pytest.mark.parametrize(
    "limits, inside, outside",
    [
        (FINITE, (0, -1e300), (math.nan, math.inf, -math.inf)),
        (COUNT, (0, 2**63 - 1), (-1, 2**63)),
        (SIZE, (1, 2**31 - 1), (0, -1, 2**31)),
        (PROBABILITY, (0, 0.999), (1, -1e-9, math.nan)),
        (ABOVE_ZERO, (1e-300,), (0, -0.0, math.inf)),
        (Range(1, 10, also=(-1,)), (1, 10, -1, [1, [2, -1]]), (0, 11, [1, 0])),
        (Range(0, also=(math.inf,)), (math.inf, 0), (-math.inf, math.nan)),
    ],
)
def test_a_range_contains_its_values(limits, inside, outside):
    assert [limits.problem(value) for value in inside] == [None] * len(inside)
    assert all(limits.problem(value) for value in outside)


def test_a_problem_names_the_value_and_what_is_allowed():
    assert COUNT.problem(-1) == "-1 must be at least 0"
    assert PROBABILITY.problem(math.nan) == "nan must be at least 0 and less than 1"
    assert Range(0, 3).problem(4) == "4 must be from 0 to 3"
    assert COUNT.problem(10**400) == f"a number of 1329 bits must be at most {2**63 - 1}"


@pytest.mark.parametrize("text", ["", "x", "1.5", "nan", "inf", "1e400", "9" * 5000, "1e300"])
def test_non_integers_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        whole(0)(text)


def test_integers_may_have_an_exponent():
    assert [whole_number(text) for text in ("1000", "1_000", "1e6")] == [1000, 1000, 10**6]
    assert number()("1e-3") == 1e-3


@dataclass(frozen=True)
class Options:
    width: int = flag(1, "a width", range=SIZE)
    parts: tuple[float, ...] = flag((), "parts", range=PROBABILITY)


def test_python_and_environment_share_the_check():
    width, parts = flags_of(Options)
    for wrong in (lambda: check_value(width, 0), lambda: parse_value(width, "0")):
        with pytest.raises(ConfigError, match="--width 0 must be at least 1"):
            wrong()
    with pytest.raises(ConfigError, match="--parts nan must be at least 0 and less than 1"):
        check_value(parts, [0.5, math.nan])
    assert check_value(width, 3) == 3


def test_help_shows_the_range():
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    add_flags(parser, Options, "options")
    parser.add_argument("--rate", type=number(PROBABILITY), help="a rate")
    text = " ".join(parser.format_help().split())
    assert "a width (at least 1) (default: 1)" in text
    assert "a rate (at least 0 and less than 1)" in text


@pytest.fixture(scope="module")
def report(rank_pool):
    (found,) = rank_pool.run(1, range_report, setup=SETUP, backend=None, timeout=120)
    return found


@pytest.mark.slow
def test_every_number_of_the_trainer_has_a_range_that_holds_its_default(report):
    assert report["undeclared"] == []
    assert report["stale"] == []
    assert report["defaults"] == []
    assert report["numbers"] > 150


@pytest.mark.parametrize("door", ["command line", "recipe", "Python"])
def test_out_of_range_numbers_are_refused_from_every_source(door, report):
    assert report[door] == []


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"pretrain", "finetune"}))
def test_every_number_of_a_command_has_a_range_that_holds_its_default(command):
    parser = argparse.ArgumentParser()
    module = importlib.import_module(f"mindspeed.cli.{command.replace('-', '_')}")
    if getattr(module, "PASS_THROUGH", False):
        return
    module.add_arguments(parser)
    for action in parser._actions:
        name = action.option_strings or action.dest
        assert action.choices or action.type not in (int, float), name
        if (limits := range_of(action)) is not None:
            assert limits.problem(action.default) is None, name


def test_help_shows_the_default_unless_it_tells_it():
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    parser.add_argument("--rate", type=float, default=1.0, help="a rate")
    parser.add_argument("--names", default=["a", "b%"], help="names")
    parser.add_argument("--size", type=int, default=7, help="a size (default: 7, a prime)")
    parser.add_argument("--on", action="store_true", help="on")
    parser.add_argument("--none", help="none")
    text = " ".join(parser.format_help().split())
    for shown in ("a rate (default: 1)", "names (default: a b%)", "a size (default: 7, a prime)"):
        assert shown in text
    assert text.count("default") == 3
