"""Grouped products against a loop over groups in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mindspeed.instruments import saved_for_backward
from mindspeed.ops import OperatorError
from mindspeed.ops.gmm import npu_gmm, npu_gmm_v2
from mindspeed.ops.grouped_matmul import eager_grouped_matmul, fused_grouped_matmul
from mindspeed.testing import assert_close_with_grads
from tests.ops.traffic import traffic

SIZES = {"even": [2, 3, 4], "an empty group": [3, 0, 6], "one": [9], "no rows": [0, 0]}
K, N = 6, 5


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends(sizes):
    return torch.tensor(sizes).cumsum(0)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_each_group_is_multiplied_with_its_matrix(sizes, transposed, bias):
    b = normal(len(sizes), N, seed=2) if bias else None

    def loop(x, w):
        w = w.transpose(1, 2) if transposed else w
        parts = [rows @ w[g] + (b[g] if bias else 0) for g, rows in enumerate(x.split(sizes))]
        return torch.cat(parts)

    def ours(x, w):
        w = w.transpose(1, 2) if transposed else w
        out = npu_gmm(x, w, bias=b, group_list=ends(sizes))
        assert torch.equal(out, npu_gmm_v2(x, w, bias=b, group_list=torch.tensor(sizes)))
        assert torch.equal(out, npu_gmm(x, w, bias=b, group_list=ends(sizes).tolist()))
        return out

    shape = (len(sizes), N, K) if transposed else (len(sizes), K, N)
    inputs = (normal(sum(sizes), K), normal(*shape, seed=1))
    assert_close_with_grads(ours, loop, inputs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("product", [fused_grouped_matmul, eager_grouped_matmul])
def test_groups_by_the_names_of_the_original(product, transposed):
    sizes = [3, 0, 6]

    def loop(x, w):
        w = w.transpose(1, 2) if transposed else w
        return torch.cat([rows @ w[g] for g, rows in enumerate(x.split(sizes))])

    inputs = (normal(9, K), normal(3, *((N, K) if transposed else (K, N)), seed=1))
    for split in (sizes, torch.tensor(sizes)):
        run = lambda x, w, split=split: product(x, split, w)  # noqa: E731
        assert_close_with_grads(run, loop, inputs, rtol=0, atol=1e-12)
    with pytest.raises(OperatorError, match="fused_grouped_matmul: weights"):
        product(normal(9, 4), sizes, inputs[1])


def test_gradients_are_the_derivatives_even_of_second_order():
    x, w = normal(5, 3).requires_grad_(), normal(2, 3, 2, seed=1).requires_grad_()
    product = lambda x, w: npu_gmm(x, w, group_list=[2, 5])  # noqa: E731
    torch.autograd.gradcheck(product, (x, w))
    torch.autograd.gradgradcheck(product, (x, w))


def test_the_gradient_of_a_transposed_weight_has_the_strides_of_the_weight():
    weight = normal(2, N, K).requires_grad_()
    npu_gmm(normal(4, K), weight.transpose(1, 2), group_list=[1, 4]).sum().backward()
    assert weight.grad.is_contiguous()


def test_group_type_2_is_the_weight_gradient_and_minus_1_an_ordinary_product():
    x, dy = normal(9, K), normal(9, N, seed=1)
    out = npu_gmm(x.t(), dy, group_list=[3, 3, 9], group_type=2)
    expected = torch.stack([x[:3].T @ dy[:3], torch.zeros(K, N).double(), x[3:].T @ dy[3:]])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    w, b = normal(K, N, seed=2), normal(N, seed=3)
    expected = x @ w + b
    for weight, bias in ((w, b), (w[None], b[None])):
        out = npu_gmm(x, weight, bias=bias, group_type=-1)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_are_rounded_once(dtype):
    x, w, b = normal(7, 40, dtype=dtype), normal(2, 40, 9, dtype=dtype), normal(2, 9, dtype=dtype)
    truth = torch.cat([x[:3].double() @ w[0].double(), x[3:].double() @ w[1].double()])
    truth = truth + b.double().repeat_interleave(torch.tensor([3, 4]), 0)
    out = npu_gmm(x, w, bias=b, group_list=[3, 7])
    half_a_unit = truth.abs() * torch.finfo(dtype).eps / 2 + 1e-4
    assert ((out.double() - truth).abs() <= half_a_unit).all()


class TestFusion:
    """The weight gradient goes into main_grad."""

    def parameter(self, transposed, tell=True):
        shape = (2 * N, K) if transposed else (K * 2, N)
        weight = torch.nn.Parameter(normal(*shape, dtype=torch.bfloat16))
        weight.main_grad = normal(*shape, dtype=torch.float32, seed=5)  # of earlier micro-batches
        weight.before = weight.main_grad.clone()
        if tell:
            weight.grad_added_to_main_grad = False
        view = weight.view(2, N, K).transpose(1, 2) if transposed else weight.view(2, K, N)
        return weight, view

    @pytest.mark.parametrize("transposed", [False, True])
    def test_main_grad_accumulates_over_micro_batches_in_fp32(self, transposed):
        weight, _ = self.parameter(transposed)
        truth = torch.zeros(2, K, N, dtype=torch.float64)
        for seed in range(3):
            view = weight.view(2, N, K).transpose(1, 2) if transposed else weight.view(2, K, N)
            x = normal(7, K, dtype=torch.bfloat16, seed=seed).requires_grad_()
            dy = normal(7, N, dtype=torch.bfloat16, seed=seed + 9)
            npu_gmm(x, view, group_list=[3, 7], gemm_fusion=True, original_weight=weight).backward(
                dy
            )
            truth += torch.stack(
                [x[:3].double().T @ dy[:3].double(), x[3:].double().T @ dy[3:].double()]
            )
            expected = torch.cat([dy[:3] @ view[0].T, dy[3:] @ view[1].T])
            torch.testing.assert_close(x.grad, expected)
            assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
            weight.grad = None
        main = weight.main_grad.view(2, N, K).mT if transposed else weight.main_grad.view(2, K, N)
        before = weight.before.view(2, N, K).mT if transposed else weight.before.view(2, K, N)
        total = before.double() + truth.detach()
        torch.testing.assert_close(main.double(), total, rtol=1e-6, atol=1e-5)

    def test_attributes_are_read_from_the_parameter_not_from_the_view(self):
        weight, view = self.parameter(False)
        weight.zero_out_wgrad = True
        x = normal(7, K, dtype=torch.bfloat16)
        npu_gmm(
            x, view, group_list=[3, 7], gemm_fusion=True, original_weight=weight
        ).sum().backward()
        assert not weight.grad.any()
        assert not torch.equal(weight.main_grad, weight.before)

    def test_no_placeholder_gradient_unless_required(self):
        weight, view = self.parameter(False, tell=False)
        x = normal(7, K, dtype=torch.bfloat16)
        npu_gmm(
            x, view, group_list=[3, 7], gemm_fusion=True, original_weight=weight
        ).sum().backward()
        assert weight.grad is None
        assert not torch.equal(weight.main_grad, weight.before)

    def test_the_parameter_hook_runs_with_empty_input(self):
        weight, view = self.parameter(False)
        weight.zero_out_wgrad = True
        npu_gmm(
            torch.zeros(0, K).bfloat16(),
            view,
            group_list=[0, 0],
            gemm_fusion=True,
            original_weight=weight,
        ).sum().backward()
        assert weight.grad is not None and torch.equal(weight.main_grad, weight.before)


def test_three_launches_and_the_flops_of_three_products():
    x, w = normal(9, K).requires_grad_(), normal(3, K, N, seed=1).requires_grad_()
    groups = torch.tensor([2, 2, 9])
    with FlopCounterMode(display=False) as flops:
        npu_gmm(x, w, group_list=groups).sum().backward()
    assert flops.get_total_flops() == 6 * 9 * K * N
    with traffic() as count:
        npu_gmm(x.detach(), w.detach(), group_list=groups)
    assert count.kernels == 1


def test_only_rows_and_weights_are_saved_for_backward():
    x = normal(9, K, dtype=torch.bfloat16).requires_grad_()
    w = torch.nn.Parameter(normal(3, K, N, dtype=torch.bfloat16))
    groups = torch.tensor([2, 2, 9])
    with saved_for_backward() as saved:
        npu_gmm(x, w, group_list=groups)
    assert saved.bytes == x.nbytes + w.nbytes + groups.nbytes


def test_checkpointed_and_compiled():
    groups, w = torch.tensor([2, 2, 9]), normal(3, K, N, seed=1)
    plain = lambda x, w: npu_gmm(x, w, group_list=groups)  # noqa: E731
    again = lambda x, w: checkpoint(plain, x, w, use_reentrant=False)  # noqa: E731
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for other in (again, compiled):
        assert_close_with_grads(other, plain, (normal(9, K), w), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_list": None}, "npu_gmm: group_list: expected a group for each of the 4 rows"),
        (
            {"group_list": None, "group_type": 2},
            "group_list: expected a group for each of the 6 rows",
        ),
        ({"group_list": [1.5, 4]}, r"an int64 tensor or a list, got \[1.5, 4\]"),
        ({"group_list": [3, 1]}, r"group_list: expected sums that never decrease and end at 4"),
        ({"group_list": [1, 3]}, r"end at 4, got \[1, 3\]"),
        ({"group_list": torch.tensor([1, 4]).int()}, "group_list: expected dtype int64, got int32"),
        ({"group_list": [4]}, r"weight: expected shape \(1, 6, 5\), got \(2, 6, 5\)"),
        ({"group_type": 1}, "group_type: expected one of -1, 0, 2, got 1"),
        ({"weight": torch.zeros(6, 5)}, "weight: expected 3 dimensions"),
        ({"weight": torch.zeros(2, 6, 5).half()}, "weight: expected the dtype of x"),
        ({"x": torch.zeros(4, 6, dtype=torch.int64)}, "x: expected dtype"),
        ({"bias": torch.zeros(2, 5, requires_grad=True)}, "bias: .* without gradient"),
        ({"bias": torch.zeros(5)}, r"bias: expected shape \(2, 5\)"),
        ({"gemm_fusion": True}, "original_weight: expected a parameter with a main_grad"),
        ({"group_type": 2, "weight": torch.zeros(4, 5)}, r"group_list: .* end at 6"),
    ],
)
def test_bad_arguments(change, message):
    given = {"x": torch.zeros(4, K), "weight": torch.zeros(2, K, N), "group_list": [1, 4]}
    with pytest.raises(OperatorError, match=message):
        npu_gmm(**(given | change))


def test_sizes_are_a_tensor_and_add_up():
    x, w = torch.zeros(4, K), torch.zeros(2, K, N)
    with pytest.raises(OperatorError, match=r"npu_gmm_v2: group_list: expected a tensor"):
        npu_gmm_v2(x, w, group_list=[1, 3])
    with pytest.raises(OperatorError, match=r"sizes that add up to the 4 rows, got \[1, 4\]"):
        npu_gmm_v2(x, w, group_list=torch.tensor([1, 4]))
