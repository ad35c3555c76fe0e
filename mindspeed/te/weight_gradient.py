"""Weight gradients of linear layers: into ``grad`` or ``main_grad``, at once or later.

    dW [out, in] = dy^T x        y, dy [tokens, out]    x [tokens, in]

With ``fuse`` (gradient accumulation fusion) the product is added to ``weight.main_grad``, and
autograd gets a placeholder that makes it run the hooks of the parameter. Delayed gradients keep
``x`` and ``dy`` until :meth:`DelayedWgrad.backward_dw`.

While a pipeline schedule divides backward, layers with a store
(:mod:`mindspeed.pipeline.schedule.weight_gradients`) hide their weights from autograd and add the
gradients themselves (:func:`add_gradient`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mindspeed.te import device_groups, kernels
from mindspeed.te.base import get_dummy_wgrad
from mindspeed.te.device_groups import Splits

if TYPE_CHECKING:
    from mindspeed.pipeline.schedule.weight_gradients import WeightGradients


class GradientAnchor(Protocol):
    """Returns weight gradients to autograd later in a backward; :mod:`mindspeed.moe.anchor`."""

    def put(
        self, weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor | None]]
    ) -> None: ...


@dataclass(frozen=True)
class WgradOptions:
    """Destination of the weight gradients of a layer.

    Attributes:
        fuse: Add them to ``weight.main_grad``.
        delayed: Queue of computations that :meth:`DelayedWgrad.backward_dw` runs; None: at once.
        store: Takes them while a pipeline schedule divides backward.
        anchor: Takes their computations and hands the gradients to autograd later.
    """

    fuse: bool = False
    delayed: deque[Callable[[], None]] | None = field(default=None, compare=False)
    store: WeightGradients | None = field(default=None, compare=False)
    anchor: GradientAnchor | None = field(default=None, compare=False)

    @property
    def delay_hidden(self) -> Callable[[Callable[[], None]], None] | None:
        """Takes computations for weights that autograd does not see; None: none is delayed."""
        delayed = self.delayed
        return None if delayed is None else lambda run: delayed.append(HiddenGradient(run))

    def hide(self, x: Tensor, *weights: Tensor) -> Hidden | None:
        """Hide the weights of a layer from autograd if the store takes their gradients.

        Args:
            *weights: Of the layer, or the parameter that it views.
        """
        if self.store is None or not self.store.takes(x, weights):
            return None
        return Hidden(self.store, weights)


@dataclass(frozen=True)
class HiddenGradient:
    """Computation of gradients that a plan reduces: hooks of the weights have nothing to do.

    Attributes:
        run: Adds the gradients.
    """

    run: Callable[[], None]

    def __call__(self) -> None:
        """Add them."""
        self.run()


class Hidden(NamedTuple):
    """Weights that autograd does not see, as one argument of its functions.

    Attributes:
        store: Takes the computation of their gradients in backward.
    """

    store: WeightGradients
    weights: tuple[Tensor, ...]


def weight_gradient(
    weight: Tensor, x: Tensor, grad: Tensor, options: WgradOptions
) -> Tensor | None:
    """Return the gradient of ``weight``, a placeholder for it, or None where it is delayed.

    Args:
        weight: ``[out, in]``.
        x: Input, ``[..., in]``.
        grad: Output gradient, ``[..., out]`` in the dtype of ``x``.
    """
    if options.anchor is not None:
        options.anchor.put([weight], lambda: [_compute(weight, x, grad, options.fuse)])
        return None
    if options.delayed is None:
        return _compute(weight, x, grad, options.fuse)

    def compute() -> None:
        add_delayed(weight, _compute(weight, x, grad, options.fuse), options.fuse)

    options.delayed.append(compute)
    return None


def _compute(weight: Tensor, x: Tensor, grad: Tensor, fuse: bool) -> Tensor | None:
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    main_grad = getattr(weight, "main_grad", None) if fuse else None
    if main_grad is None:
        return (grad.t() @ x).to(weight.dtype)
    kernels.accumulate_wgrad(x, grad, main_grad)
    return added_to_main_grad(weight)


def add_gradient(weight: Tensor, x: Tensor, grad: Tensor, fuse: bool) -> None:
    """Add the gradient of a weight that autograd does not see to ``main_grad`` or ``grad``.

    Args:
        weight: ``[out, in]``.
        x: Input, ``[..., in]``.
        grad: Output gradient, ``[..., out]`` in the dtype of ``x``.
        fuse: The product is added to ``main_grad`` without rounding it to the weight's dtype.
    """
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    main_grad = getattr(weight, "main_grad", None)
    if fuse and main_grad is not None:
        kernels.accumulate_wgrad(x, grad, main_grad)
    else:
        add_product(weight, (grad.t() @ x).to(weight.dtype))


def add_expert_gradients(
    weights: Sequence[Tensor], splits: Splits, fuse: bool, x: Tensor, grad: Tensor
) -> None:
    """Add the gradients of experts that autograd does not see to ``main_grad`` or ``grad``.

    Args:
        weights: ``[out, in]`` of each expert; frozen ones get none.
        fuse: The products are added to ``main_grad`` without rounding them.
        x: Input, ``[t, in]``.
        grad: Output gradient, ``[t, out]`` in the dtype of ``x``.
    """
    main_grads = [getattr(weight, "main_grad", None) for weight in weights]
    if fuse and all(main_grad is not None for main_grad in main_grads):
        device_groups.accumulate_wgrad(grad, x, splits, main_grads)  # type: ignore[arg-type]
        return
    products = device_groups.wgrad(grad, x, splits).unbind(0)
    for weight, wgrad in zip(weights, products, strict=True):
        if weight.requires_grad:
            add_product(weight, wgrad.to(weight.dtype))


def add_product(weight: Tensor, wgrad: Tensor) -> None:
    """Add the gradient of a weight that autograd does not see, as the hook of its owner would.

    Args:
        wgrad: Shape and dtype of ``weight``.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(wgrad)
    elif weight.grad is None:
        weight.grad = wgrad
    else:
        weight.grad.add_(wgrad)


def added_to_main_grad(weight: Tensor, shape: Sequence[int] | None = None) -> Tensor | None:
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


def add_delayed(weight: Tensor, wgrad: Tensor | None, fuse: bool) -> None:
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

    Attributes:
        weight_gradients: Takes the weight gradients while a pipeline schedule divides backward.
        gradient_anchor: Takes the weight gradients of the calls made while it is set.
    """

    weight_gradients: WeightGradients | None = None
    gradient_anchor: GradientAnchor | None = None
    fuse_wgrad_accumulation: bool
    _delayed: deque[Callable[[], None]] | None
    _wgrad_hooks: list[Callable[[], Any]]

    def _mark_delayed(self, weight: Tensor) -> None:
        if self._delayed is not None:
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def _init_delayed(self, delay: bool) -> None:
        self._delayed = deque() if delay else None
        self._wgrad_hooks = []

    @property
    def _wgrad_options(self) -> WgradOptions:
        return WgradOptions(
            self.fuse_wgrad_accumulation, self._delayed, self.weight_gradients, self.gradient_anchor
        )

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
        compute = self._delayed.popleft()
        with torch.no_grad():
            compute()
        if not isinstance(compute, HiddenGradient):
            for hook in self._wgrad_hooks:
                hook()
