"""Properties of every operator, checked over the catalogue."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed.ops.catalog import operators
from mindspeed.ops.verify import verify

WITH_SAMPLES = [one for one in operators() if any(True for _ in one.samples(one.dtypes[0]))]
NAMES = [one.name for one in WITH_SAMPLES]
every_operator = pytest.mark.parametrize("operator", WITH_SAMPLES, ids=NAMES)


def tensors_with_grad(operator, sample):
    """The sample with fresh leaves; floating tensors require gradients where there are some."""

    def fresh(value):
        if isinstance(value, (list, tuple)):
            return type(value)(fresh(x) for x in value)
        if not isinstance(value, torch.Tensor):
            return value
        leaf = value.clone()
        return leaf.requires_grad_(operator.differentiable and leaf.is_floating_point())

    return tuple(fresh(value) for value in sample)


@pytest.mark.quick_cases(4)
@every_operator
def test_every_sample_agrees_with_the_definition_in_float64(operator):
    for dtype in operator.dtypes:
        result = verify(operator, "cpu", dtype)
        assert result.passed, result


@pytest.mark.slow
@every_operator
def test_opcheck(operator):
    """Schema, autograd registration, fake kernel, and AOT tracing with dynamic shapes."""
    chosen = [(operator.dtypes[0], 3), (operator.dtypes[-1], 1)]
    for dtype, count in chosen:
        for sample in itertools.islice(operator.samples(dtype), count):
            torch.library.opcheck(operator.overload, tensors_with_grad(operator, sample))


@pytest.mark.quick_cases(4)
@every_operator
def test_compiles_as_one_graph(operator):
    torch.compiler.reset()  # torch counts recompilations per line of code, and this is one line
    compiled = torch.compile(operator.overload, fullgraph=True, backend="aot_eager")
    sample = next(iter(operator.samples(operator.dtypes[0])))
    expected = operator(*tensors_with_grad(operator, sample))
    torch.testing.assert_close(compiled(*tensors_with_grad(operator, sample)), expected)


@every_operator
def test_outputs_share_no_memory_with_inputs(operator):
    for sample in itertools.islice(operator.samples(operator.dtypes[0]), 3):
        returned = operator(*sample)
        returned = returned if isinstance(returned, (tuple, list)) else [returned]
        inputs = {x.untyped_storage().data_ptr() for x in sample if isinstance(x, torch.Tensor)} - {
            0
        }
        outputs = [x.untyped_storage().data_ptr() for x in returned if x is not None]
        assert inputs.isdisjoint(outputs)


@every_operator
def test_every_device_has_an_implementation_and_a_reason_for_each_refusal(operator):
    for device in ("cpu", "cuda", "npu"):
        assert operator.implementations[device][-1].kind == "reference"
        assert all(reason for _, reason in operator.refusals(device))
    assert operator.chosen("cpu").kind in ("reference", "torch")
