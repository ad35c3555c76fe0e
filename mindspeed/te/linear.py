"""``Linear`` and ``LayerNormLinear``: column-, row- and not-parallel linear layers.

Layout ``[s, b, h]``. With p tensor-parallel ranks and sequence parallelism (SP):

    column   x [s/p, b, h] --all_gather--> [s, b, h] @ W^T [h, o/p]      -> [s, b, o/p]
    row      x [s, b, h/p] @ W^T [h/p, o] --reduce_scatter--> [s/p, b, o]  (+ bias)

Without SP the column layer receives the whole ``x`` and sums its input gradient; the row layer ends
in an all_reduce. In the backward pass the reduction of the input gradient runs while the weight
gradient is computed. Saved for backward: the input slice as it came in (gathered again), and W.

With ``fuse_wgrad_accumulation`` the weight gradient goes straight into ``weight.main_grad``;
``delay_wgrad_compute`` keeps its operands until :meth:`Linear.backward_dw`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed.te import comm, fp8, kernels
from mindspeed.te.base import (
    DATA_PARALLEL_TRACKER,
    GetTracker,
    Init,
    TransformerEngineBaseModule,
    get_dummy_wgrad,
    mark_tensor_parallel,
)
from mindspeed.te.quantization import Casts


@dataclass(frozen=True)
class Plan:
    """What a linear layer communicates, where its weight gradient goes, how it casts to fp8."""

    group: Any = None
    gather_input: bool = False
    reduce_dgrad: bool = False
    fuse_wgrad: bool = False
    delayed: deque[Callable[[], None]] | None = field(default=None, compare=False)
    casts: Casts | None = field(default=None, compare=False)


def weight_gradient(
    weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, fuse: bool
) -> torch.Tensor | None:
    """Return the gradient of ``weight``, or add it to ``main_grad`` and return a placeholder."""
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    main_grad = getattr(weight, "main_grad", None) if fuse else None
    if main_grad is None:
        return (grad.t() @ x).to(weight.dtype)
    kernels.accumulate_wgrad(x, grad, main_grad)
    return added_to_main_grad(weight)


def added_to_main_grad(
    weight: torch.Tensor, shape: Sequence[int] | None = None
) -> torch.Tensor | None:
    """Note on the parameter that its gradient is in ``main_grad``, and return a placeholder.

    The placeholder lets autograd run the hooks of the parameter; it is zero only when the owner of
    the buffer asks for that (``zero_out_wgrad``: the same parameter also receives other gradients).

    Args:
        weight: The parameter.
        shape: Shape that autograd expects, of the parameter by default.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zero = getattr(weight, "zero_out_wgrad", False)
    wanted = weight.shape if shape is None else shape
    return get_dummy_wgrad(list(wanted), weight.dtype, zero=zero, where=weight.device)


