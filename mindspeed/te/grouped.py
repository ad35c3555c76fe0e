"""``GroupedLinear``: one linear layer per local expert over tokens sorted by expert.

Input ``[t, in]`` with ``m_splits[i]`` consecutive rows for expert i; output ``[t, out]``. The
weights are separate parameters ``weight0 .. weight{n-1}`` (and ``bias0 ..``), the names Megatron's
checkpoints use. An expert without tokens costs nothing and gets a zero gradient. Saved for
backward: the input and the weights; nothing is copied or padded. Where weight gradients are
delayed, they ask for the input, not backward: rows that are dispatched again may come that late.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed.spmd import Arguments, Communication, Product, typed
from mindspeed.te import device_groups, fp8
from mindspeed.te.base import GetTracker, Init, TransformerEngineBaseModule
from mindspeed.te.device_groups import DeviceSizes, Splits
from mindspeed.te.linear import refuse_userbuffers
from mindspeed.te.linear_function import compute_dtype
from mindspeed.te.parameter_marks import mark_bias, mark_linear
from mindspeed.te.quantization import Cast, Casts, check_multiples
from mindspeed.te.quantized_weight import dense
from mindspeed.te.weight_gradient import (
    DelayedWgrad,
    Hidden,
    WgradOptions,
    add_delayed,
    add_expert_gradients,
    added_to_main_grad,
)
from mindspeed.tensor_parallel import regions

if TYPE_CHECKING:
    from mindspeed.memory.saved import Held


def _experts(given: Arguments) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of each expert of a call of the function below."""
    hidden, count = given["hidden"], given["count"]
    parameters = (*(hidden.weights if hidden else ()), *given["parameters"])
    return list(zip_longest(parameters[:count], parameters[count:]))


def _held(x: Tensor) -> Held:
    from mindspeed.memory.saved import Held  # with the adaptor no algorithm is imported

    return Held(x)


