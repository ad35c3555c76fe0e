"""Faults planted into Megatron jobs of two ranks are named, in fp32."""

from __future__ import annotations

import zlib

import pytest

from tests.compare.faults import FAULTS
from tests.support.lazy import needs

needs("megatron.core")

QUICK = (
    "attention scale by 1 %",
    "missing all-reduce",
    "gradient of one rank",
    "one gradient lost",
)
NAMES = [*QUICK, *(name for name in FAULTS if name not in QUICK)]


@pytest.mark.quick_cases(len(QUICK))
@pytest.mark.parametrize("fault", NAMES)
def test_the_guilty_tensor_is_named(runs, fault):
    layouts = FAULTS[fault].layouts
    flags = layouts[zlib.crc32(fault.encode()) % len(layouts)]
    first = runs.compare(runs.record(2, flags, fault)).first
    assert first is not None
    expected = FAULTS[fault].expected
    assert any(
        (first.name.when, first.name.what) == (when, what) and module in ("", first.name.module)
        for when, module, what in expected
    ), first.name
