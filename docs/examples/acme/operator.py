"""Squared ReLU, ``y = max(x, 0)^2``: an operator that keeps its input for backward, no more."""

import torch

from mindspeed.ops import Operator


def squared_relu(x):
    """``x``: any shape, fp32, bf16 or fp16; returns shape and dtype of ``x``."""
    return SQUARED_RELU(x)


def _reference(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # round once, at the end
    return wide.relu().square().to(x.dtype)


def _reference_backward(dy, x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (2 * dy * wide.relu()).to(x.dtype)


def _samples(dtype):
    for shape in ((4, 8), (3, 5, 7), (0, 2)):
        yield (torch.linspace(-2, 2, torch.Size(shape).numel()).view(shape).to(dtype),)


def _samples_backward(dtype):
    for (x,) in _samples(dtype):
        yield torch.ones_like(x), x


SQUARED_RELU_BACKWARD = Operator(
    "acme_squared_relu_backward(Tensor dy, Tensor x) -> Tensor",
    reference=_reference_backward,
    fake=lambda dy, x: torch.empty_like(x),
    samples=_samples_backward,
)
SQUARED_RELU = Operator(
    "acme_squared_relu(Tensor x) -> Tensor",
    reference=_reference,  # the CPU kernel, and the fallback of devices without their own
    fake=torch.empty_like,
    autograd=(
        lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lambda ctx, dy: SQUARED_RELU_BACKWARD(dy, *ctx.saved_tensors),
    ),
    samples=_samples,
)
