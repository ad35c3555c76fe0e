"""The multiplication of the MoE router, against sums of products in float64."""

from __future__ import annotations

import pytest
import torch

from mindspeed.te.gemm import general_gemm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_bias_are_rounded_once(dtype):
    generator = torch.Generator().manual_seed(5)
    weight, x, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((16, 96), (64, 96), (16,))
    )
    result = general_gemm(weight, x, out_dtype=dtype, layout="TN", bias=bias)[0]
    exact = x.double() @ weight.double().t() + bias.double()
    # Half a unit in the last place, and the error of an fp32 sum of 96 products.
    limit = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-4
    assert ((result.double() - exact).abs() <= limit).all()


def test_layouts_give_the_gradients_of_a_linear_layer():
    weight, x, grad = (torch.randn(*shape).double() for shape in ((3, 5), (4, 5), (4, 3)))
    dgrad = general_gemm(weight, grad, layout="NN", grad=True)[0]
    wgrad, bias_grad, *_ = general_gemm(x, grad, layout="NT", grad=True, bias=torch.zeros(3))
    torch.testing.assert_close(dgrad, grad @ weight, rtol=0, atol=1e-12)
    torch.testing.assert_close(wgrad, grad.t() @ x, rtol=0, atol=1e-12)
    torch.testing.assert_close(bias_grad, grad.sum(0), rtol=0, atol=1e-12)
