"""Every operator of the library that calls torch_npu, on the emulated NPU."""

from __future__ import annotations

import pytest

from mindspeed.ops.catalog import operators
from tests.npu_emulator import operator_jobs as jobs
from tests.npu_emulator import wheel


def with_samples(operator):
    return any(True for _ in operator.samples(operator.dtypes[0]))


NAMES = [
    operator.name
    for operator in operators()
    if operator.implementations["npu"][0].kind == "torch_npu" and with_samples(operator)
]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", NAMES)
def test_calls_into_torch_npu_give_what_the_definition_gives(npu, name):
    results = npu(jobs.verify, name, timeout=200)
    assert results
    for result in results:
        assert result.kind == ("reference" if wheel.falls_back(name) else "torch_npu")
        assert result.passed, result


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", NAMES[::-1])
def test_without_an_operator_of_torch_npu_the_definition_runs_and_says_so_once(npu, name):
    """As with a torch_npu that is older than the operator."""
    if wheel.falls_back(name):
        pytest.skip(f"torch_npu {wheel.version()} has no operator to call")
    found = npu(jobs.verify_without, name, timeout=250)
    assert found
    for absent, logged, results in found:
        assert all(result.passed for result in results), (absent, results)
        assert f"has no {absent}" in logged[0]
        assert len(set(logged)) == len(logged)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_calls_into_torch_npu_have_the_shapes_and_dtypes_of_the_operator(npu, name):
    if wheel.falls_back(name):
        pytest.skip(f"torch_npu {wheel.version()} has no operator to call")
    assert npu(jobs.contract, name, timeout=200) > 0


def test_a_wrong_kernel_breaks_the_contract(npu):
    assert npu(jobs.wrong_contracts) == ["shape", "dtype", "argument"]
