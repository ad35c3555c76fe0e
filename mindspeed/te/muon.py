"""Substitute for ``emerging_optimizers``, the package that Megatron's Muon is built on.

Muon (https://kellerjordan.github.io/posts/muon) updates a weight matrix with its momentum made
orthogonal: of ``M = U S V^T`` about ``U V^T``, by a Newton-Schulz iteration, matrix products only:

    X <- M / |M|;    A = X X^T,    X <- a X + (b A + c A^2) X    for each (a, b, c)

Megatron splits fused qkv weights, chooses the scale and hands other parameters to Adam. NVIDIA's
package (github.com/NVIDIA-NeMo/Emerging-Optimizers, v0.1.0) gives the same digits; it needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

# Chosen for five steps (https://leloykun.github.io/ponder/muon-opt-coeffs), and Muon's first.
COEFFICIENTS = {
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "simple": ((3.4445, -4.7750, 2.0315),),
}
_EPS = 1e-7


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum, made orthogonal before it is applied; the base of Megatron's Muon.

    The state of a parameter is ``momentum_buffer``, an exponential mean of its gradients.

    Args:
        params: matrices, or param groups of them.
        use_nesterov: mix the momentum with the gradient once more.
        weight_decay_method: decay the weights (decoupled) or add to the gradient (l2).
        fp32_matmul_prec: precision of matrix products, torch's names; medium: in bf16.
        scaled_orthogonalize_fn: [m, n] -> [m, n], fp32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum_beta: float,
        weight_decay: float,
        *,
        use_nesterov: bool,
        weight_decay_method: Literal["decoupled", "l2"],
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., Tensor],
    ) -> None:
        self.use_nesterov = use_nesterov
        self.weight_decay_method = weight_decay_method
        self.fp32_matmul_prec = fp32_matmul_prec
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        defaults = {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_parameter(p, p.grad, group)
        return loss

    def _step_parameter(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if p.dim() != 2:
            raise ValueError(f"Muon takes matrices, not parameters of shape {tuple(p.shape)}")
        beta, decay = group["momentum_beta"], group["weight_decay"]
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        if self.weight_decay_method == "l2":
            grad = grad.add(p, alpha=decay)
        else:
            p.add_(p, alpha=-decay * group["lr"])
        momentum = state["momentum_buffer"].lerp_(grad, 1 - beta)
        update = grad.lerp(momentum, beta) if self.use_nesterov else momentum
        options = {name: value for name, value in group.items() if name != "params"}
        with _matmul_precision(self.fp32_matmul_prec):
            update = self.orthogonalize(p, update, **options)
        p.add_(update, alpha=-group["lr"])

    def orthogonalize(self, p: Tensor, grad: Tensor, **options: Any) -> Tensor:
        """The fp32 update ``[m, n]`` of one parameter ``[m, n]``; subclasses split fused ones."""
        return self.scaled_orthogonalize_fn(grad)


def newton_schulz(
    x: Tensor,
    steps: int,
    coefficient_type: str = "quintic",
    *,
    transpose: bool | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """About the nearest orthogonal matrix: singular values between 0.7 and 1.2.

    Args:
        x: ``[m, n]``, fp32; with ``tp_group`` the shard of this rank.
        coefficient_type: a key of :data:`COEFFICIENTS`.
        transpose: iterate on the transpose; default: where m > n, which is cheaper.
        tp_group: ranks that share the columns of ``x`` (of its transpose); each step reduces
            m x m (n x n) elements over it.

    Returns:
        ``[m, n]``, fp32.
    """
    transpose = x.shape[0] > x.shape[1] if transpose is None else transpose
    x = x.mT if transpose else x
    norm = x.norm()
    if tp_group is not None:
        dist.all_reduce(norm.square_(), group=tp_group)
        norm.sqrt_()
    x = x / norm.clamp_min(_EPS)
    if torch.get_float32_matmul_precision() == "medium":
        x = x.bfloat16()
    for a, b, c in islice(cycle(COEFFICIENTS[coefficient_type]), steps):
        gram = x @ x.mT
        if tp_group is not None:
            dist.all_reduce(gram, group=tp_group)
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a, alpha=1.0)
    return (x.mT if transpose else x).float()


def newton_schulz_tp(
    x: Tensor,
    steps: int,
    coefficient_type: str,
    tp_group: dist.ProcessGroup,
    partition_dim: int | None = None,
    mode: Literal["duplicated", "distributed"] = "duplicated",
) -> Tensor:
    """:func:`newton_schulz` of a matrix that tensor-parallel ranks share.

    ``duplicated`` gathers the matrix (one all-gather) and every rank computes it whole;
    ``distributed`` computes on shards with two small all-reduces a step.

    Args:
        x: ``[m, n]``, fp32: the shard of this rank.
        coefficient_type: a key of :data:`COEFFICIENTS`.
        partition_dim: dimension that is sharded; None: ``x`` is whole, nothing is communicated.

    Returns:
        ``[m, n]``, fp32: the shard of this rank.
    """
    if partition_dim is None:
        return newton_schulz(x, steps, coefficient_type)
    if mode == "distributed":
        return newton_schulz(
            x, steps, coefficient_type, transpose=partition_dim == 0, tp_group=tp_group
        )
    shards = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(shards, x.contiguous(), group=tp_group)
    whole = newton_schulz(torch.cat(shards, dim=partition_dim), steps, coefficient_type)
    return whole.chunk(tp_group.size(), dim=partition_dim)[tp_group.rank()]


def get_muon_scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    """Factor of the orthogonal update of an [out, in] matrix.

    Args:
        mode: ``spectral`` (arXiv:2502.16982), ``unit_rms_norm`` (arXiv:2502.07529) or
            ``shape_scaling`` (Muon's own).
    """
    factors = {
        "spectral": max(size_out, size_in),
        "unit_rms_norm": size_out / size_in,
        "shape_scaling": max(1, size_out / size_in),
    }
    return float(factors[mode] ** 0.5)


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
