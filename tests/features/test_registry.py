"""The registry: flags from dataclasses, levels, conflicts, order, all problems at once."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import types
from dataclasses import dataclass, make_dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, Problem, conflict
from mindspeed.features.registry import (
    all_features,
    attachment_order,
    check_declarations,
    refuse_unknown,
    resolve,
)
from mindspeed.flags import add_flags, check_value, flag, flags_of, parse_value
from tests.architecture.source import sources


@dataclass(frozen=True)
class SwapOptions:
    swap_attention: bool = flag(False, "offload activations", aliases=("--swap",))
    swap_modules: tuple[str, ...] = flag(("mlp",), "which", env="SWAP_MODULES")
    swap_ratio: float = flag(0.5, "how much")
    swap_kind: Literal["host", "disk"] = flag("host", "where to")
    swap_limit: int | None = flag(None, "at most")


def make(name, flags=SwapOptions, *, level=2, methods=(), **traits):
    """A feature with the flags of a dataclass, and ``methods`` in the place of the defaults."""
    fields = {item.name: item.type for item in flags_of(flags)}
    values = {one.name: flag(one.default, **one.metadata) for one in dataclasses.fields(flags)}
    body = {"__doc__": name, "__annotations__": fields, **values, **dict(methods)}
    return types.new_class(
        name.title(),
        (Feature,),
        {"name": name, "level": level, **traits},
        lambda ns: ns.update(body),
    )


def simple(name, **more):
    flags = make_dataclass(name.title(), [(f"use_{name}", bool, flag(False, "on"))], frozen=True)
    return make(name, flags, **more)


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_flags(parser, SwapOptions, "swap")
    return vars(parser.parse_args(argv))


def test_flags_follow_from_the_dataclass(monkeypatch):
    assert parse() == {
        "swap_attention": False,
        "swap_modules": ("mlp",),
        "swap_ratio": 0.5,
        "swap_kind": "host",
        "swap_limit": None,
    }
    given = parse("--swap", "--swap-modules", "a", "b", "--swap-kind", "disk", "--swap-limit", "3")
    assert given["swap_attention"] is True
    assert given["swap_modules"] == ["a", "b"]
    assert given["swap_limit"] == 3
    monkeypatch.setenv("SWAP_MODULES", "x,y")
    assert parse()["swap_modules"] == ("x", "y")
    assert parse("--swap-modules", "z")["swap_modules"] == ["z"]  # the command line wins


def test_a_flag_that_the_parser_has_already_is_left_alone():
    parser = argparse.ArgumentParser()
    parser.add_argument("--swap-ratio", type=float, default=0.9)
    add_flags(parser, SwapOptions, "swap")
    assert parser.parse_args([]).swap_ratio == 0.9


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("swap_limit", "many", "--swap-limit takes a whole number, not 'many'"),
        ("swap_limit", True, "--swap-limit takes a whole number, not True"),
        ("swap_kind", "tape", "--swap-kind 'tape': choose one of host, disk"),
        ("swap_attention", "yes", "--swap-attention takes True or False"),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_flag_name(name, value, message):
    item = next(item for item in flags_of(SwapOptions) if item.name == name)
    with pytest.raises(ConfigError, match=message):
        check_value(item, value)


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=5))
def test_environment_text_of_a_list_parses_back(values):
    options = make_dataclass("O", [("ids", "tuple[int, ...]", flag((), "x"))])
    options.__module__ = __name__
    (item,) = flags_of(options)
    assert parse_value(item, ",".join(map(str, values))) == tuple(values)


def test_level_switches_features_off_and_refuses_explicit_flags():
    feature = simple("fast", level=2)
    with pytest.raises(ConfigError, match=r"--use-fast: needs --optimization-level >= 2 \(got 1\)"):
        resolve({"use_fast": True, "optimization_level": 1}, "cpu", [feature])
    always_on = simple("auto", level=1, methods={"enabled": lambda feature, megatron: True})
    assert resolve({"optimization_level": 0}, "cpu", [always_on]).enabled == ()
    assert [f.name for f in resolve({}, "cpu", [always_on]).enabled] == ["auto"]


def test_all_problems_of_all_features_are_reported_together():
    def problems(feature, megatron):
        return [Problem("--use-a", f"hidden size {megatron['hidden_size']} is odd", "make it even")]

    features = [
        simple("a", methods={"problems": problems}, conflicts=("b",)),
        simple("b", devices=("npu",)),
        simple("c", requires=("d",)),
        simple("d"),
    ]
    with pytest.raises(ConfigError) as error:
        resolve({"use_a": True, "use_b": True, "use_c": True, "hidden_size": 3}, "cpu", features)
    text = str(error.value)
    assert text.count("--use-a: cannot be combined with --use-b; remove one") == 1
    assert "--use-a: hidden size 3 is odd; make it even" in text
    assert "b: does not run on cpu; it runs on npu" in text
    assert "--use-c: needs feature 'd'" in text


def test_a_pair_of_flags_is_reported_once_whoever_finds_it():
    def problems(feature, megatron):
        return [conflict("--use-b 3", "--use-a", "found by values")]

    features = [
        simple("a", conflicts={"b": "both do it"}, excludes={"fp8": "it rounds", "sft": ""}),
        simple("b", methods={"problems": problems}),
    ]
    on = {"use_a": True, "use_b": True, "fp8": "hybrid", "sft": False}
    with pytest.raises(ConfigError) as error:
        resolve(on, "cpu", features)
    assert str(error.value).splitlines() == [
        "--use-a: cannot be combined with --use-b: both do it; remove one",
        "--use-a: cannot be combined with --fp8-format hybrid: it rounds; remove one",
    ]


def test_conflicts_are_declared_by_one_of_two_features():
    declared = {(one.name, other) for one in all_features() for other in one.conflicts}
    assert not [pair for pair in declared if pair[::-1] in declared]


def test_features_name_the_other_flag_of_a_conflict():
    """``conflict`` and the traits write the words, so that a pair is found by its flags."""
    found = [path for path in sources() if "features" in path.parts]
    words = [path for path in found if "cannot be combined with" in path.read_text()]
    assert len(found) > 60
    assert [path.name for path in words] == ["feature.py"]


def test_unknown_option_suggests_the_closest():
    with pytest.raises(ConfigError, match=r"unknown option 'use_fsat'; closest: use_fast"):
        refuse_unknown(["use_fsat"], features=[simple("fast")])


def test_attachment_order_does_not_depend_on_registration_order():
    features = [simple("a", after=("c",)), simple("b"), simple("c", after=("b",)), simple("d")]
    orders = {
        tuple(f.name for f in attachment_order(permutation))
        for permutation in itertools.permutations(features)
    }
    assert orders == {("b", "d", "c", "a")}


def test_cycles_and_double_declarations_are_errors():
    with pytest.raises(ConfigError, match="cyclic feature order: "):
        attachment_order([simple("a", after=("b",)), simple("b", after=("a",))])
    with pytest.raises(
        ConfigError, match=r"flag --use-a declared twice: by feature 'a' \(mindspeed\) and"
    ):
        check_declarations([simple("a"), make("x", simple("a"))])
    with pytest.raises(ConfigError, match="refers to unknown feature 'zzz'"):
        check_declarations([simple("a", conflicts=("zzz",))])


def test_changed_values_are_what_differs_from_the_defaults():
    feature = make("swap")
    configuration = resolve({"swap_attention": True, "swap_modules": ["a"]}, "cpu", [feature])
    assert configuration.changed_values() == {"swap_attention": True, "swap_modules": ("a",)}


def test_names_of_the_base_class_are_refused_as_flags_and_methods():
    for body in ({"level": flag(1, "x"), "__annotations__": {"level": int}}, {"devices": print}):
        with pytest.raises(TypeError, match=r"Odd: (level|devices) mean something else here"):
            types.new_class("Odd", (Feature,), {"level": 2}, lambda ns, body=body: ns.update(body))


def test_every_module_declares_one_feature_or_none():
    modules = [feature.__module__ for feature in all_features()]
    assert len(set(modules)) == len(modules) > 60


def test_every_feature_of_the_library_is_declared_soundly():
    for feature in all_features():
        assert feature.summary
        assert set(feature.devices) <= {"cpu", "cuda", "npu"}
        for item in flags_of(feature):
            assert item.help
