"""Faults planted into Megatron jobs of two ranks are named, in fp32 and bf16."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from tests.compare.faults import CP2, FAULTS, PP2, SP2, ZERO
from tests.compare.job import Runs
from tests.support.lazy import needs

needs("megatron.core")

QUICK = (
    "attention scale by 1 %",
    "missing all-reduce",
    "gradient of one rank",
    "one gradient lost",
)
NAMES = [*QUICK, *(name for name in FAULTS if name not in QUICK)]
NARROW = [name for name, fault in FAULTS.items() if fault.narrow]
FREE_MISSES = ("one bit in fc2", "one bit in attention", "gradient norm")
"""Below what bf16 does itself: found by forced runs only, or not at all."""
FORCED_MISSES = ("one bit in fc2",)
SHOWN = [one for one in NARROW if one not in FORCED_MISSES]
FORCED_DAILY = (
    "attention scale",
    "one bit in attention",
    "residual scaled",
    "gradient of attention's keys",
    "gradient norm",
    "micro-batch lost",
)


def layout_of(fault: str) -> str:
    layouts = FAULTS[fault].layouts
    return layouts[zlib.crc32(fault.encode()) % len(layouts)]


def assert_named(fault: str, first: Any, *, kinds: bool = True) -> None:
    """The first difference is at the guilty module, or at the very tensor."""
    assert first is not None
    assert any(
        module in ("", first.name.module)
        and (not kinds or (first.name.when, first.name.what) == (when, what))
        for when, module, what in FAULTS[fault].expected
    ), first.name


@pytest.mark.quick_cases(len(QUICK))
@pytest.mark.parametrize("fault", NAMES)
def test_the_guilty_tensor_is_named(runs, fault):
    assert_named(fault, runs.compare(runs.record(2, layout_of(fault), fault)).first)


@pytest.fixture(scope="module")
def narrow_runs(rank_pool, tmp_path_factory) -> Runs:
    """Recordings of a job in bf16."""
    return Runs(rank_pool.run, tmp_path_factory.mktemp("narrow"), "--bf16")


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("fault", [one for one in NARROW if one not in FREE_MISSES])
def test_in_bf16_the_guilty_module_is_named(narrow_runs, fault):
    found = narrow_runs.compare(narrow_runs.record(2, layout_of(fault), fault)).first
    assert_named(fault, found, kinds=False)


@pytest.mark.weekly_cases(*(one for one in SHOWN if one not in FORCED_DAILY))
@pytest.mark.slow
@pytest.mark.parametrize("fault", SHOWN)
def test_forced_to_the_values_of_a_bf16_shows_more(narrow_runs, fault):
    result = narrow_runs.compare_forced(2, layout_of(fault), fault)
    assert_named(fault, result.first, kinds=False)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [SP2, CP2, ZERO, PP2])
def test_equal_runs_are_equal_when_they_are_forced(narrow_runs, flags):
    result = narrow_runs.compare_forced(2, flags)
    assert result.equal and result.forced, result.first