class _Linear(torch.autograd.Function):
    """``y = x W^T + b`` with the communication of a column-parallel layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        plan: Plan,
    ) -> torch.Tensor:
        ctx.plan, ctx.dtype, ctx.x_dtype = plan, dtype, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        x = x.to(dtype)
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        whole = comm.all_gather_first_dim(x, plan.group)[0] if plan.gather_input else x
        if plan.casts is not None:
            out = plan.casts.forward(whole, weight).to(dtype)
            return out if bias is None else out + bias.to(dtype)
        return F.linear(whole, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        plan: Plan = ctx.plan
        gathering = None
        if ctx.needs_input_grad[1] and plan.gather_input:
            x, gathering = comm.all_gather_first_dim(x, plan.group, async_op=True)
        dgrad, reducing = None, None
        if plan.casts is not None:
            plan.casts.grad.observe(grad)
        if ctx.needs_input_grad[0]:
            if plan.casts is None:
                dgrad = grad @ weight.to(ctx.dtype)
            else:
                dgrad = plan.casts.dgrad(grad, weight).to(ctx.dtype)
            dgrad, reducing = _start_reduction(dgrad, plan)
        if gathering is not None:
            gathering.wait()
        wgrad = None
        if ctx.needs_input_grad[1]:
            operands = (x, grad) if plan.casts is None else plan.casts.wgrad_operands(x, grad)
            wgrad = _now_or_later(plan, weight, *operands)
        bgrad = None
        if ctx.needs_input_grad[2]:
            bgrad = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        if reducing is not None:
            reducing.wait()
        if plan.casts is not None:
            plan.casts.finish()
        return None if dgrad is None else dgrad.to(ctx.x_dtype), wgrad, bgrad, None, None


def _start_reduction(dgrad: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, Any]:
    if plan.gather_input:
        return comm.reduce_scatter_first_dim(dgrad, plan.group, async_op=True)
    if plan.reduce_dgrad:
        dgrad = dgrad.contiguous()
        return dgrad, dist.all_reduce(dgrad, group=plan.group, async_op=True)
    return dgrad, None


def _now_or_later(
    plan: Plan, weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor | None:
    if plan.delayed is None:
        return weight_gradient(weight, x, grad, plan.fuse_wgrad)

    def compute() -> None:
        add_delayed(weight, weight_gradient(weight, x, grad, plan.fuse_wgrad), plan.fuse_wgrad)

    plan.delayed.append(compute)
    return None


def add_delayed(weight: torch.Tensor, wgrad: torch.Tensor | None, fuse: bool) -> None:
    """Put a weight gradient that was computed outside autograd where autograd would have.

    The placeholder of a gradient that is in ``main_grad`` already adds nothing, but whoever counts
    finished gradients looks for it.
    """
    if wgrad is None:
        return
    in_main_grad = fuse and getattr(weight, "main_grad", None) is not None
    if weight.grad is None:
        weight.grad = wgrad
    elif not in_main_grad:
        weight.grad.add_(wgrad)


class DelayedWgrad:
    """Weight gradients put off until ``backward_dw`` (mixed into modules with weights).

    A weight whose gradient is put off is marked ``skip_backward_post_hook``: its owner's hook
    belongs after :meth:`backward_dw`
    (:meth:`register_wgrad_accumulation_and_reduce_hooks`), not at the end of autograd's backward,
    where there is no gradient yet.
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
        """Say whether weight gradients are computed by :meth:`backward_dw`."""
        return self._delayed is not None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Run ``hook()`` after :meth:`backward_dw` has produced the weight gradient."""
        self._wgrad_hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the weight gradient of the oldest backward pass that put it off."""
        if not self._delayed:
            return
        with torch.no_grad():
            self._delayed.popleft()()
        for hook in self._wgrad_hooks:
            hook()


