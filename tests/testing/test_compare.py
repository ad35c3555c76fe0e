"""The comparison finds a wrong output, a wrong gradient and a missing gradient, and names it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mindspeed.testing import assert_close_with_grads


def product(x, y, name="unused"):
    return x * y, x.sum()


def product_with_wrong_gradient(x, y, name="unused"):
    return x * y.detach() + (y - y.detach()) * 2 * x.detach(), x.sum()


def product_without_gradient(x, y, name="unused"):
    return x * y.detach(), x.sum()


def shifted_product(x, y, name="unused"):
    return x * y + 1e-3, x.sum()


INPUTS = (torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64), "name")


def test_equal_functions_are_equal():
    assert_close_with_grads(product, lambda x, y, name: (y * x, x.sum()), INPUTS, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (shifted_product, "output 0"),
        (product_with_wrong_gradient, "gradient of input 1"),
        (product_without_gradient, r"gradients of \['gradient of input 0'\] exist"),
    ],
)
def test_a_difference_is_found_and_named(wrong, message):
    with pytest.raises(AssertionError, match=message):
        assert_close_with_grads(wrong, product, INPUTS, rtol=1e-6, atol=1e-6)


def test_modules_are_compared_with_their_parameters():
    linear = nn.Linear(4, 2)
    same, other = copy.deepcopy(linear), copy.deepcopy(linear)
    x = (torch.randn(3, 4),)
    assert_close_with_grads(same, linear, x, rtol=0, atol=0)
    other.bias.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(AssertionError, match="gradient of bias"):
        assert_close_with_grads(other, linear, x, rtol=1e-5, atol=1e-5)


def test_inputs_are_left_alone():
    x = torch.ones(2)
    assert_close_with_grads(
        lambda t: t.mul_(2) if not t.requires_grad else t * 2, lambda t: t + t, (x,), rtol=0, atol=0
    )
    assert torch.equal(x, torch.ones(2)) and not x.requires_grad