@typed(Product(lambda given: Communication(), experts=_experts))
class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        splits: Splits,
        dtype: torch.dtype,
        wgrad: WgradOptions,
        casts: tuple[Casts, ...],
        count: int,
        hidden: Hidden | None,
        unread: bool,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.store = None
        if hidden is not None:
            ctx.store, parameters = hidden.store, (*hidden.weights, *parameters)
        weights, biases = parameters[:count], parameters[count:]
        ctx.splits, ctx.dtype, ctx.wgrad, ctx.count = splits, dtype, wgrad, count
        ctx.casts = casts
        ctx.x_dtype = x.dtype
        x = x.to(dtype)
        keep = any(w.requires_grad for w in weights)
        # Saved-tensor hooks hand back tensors without the attributes of the parameters.
        ctx.parameters = parameters
        late = keep and not casts and wgrad.delayed is not None and wgrad.anchor is None
        ctx.late = _held(x) if late else None
        ctx.save_for_backward(x if keep and not late else None, *parameters)
        if unread:
            return x.new_zeros(()).expand(len(x), weights[0].shape[0]).data
        cast = [dense(w, dtype) for w in weights]
        if casts:
            for one, rows, weight in zip(casts, x.split(splits), weights, strict=True):
                check_multiples(one.multiples, input=rows, weight=weight)
                one.input.observe(rows)
                one.weight.observe(weight)
            x = _each([one.input for one in casts], x.split(splits), 1)
            cast = _weights(casts, weights, 1)
        out = device_groups.matmul(x, cast, splits, True).to(dtype)
        for bias, rows in zip(biases, out.split(splits) if biases else (), strict=True):
            rows.add_(bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad = grads[0].contiguous()
        x, parameters = ctx.saved_tensors[0], ctx.parameters
        weights, biases = parameters[: ctx.count], parameters[ctx.count :]
        dgrad = None
        for one, rows in zip(ctx.casts, grad.split(ctx.splits) if ctx.casts else (), strict=True):
            one.grad.observe(rows)
        if ctx.needs_input_grad[0]:
            cast, left = [dense(w, ctx.dtype) for w in weights], grad
            if ctx.casts:
                left = _each([one.grad for one in ctx.casts], grad.split(ctx.splits), 1)
                cast = _weights(ctx.casts, weights, 0)
            dgrad = device_groups.matmul(left, cast, ctx.splits, False).to(ctx.x_dtype)
        wgrads = _weight_gradients(ctx, weights, *_wgrad_operands(ctx, x, grad))
        bgrads = []
        for bias, rows in zip(biases, grad.split(ctx.splits) if biases else (), strict=True):
            bgrads.append(rows.sum(0).to(bias.dtype) if bias.requires_grad else None)
        for one in ctx.casts:
            one.finish()
        return dgrad, None, None, None, None, None, None, None, *wgrads, *bgrads


def _each(casts: Sequence[Cast], parts: Sequence[Tensor], summed: int) -> Tensor:
    """Quantise each group of tokens by itself, and concatenate."""
    return torch.cat([cast(rows, summed) for cast, rows in zip(casts, parts, strict=True)])


def _weights(casts: Sequence[Casts], weights: Sequence[Tensor], summed: int) -> list[Tensor]:
    return [one.weight(weight, summed) for one, weight in zip(casts, weights, strict=True)]


def _wgrad_operands(ctx: Any, x: Tensor | None, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    if x is None or not ctx.casts or not ctx.casts[0].wgrad:
        return x, grad
    return (
        _each([one.input for one in ctx.casts], x.split(ctx.splits), 0),
        _each([one.grad for one in ctx.casts], grad.split(ctx.splits), 0),
    )


def _weight_gradients(
    ctx: Any, weights: Sequence[Tensor], x: Tensor | None, grad: Tensor
) -> Sequence[Tensor | None]:
    splits, late = ctx.splits, ctx.late
    if x is None and late is None:
        return [None] * len(weights)

    def rows() -> Tensor:
        return late.get()[0] if x is None else x

    if ctx.store is not None:
        run = partial(add_expert_gradients, weights, splits, ctx.wgrad.fuse)
        if late is not None and not ctx.store.deferring:
            ctx.wgrad.delay_hidden(lambda: run(rows(), grad))
        else:
            ctx.store.put(run, rows(), grad, delay=ctx.wgrad.delay_hidden)
        return []
    # All or none: a frozen expert among others has no buffer.
    fuse = ctx.wgrad.fuse and all(getattr(w, "main_grad", None) is not None for w in weights)

    def compute() -> Sequence[Tensor | None]:
        if fuse:
            main_grads = [w.main_grad for w in weights]  # type: ignore[attr-defined]
            device_groups.accumulate_wgrad(grad, rows(), splits, main_grads)
            return [added_to_main_grad(w) for w in weights]
        wgrads = device_groups.wgrad(grad, rows(), splits).unbind(0)
        parts = zip(weights, wgrads, strict=True)
        return [g.to(w.dtype) if w.requires_grad else None for w, g in parts]

    if ctx.wgrad.anchor is not None:
        ctx.wgrad.anchor.put(weights, compute)
        return [None] * len(weights)
    if ctx.wgrad.delayed is None:
        return compute()

    def later() -> None:
        for weight, wgrad in zip(weights, compute(), strict=True):
            add_delayed(weight, wgrad, fuse)

    ctx.wgrad.delayed.append(later)
    return [None] * len(weights)


def store_adjacent(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Move parameters of one shape into one buffer, where one kernel reads them as one tensor.

    Megatron's distributed optimizer moves them again, into its own buffer.
    """
    for parameter, place in zip(parameters, torch.stack(list(parameters)).detach(), strict=True):
        parameter.data = place


class GroupedLinear(DelayedWgrad, TransformerEngineBaseModule):
    """Several linear layers of one shape, applied to consecutive groups of rows.

    Args:
        sequence_parallel: Only recorded; the token dispatcher communicates.
        fuse_wgrad_accumulation: Add weight gradients into ``main_grad``.
        return_bias: Return ``(output, biases)`` without adding them.
        parallel_mode: ``"column"``, ``"row"`` or None.
        delay_wgrad_compute: Compute weight gradients only in ``backward_dw``.
        ub_name: Kept, not used.
        **userbuffers: ``ub_*``: only false values are possible.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: GetTracker | None = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
        *,
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
        self.num_gemms, self.ub_name = num_gemms, ub_name
        self._init_delayed(delay_wgrad_compute)
        for i in range(num_gemms):
            weight = self.new_weight(
                (self.out_features, self.in_features),
                init_method,
                dtype=params_dtype,
                device=device,
                get_rng_state_tracker=get_rng_state_tracker,
                rng_tracker_name=rng_tracker_name,
            )
            mark_linear(weight, parallel_mode, rng_tracker_name)
            self._mark_delayed(weight)
            self.register_parameter(f"weight{i}", weight)
        store_adjacent([getattr(self, f"weight{i}") for i in range(num_gemms)])
        for i in range(num_gemms if bias else 0):
            vector = self.new_vector(self.out_features, 0.0, dtype=params_dtype, device=device)
            mark_bias(vector, parallel_mode, self.sequence_parallel)
            self.register_parameter(f"bias{i}", vector)

    def forward(
        self,
        inp: Tensor,
        m_splits: Splits | Tensor,
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """Return ``[t, out]`` for ``inp [t, in]``; with ``return_bias`` a pair with the biases.

        The dtype is that of the weights, or of autocast.
        """
        rows = inp.reshape(-1, inp.shape[-1])
        if isinstance(m_splits, DeviceSizes):
            return self._forward(rows, inp, m_splits, is_first_microbatch)
        splits = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        if len(splits) != self.num_gemms or sum(splits) != rows.shape[0]:
            raise ValueError(
                f"m_splits {splits} must have {self.num_gemms} entries that sum to the "
                f"{rows.shape[0]} rows of the input"
            )
        return self._forward(rows, inp, splits, is_first_microbatch)

    def _forward(
        self,
        rows: Tensor,
        inp: Tensor,
        splits: Splits,
        is_first_microbatch: bool | None,
    ) -> Any:
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms if self.use_bias else 0)]
        options = self._wgrad_options
        hidden = options.hide(rows, *weights)
        out = _GroupedLinear.apply(
            rows,
            splits,
            compute_dtype(inp, weights[0]),
            options,
            fp8.casts_of(self, self.num_gemms, is_first_microbatch=is_first_microbatch),
            self.num_gemms,
            hidden,
            regions.output_unread(self),
            *(weights if hidden is None else ()),
            *(biases if self.apply_bias else ()),
        )
        out = out.view(*inp.shape[:-1], self.out_features)
        return (out, biases) if self.return_bias else out

    def get_extra_state(self) -> Tensor:
        """Return no bytes, uint8 ``[0]``: Megatron would unpickle them to split them by expert."""
        return torch.empty(0, dtype=torch.uint8)

    def extra_repr(self) -> str:
        """Return the shapes of this rank's weights."""
        return f"{self.num_gemms} x ({self.in_features}, {self.out_features}), bias={self.use_bias}"