class Linear(DelayedWgrad, TransformerEngineBaseModule):
    """A linear layer, split over a tensor-parallel group or not.

    Args:
        in_features: Size of the last dimension of the whole input.
        out_features: Size of the last dimension of the whole output.
        sequence_parallel: The activations outside the parallel region are split along ``s``.
        fuse_wgrad_accumulation: Add weight gradients into ``weight.main_grad``.
        tp_group: Tensor-parallel process group; may be set later.
        tp_size: Number of tensor-parallel ranks.
        get_rng_state_tracker: Function that returns the RNG tracker for initialisation.
        rng_tracker_name: Name of the tracker's stream to initialise from.
        init_method: Called with the weight.
        bias: Whether there is a bias.
        return_bias: Return ``(output, bias)`` without adding the bias.
        params_dtype: Dtype of the parameters.
        parallel_mode: ``"column"``, ``"row"`` or None.
        device: Where the parameters live.
        delay_wgrad_compute: Compute weight gradients only in :meth:`backward_dw`.
        ub_name: Name of the layer for communication overlap (kept, not used).
        **userbuffers: ``ub_*`` and ``symmetric_ar_type``: only false values are possible.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: GetTracker | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
        *,
        rng_tracker_name: str | None = None,
        delay_wgrad_compute: bool = False,
        ub_name: str | None = None,
        **userbuffers: Any,
    ) -> None:
        super().__init__()
        refuse_userbuffers(userbuffers)
        self._keep_linear_options(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            bias=bias,
            return_bias=return_bias,
        )
        self._keep_local_features(in_features, out_features, parallel_mode)
        self.ub_name = ub_name
        self._init_delayed(delay_wgrad_compute)
        self._first_microbatch: bool | None = None
        self.weight = self.new_weight(
            (self.out_features, self.in_features),
            init_method,
            dtype=params_dtype,
            device=device,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
        )
        mark_linear(self.weight, parallel_mode, rng_tracker_name)
        self._mark_delayed(self.weight)
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = self.new_vector(self.out_features, 0.0, dtype=params_dtype, device=device)
            mark_bias(self.bias, parallel_mode, self.sequence_parallel)

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **unused: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, or ``(output, bias)`` with ``return_bias``."""
        row = self.parallel_mode == "row" and comm.group_size(self.tp_group) > 1
        self._first_microbatch = is_first_microbatch
        out = self._multiply(inp, None if row or not self.apply_bias else self.bias)
        if row:
            out = comm.reduce_output(out, self.tp_group, self.sequence_parallel)
            if self.apply_bias and self.bias is not None:
                out = out + self.bias.to(out.dtype)
        return (out, self.bias) if self.return_bias else out

    def _multiply(self, inp: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer without its norm and its output's reduction; adapters replace it."""
        return linear(inp, self.weight, bias, self._plan())

    def _plan(self) -> Plan:
        column = self.parallel_mode == "column" and comm.group_size(self.tp_group) > 1
        return Plan(
            group=self.tp_group,
            gather_input=column and self.sequence_parallel,
            reduce_dgrad=column and not self.sequence_parallel,
            fuse_wgrad=self.fuse_wgrad_accumulation,
            delayed=self._delayed,
            casts=next(iter(fp8.casts_of(self, is_first_microbatch=self._first_microbatch)), None),
        )

    def extra_repr(self) -> str:
        """Return the shape of this rank's weight."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.use_bias}, {self.parallel_mode}"
        )


class LayerNormLinear(Linear):
    """LayerNorm or RMSNorm followed by a :class:`Linear`, as one module with one set of names.

    Args:
        in_features: Hidden size.
        out_features: Size of the whole output.
        eps: Added to the variance.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: The stored norm weight is the deviation from one.
        return_layernorm_output: Return ``(output, normalised input)``.
        **linear_options: The options of :class:`Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **linear_options: Any,
    ) -> None:
        super().__init__(
            in_features, out_features, params_dtype=params_dtype, device=device, **linear_options
        )
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization {normalization!r} is not one of LayerNorm, RMSNorm")
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        one = 0.0 if zero_centered_gamma else 1.0
        self.layer_norm_weight = self.new_vector(
            in_features, one, dtype=params_dtype, device=device
        )
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias: torch.Tensor | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = self.new_vector(
                in_features, 0.0, dtype=params_dtype, device=device
            )
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **unused: Any
    ) -> Any:
        """Normalise and multiply; see :meth:`Linear.forward`."""
        normed = kernels.normalize(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            eps=self.eps,
            rms=self.normalization == "RMSNorm",
            zero_centered_gamma=self.zero_centered_gamma,
        )
        out = super().forward(normed, is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        column = self.parallel_mode == "column" and comm.group_size(self.tp_group) > 1
        if self.return_layernorm_output_gathered and column and self.sequence_parallel:
            normed = comm.all_gather_first_dim(normed, self.tp_group)[0]
        return (*out, normed) if self.return_bias else (out, normed)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan | None = None
) -> torch.Tensor:
    """Multiply in the autocast dtype, or else in the dtype of the parameters."""
    dtype = compute_dtype(x, weight)
    return _Linear.apply(x, weight, bias, dtype, plan or Plan())  # type: ignore[no-any-return]


def compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype a layer computes in: autocast first, then the weight's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype


def mark_linear(weight: torch.Tensor, parallel_mode: str | None, tracker: str | None) -> None:
    """Mark a weight as a tensor-parallel slice.

    An expert layer passes no ``parallel_mode`` because its communication is the dispatcher's, yet
    its weight is a slice; only a weight drawn from the data-parallel stream is a true duplicate,
    and counting it on every rank would inflate the gradient norm.
    """
    if parallel_mode is None and tracker == DATA_PARALLEL_TRACKER:
        return
    mark_tensor_parallel(weight, 1 if parallel_mode == "row" else 0)


def mark_bias(bias: torch.Tensor, parallel_mode: str | None, sequence_parallel: bool) -> None:
    """Mark a bias: split with the outputs of a column layer, replicated in a row layer."""
    if parallel_mode == "row":
        bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    elif parallel_mode == "column":
        mark_tensor_parallel(bias, 0)


def refuse_userbuffers(options: dict[str, Any]) -> None:
    """Raise when an option asks for communication through userbuffers or symmetric memory."""
    asked = sorted(name for name, value in options.items() if value)
    known = {name for name in options if name.startswith("ub_") or name == "symmetric_ar_type"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"unexpected keyword arguments {unknown}")
    if asked:
        raise NotImplementedError(
            f"{', '.join(asked)}: userbuffers and symmetric-memory collectives need NVIDIA's "
            "Transformer Engine (switch --tp-comm-overlap and --symmetric-ar-type off, or run with "
            "MINDSPEED_TE=native)"
        )
