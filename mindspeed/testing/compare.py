"""Compares two implementations of the same function: outputs and every gradient.

assert_close_with_grads(ring_attention, full_attention, (q, k, v), rtol=0, atol=1e-12)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def assert_close_with_grads(
    actual: Callable[..., Any],
    expected: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    rtol: float,
    atol: float,
    seed: int = 0,
) -> None:
    """Asserts equal outputs and equal gradients of two functions or modules.

    Both are called with their own copies of `inputs`; floating-point tensors among them require
    gradients. The backward starts from the same random cotangents, so that errors do not cancel.
    If both are modules, the gradients of their parameters are compared by name too.

    Raises:
        AssertionError: names the output or gradient that differs and shows by how much.
    """
    outputs, gradients = _run(actual, inputs, seed)
    expected_outputs, expected_gradients = _run(expected, inputs, seed)
    if len(outputs) != len(expected_outputs):
        raise AssertionError(
            f"{len(outputs)} tensors were returned, {len(expected_outputs)} expected"
        )
    if gradients.keys() != expected_gradients.keys():
        raise AssertionError(
            f"gradients of {sorted(gradients)} exist, of {sorted(expected_gradients)} expected"
        )
    for index, pair in enumerate(zip(outputs, expected_outputs, strict=True)):
        _assert_close(f"output {index}", *pair, rtol, atol)
    for name, gradient in gradients.items():
        _assert_close(name, gradient, expected_gradients[name], rtol, atol)


def _assert_close(
    name: str, actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float
) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}"
    )


def _run(
    function: Callable[..., Any], inputs: Sequence[Any], seed: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    copies = [_own_copy(value) for value in inputs]
    wanted = {
        f"gradient of input {index}": value
        for index, value in enumerate(copies)
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    if isinstance(function, nn.Module):
        wanted |= {f"gradient of {name}": p for name, p in function.named_parameters()}
    outputs = [leaf for leaf in tree_leaves(function(*copies)) if isinstance(leaf, torch.Tensor)]
    generator = torch.Generator().manual_seed(seed)
    differentiable = [output for output in outputs if output.requires_grad]
    cotangents = [
        torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        for output in differentiable
    ]
    found = (
        torch.autograd.grad(
            differentiable, list(wanted.values()), grad_outputs=cotangents, allow_unused=True
        )
        if differentiable and wanted
        else [None] * len(wanted)
    )
    gradients = {
        name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None
    }
    return [output.detach() for output in outputs], gradients


def _own_copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    return copy.requires_grad_() if copy.is_floating_point() else copy
