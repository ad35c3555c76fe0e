"""Sizes of HCCL's buffers: the table by formula, the text form, the names of Megatron's groups."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed.device.hccl_buffers import (
    LargestCalls,
    adaptive_buffers,
    device_megabytes,
    megabytes,
    name_of,
    parse,
)

# Llama-3-70B: 8192 tokens, 8 tensor-parallel ranks; an activation has 128 MiB.
LLAMA = LargestCalls(8192, 1, 8192, 1024, 2, tensor_parallel=8, sequence_parallel=True)
SMALL = {"mp": 10, "tp_ep_mp": 10, "tp_cp": 10}
TABLE = {
    "sequence parallel": (LLAMA, {"tp": 128, "pp": 16}),
    "all-reduce": (replace(LLAMA, sequence_parallel=False), {"tp": 256, "pp": 128}),
    "ring": (replace(LLAMA, ring=True), {"tp": 128, "pp": 16, "cp": 4}),
    "ulysses": (replace(LLAMA, ulysses=True), {"tp": 128, "pp": 16, "cp": 16}),
    "hybrid": (replace(LLAMA, ring=True, ulysses=True), {"tp": 128, "pp": 16, "cp": 16}),
    "hybrid, many key heads": (
        replace(LLAMA, ring=True, ulysses=True, key_size=8192),
        {"tp": 128, "pp": 16, "cp": 32},
    ),
    "experts": (
        replace(LLAMA, expert_parallel=4, topk=2, expert_factor=1.5),
        {"tp": 128, "pp": 16, "ep": 48, "ep_tp": 768},
    ),
    "fp32": (replace(LLAMA, element=4), {"tp": 256, "pp": 32}),
    "tiny": (LargestCalls(16, 1, 8, 8, 2), {"tp": 1, "pp": 1}),
}


@pytest.mark.parametrize("case", TABLE)
def test_adaptive_buffers_hold_the_largest_call(case):
    traffic, expected = TABLE[case]
    assert adaptive_buffers(traffic) == SMALL | expected


def test_a_buffer_is_rounded_up_to_megabytes():
    assert [megabytes(n) for n in (0, 1, 2**20, 2**20 + 1, 3 * 2**20)] == [1, 1, 1, 2, 3]


def test_every_communicator_takes_two_buffers():
    names = ["dp", "tp", "pp", "mp", "cp", "ep", *[None] * 6]
    assert device_megabytes(names, {}) == 12 * 2 * 200 == 4800
    sizes = adaptive_buffers(TABLE["experts"][0])
    assert device_megabytes(names, sizes) == 2 * (200 + 128 + 16 + 10 + 200 + 48 + 6 * 200)


def test_the_text_form_has_names_numbers_and_old_names():
    text = " dp:200; tp : 300;exp:400;tp_exp:1;mp_exp:2;dp_modulo_exp:3;"
    expected = {"dp": 200, "tp": 300, "ep": 400, "ep_tp": 1, "tp_ep_mp": 2, "ep_dp": 3}
    assert parse("--flag", text) == expected
    assert parse("--flag", "") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpx:3", "unknown group 'tpx'; known are dp, dp_cp, intra_dp_cp, cp"),
        ("tp", "'tp' is not NAME:NUMBER"),
        ("tp:0", "'tp:0' is not NAME:NUMBER with a positive"),
        ("tp:-3", "positive whole number"),
        ("tp:1.5", "positive whole number"),
        ("dp:1;dp:2", "dp is given twice"),
        ("ep:1;exp:2", "ep is given twice"),
    ],
)
def test_wrong_text_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse("--hccl-group-buffer", text)


def test_every_group_of_megatron_has_a_name():
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        pytest.skip("megatron.core is not installed")
    source = (Path(spec.origin).parent / "parallel_state.py").read_text()
    described = set(re.findall(r'group_desc="(\w+)"', source))
    asked = set(re.findall(r'get_nccl_options\("(\w+)"', source))
    device = {name for name in described if "GLOO" not in name}
    assert len(device) > 15
    names = {name_of(name) for name in device}
    assert None not in names
    levels = {name_of("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L" + level) for level in "01"}
    assert levels == {"intra_ep_dp", "inter_ep_dp"}
    assert asked <= names | levels | {name_of("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0")}
    assert name_of(None) is None and name_of("STAGED") is None
