"""torch_npu's schemas are those our calls and restatements were written for.

``schemas.txt`` holds them as text. After a deliberate change of the torch_npu version, a failing
test shows the new schema; put it there once the calls and the restatement follow it.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import mindspeed
from tests.npu_emulator import operator_jobs as jobs
from tests.npu_emulator.reference_ops import REFERENCE
from tests.npu_emulator.wheel import ensure_wheel, is_old, lacking, version

PINNED = {
    line.partition("(")[0]: line
    for line in Path(__file__).with_name("schemas.txt").read_text().splitlines()
}
CALL = re.compile(r"torch\.ops\.npu\.(\w+)|torch_npu\.(_?npu_\w+)|torch_npu\(\s*\w+,\s*\"(\w+)\"")


@pytest.fixture(scope="module")
def installed(npu_pool):
    names = list(PINNED)
    options = {"setup": "tests.npu_emulator.preload", "backend": None}
    return npu_pool.run(1, jobs.schemas, names, **options)[0]


@pytest.mark.parametrize("name", PINNED)
def test_the_installed_schema_is_the_pinned_one(installed, name):
    expected = "" if name in lacking() else PINNED[name]
    if name == "npu::npu_mm_all_reduce_base" and is_old():
        expected = expected.replace(", str? comm_mode=None", "")
    if name == "npu::npu_moe_token_permute_grad_v2" and version() in ("2.11.0", "2.12.0"):
        expected = expected.replace("SymInt", "int")
    assert installed[name] == expected


def test_every_restated_operator_is_pinned():
    assert PINNED.keys() == REFERENCE.keys()


def calls_of_the_library() -> set[str]:
    sources = [path.read_text() for path in Path(mindspeed.__file__).parent.rglob("*.py")]
    groups = (match.groups() for source in sources for match in CALL.finditer(source))
    return {next(filter(None, names)) for names in groups}


def test_every_operator_that_the_library_calls_is_pinned_and_restated():
    calls = {f"npu::{name}" for name in calls_of_the_library()}
    assert "npu::npu_rms_norm_backward" in calls
    assert calls - PINNED.keys() == set()


@pytest.mark.parametrize("name", REFERENCE)
def test_a_restatement_takes_the_arguments_of_the_schema(name):
    parameters = inspect.signature(REFERENCE[name]).parameters
    takes_the_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    schema = torch._C.parse_schema(PINNED[name])
    for argument in schema.arguments:
        parameter = parameters.get(argument.name)
        if parameter is None:
            assert takes_the_rest, argument.name
        elif argument.has_default_value():
            assert parameter.default == argument.default_value, argument.name


def test_the_atb_library_has_the_operator_with_our_signature(npu_pool):
    """Its schema is inferred from a C++ function of two constant tensors and one that changes."""
    library = ensure_wheel() / "torch_npu" / "lib" / "libop_plugin_atb.so"
    assert b"_npu_matmul_add_fp32ERKN2at6TensorES3_RS1_" in library.read_bytes()
