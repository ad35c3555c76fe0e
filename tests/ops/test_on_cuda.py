"""Every operator's kernel on a GPU against its definition in float64 (`mindspeed.ops.verify`)."""

import pytest
import torch

from mindspeed.ops.catalog import operators
from mindspeed.ops.verify import verify

ALONE = [one for one in operators() if not one.communicates]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("operator", ALONE, ids=lambda one: one.name)
def test_the_kernel_of_a_gpu_is_as_exact_as_the_formula(operator):
    for dtype in operator.dtypes:
        result = verify(operator, "cuda", dtype)
        assert result.passed, (dtype, result.worst, result.problem)
