"""Weight gradients of linear layers: into ``grad`` or ``main_grad``, at once or later.

    dW [out, in] = dy^T x        y, dy [tokens, out]    x [tokens, in]

With ``fuse`` (gradient accumulation fusion) the product is added to ``weight.main_grad``, and
autograd gets a placeholder that makes it run the hooks of the parameter. Delayed gradients keep
``x`` and ``dy`` until :meth:`DelayedWgrad.backward_dw`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.te import kernels
from mindspeed.te.base import get_dummy_wgrad


@dataclass(frozen=True)
class WgradOptions:
    """Where the weight gradients of a layer go.

    Attributes:
        fuse: Add them to ``weight.main_grad``.
        delayed: Queue of computations that :meth:`DelayedWgrad.backward_dw` runs; None: at once.
    """

    fuse: bool = False
    delayed: deque[Callable[[], None]] | None = field(default=None, compare=False)


def weight_gradient(
    weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, options: WgradOptions
) -> torch.Tensor | None:
    """Return the gradient of ``weight``, a placeholder for it, or None where it is delayed.

    Args:
        weight: ``[out, in]``.
        x: Input, ``[..., in]``.
        grad: Output gradient, ``[..., out]`` in the dtype of ``x``.
        options: Where the gradient goes.
    """
    if options.delayed is None:
        return _compute(weight, x, grad, options.fuse)

    def compute() -> None:
        add_delayed(weight, _compute(weight, x, grad, options.fuse), options.fuse)

    options.delayed.append(compute)
    return None


def _compute(
    weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, fuse: bool
) -> torch.Tensor | None:
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    main_grad = getattr(weight, "main_grad", None) if fuse else None
    if main_grad is None:
        return (grad.t() @ x).to(weight.dtype)
    kernels.accumulate_wgrad(x, grad, main_grad)
    return added_to_main_grad(weight)


def added_to_main_grad(
    weight: torch.Tensor, shape: Sequence[int] | None = None
) -> torch.Tensor | None:
    """Record on the parameter that its gradient is in ``main_grad``, and return a placeholder.

    The placeholder makes autograd run the hooks of the parameter; it is zero only when the owner of
    the buffer requires it (``zero_out_wgrad``: the same parameter also receives other gradients).

    Args:
        weight: The parameter, ``[out, in]``, any dtype.
        shape: Shape that autograd expects, of the parameter by default.

    Returns:
        ``shape`` in the dtype of ``weight``; None where no hook waits for a gradient.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zero = getattr(weight, "zero_out_wgrad", False)
    expected = weight.shape if shape is None else shape
    return get_dummy_wgrad(list(expected), weight.dtype, zero=zero, where=weight.device)


def add_delayed(weight: torch.Tensor, wgrad: torch.Tensor | None, fuse: bool) -> None:
    """Put a weight gradient that was computed outside autograd where autograd would have.

    The placeholder of a gradient that is already in ``main_grad`` adds nothing, but is stored for
    code that counts finished gradients.

    Args:
        weight: The parameter, ``[out, in]``, any dtype.
        wgrad: Its gradient, or the placeholder, with the same shape and dtype; None does nothing.
        fuse: Gradients are added to ``main_grad``.
    """
    if wgrad is None:
        return
    in_main_grad = fuse and getattr(weight, "main_grad", None) is not None
    if weight.grad is None:
        weight.grad = wgrad
    elif not in_main_grad:
        weight.grad.add_(wgrad)


class DelayedWgrad:
    """Weight gradients delayed until ``backward_dw`` (mixed into modules with weights).

    A weight with a delayed gradient is marked ``skip_backward_post_hook``: its owner's hook runs
    after :meth:`backward_dw` (:meth:`register_wgrad_accumulation_and_reduce_hooks`), not at the end
    of autograd's backward, where there is no gradient yet.
    """

    _delayed: deque[Callable[[], None]] | None
    _wgrad_hooks: list[Callable[[], Any]]

    def _mark_delayed(self, weight: torch.Tensor) -> None:
        if self._delayed is not None:
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def _init_delayed(self, delay: bool) -> None:
        self._delayed = deque() if delay else None
        self._wgrad_hooks = []

    def need_backward_dw(self) -> bool:
        """Return whether weight gradients are computed by :meth:`backward_dw`."""
        return self._delayed is not None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Run ``hook()`` after :meth:`backward_dw` has produced the weight gradient."""
        self._wgrad_hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the weight gradient of the oldest backward pass that delayed it."""
        if not self._delayed:
            return
        with torch.no_grad():
            self._delayed.popleft()()
        for hook in self._wgrad_hooks:
            hook()
