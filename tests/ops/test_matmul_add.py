"""Weight gradients added in place, against sums of products in float64."""

from __future__ import annotations

import pytest
import torch

from mindspeed.ops import OperatorError
from mindspeed.ops.npu_groupmatmul_add import npu_groupmatmul_add_fp32
from mindspeed.ops.npu_matmul_add import npu_matmul_add_fp16, npu_matmul_add_fp32
from tests.ops.traffic import traffic

HALVES = (torch.bfloat16, torch.float16)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(x, truth):
    return float((x.double() - truth).norm() / truth.norm())


def test_documented_argument_order():
    weight, x, total = normal(6, 4), normal(6, 3, seed=1), normal(3, 4, seed=2)
    expected = x.double().T @ weight.double() + total.double()
    assert npu_matmul_add_fp32(weight, x, total) is None
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=1e-5)


def test_sixty_four_micro_batches_keep_the_precision_of_the_buffer():
    """1.8e-7 where rounding each product to bf16 first costs 1.7e-3."""
    rows, inputs, outputs = 64, 96, 80
    fused, apart = torch.zeros(outputs, inputs), torch.zeros(outputs, inputs)
    truth = torch.zeros(outputs, inputs, dtype=torch.float64)
    for seed in range(64):
        x = normal(rows, inputs, dtype=torch.bfloat16, seed=2 * seed)
        dy = normal(rows, outputs, dtype=torch.bfloat16, seed=2 * seed + 1)
        npu_matmul_add_fp32(x, dy, fused)
        apart += dy.T @ x
        truth += dy.double().T @ x.double()
    assert relative_error(fused, truth) < 2.5e-7
    assert 1.4e-3 < relative_error(apart, truth) < 2.0e-3


def test_grouped_sixty_four_micro_batches():
    sizes = torch.tensor([20, 0, 44])
    fused, truth = torch.zeros(3, 24, 40), torch.zeros(3, 24, 40, dtype=torch.float64)
    apart = torch.zeros(3, 24, 40)
    for seed in range(64):
        x = normal(64, 24, dtype=torch.bfloat16, seed=2 * seed)
        dy = normal(64, 40, dtype=torch.bfloat16, seed=2 * seed + 1)
        npu_groupmatmul_add_fp32(x, dy, sizes.cumsum(0), fused)
        groups = zip(x.split(sizes.tolist()), dy.split(sizes.tolist()), strict=True)
        for g, (rows, grads) in enumerate(groups):
            truth[g] += rows.double().T @ grads.double()
            apart[g] += rows.T @ grads
    assert relative_error(fused, truth) < 2.5e-7
    assert 1.4e-3 < relative_error(apart, truth) < 2.0e-3
    assert not fused[1].any()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_16_bit_buffer_is_rounded_once(dtype):
    x, dy, total = normal(33, 5, dtype=dtype), normal(33, 7, dtype=dtype), normal(7, 5, dtype=dtype)
    truth = total.double() + dy.double().T @ x.double()
    npu_matmul_add_fp16(x, dy, total)
    half_a_unit = truth.abs() * torch.finfo(dtype).eps / 2 + 1e-5
    assert ((total.double() - truth).abs() <= half_a_unit).all()


@pytest.mark.parametrize("shape", ["flat", "stacked"])
def test_the_grouped_buffer_is_viewed_by_group(shape):
    x, dy = normal(5, 2), normal(5, 3, seed=1)
    total = torch.zeros(2, 2 * 3) if shape == "flat" else torch.zeros(2, 2, 3)
    npu_groupmatmul_add_fp32(x, dy, torch.tensor([2, 5]), total)
    expected = torch.stack([x[:2].T @ dy[:2], x[2:].T @ dy[2:]])
    torch.testing.assert_close(total.view(2, 2, 3), expected)


def test_empty_input_adds_nothing():
    total = normal(3, 4)
    before = total.clone()
    npu_matmul_add_fp32(torch.zeros(0, 4), torch.zeros(0, 3), total)
    npu_groupmatmul_add_fp32(
        torch.zeros(0, 4), torch.zeros(0, 1), torch.zeros(3, dtype=torch.long), total
    )
    assert torch.equal(total, before)


def test_traffic_of_the_buffer_falls_from_twelve_to_eight_bytes_per_weight():
    """Read and written once in fp32, without a 16-bit gradient written and read besides."""
    rows, size = 2, 512
    x, dy = (normal(rows, size, dtype=torch.bfloat16, seed=s) for s in (0, 1))
    total = torch.zeros(size, size)
    with traffic() as apart:
        total.add_(dy.T @ x)
    with traffic() as fused:
        npu_matmul_add_fp32(x, dy, total)
    operands, written_in_place = 2 * rows * size * 2, total.nbytes
    assert fused.kernels == 1 and apart.kernels == 2
    assert apart.bytes - operands == 12 * size * size
    assert fused.bytes - operands + written_in_place == 8 * size * size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": torch.zeros(3, 4).half()}, "npu_matmul_add_fp32: grad: .*float32, got float16"),
        ({"grad": torch.zeros(4, 3)}, r"grad: expected shape \(3, 4\), got \(4, 3\)"),
        ({"grad": torch.zeros(4, 3).T}, "grad: expected a contiguous tensor"),
        ({"total_input": torch.zeros(2, 4).half()}, "grad_output: .*dtype of total_input"),
        ({"total_input": torch.zeros(2, 1, 4)}, "total_input: expected 2 dimensions"),
        ({"grad_output": torch.zeros(5, 3)}, r"grad_output: expected shape \(2, 3\)"),
        ({"total_input": torch.zeros(2, 4).requires_grad_()}, "no gradient, but total_input"),
    ],
)
def test_bad_arguments(change, message):
    given = {
        "total_input": torch.zeros(2, 4),
        "grad_output": torch.zeros(2, 3),
        "grad": torch.zeros(3, 4),
    }
    with pytest.raises(OperatorError, match=message):
        npu_matmul_add_fp32(**(given | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"grouplist": torch.tensor([3, 2])},
            r"grouplist: expected sums .* end at 2, got \[3, 2\]",
        ),
        ({"grouplist": torch.tensor([1, 2]).int()}, "grouplist: expected dtype int64, got int32"),
        ({"grad": torch.zeros(2, 4, 4)}, r"grad: expected 24 elements, viewed as \(2, 4, 3\)"),
        ({"grad": torch.zeros(2, 4, 3).bfloat16()}, "grad: expected dtype float32"),
        ({"dy": torch.zeros(3, 3)}, r"dy: expected shape \(2, 3\)"),
    ],
)
def test_bad_arguments_of_the_grouped_form(change, message):
    given = {
        "x": torch.zeros(2, 4),
        "dy": torch.zeros(2, 3),
        "grouplist": torch.tensor([1, 2]),
        "grad": torch.zeros(2, 4, 3),
    }
    with pytest.raises(OperatorError, match=message):
        npu_groupmatmul_add_fp32(**(given | change))
