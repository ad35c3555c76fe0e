"""torch_npu's own functions and autograd formulas over the restated kernels equal torch.

The formulas are compiled into torch_npu: which arguments its gradients pass on, and in which order
they expect results, is what the restatements must agree with.
"""

from __future__ import annotations

import pytest
import torch

from mindspeed.testing import RankError
from tests.npu_emulator import dispatch_jobs as jobs


@pytest.mark.parametrize("name", jobs.CASES)
def test_values_and_gradients(npu, name):
    for got, expected in npu(jobs.differentiate, name):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", jobs.CASES)
def test_shapes_are_those_of_the_meta_kernels(npu, name):
    real, fake = npu(jobs.shapes_against_meta, name)
    assert real == fake


def test_dropout_by_torch_npu(npu):
    share, same_mask, repeatable = npu(jobs.dropout)
    assert 0.72 < share < 0.78
    assert same_mask
    assert repeatable


def test_accumulation_of_the_atb_library(npu):
    got, expected = npu(jobs.accumulate_in_float32)
    torch.testing.assert_close(got, expected)


def test_an_argument_that_the_schema_lacks_is_refused(npu):
    with pytest.raises(RankError, match="Unknown keyword argument 'eps'"):
        npu(jobs.wrong_argument)
