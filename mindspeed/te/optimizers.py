"""``FusedAdam`` with the conventions Megatron's optimizers rely on.

``step`` is a number in the param group, not a tensor per parameter. States and checkpoints are
those of :mod:`mindspeed.te.stored_states`.

All arithmetic is fp32 (or wider, for wider parameters) and belongs to the update rule
(:mod:`mindspeed.optimizer.rules`). fp32 states are updated in place by one call per group and
dtype; other storages (:mod:`mindspeed.optimizer.codecs`) are decoded and encoded one parameter at a
time, or a part of it. Which rule and which storage: :mod:`mindspeed.te.optimizer_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.optimizer.codecs import Occasion
from mindspeed.optimizer.placement import Span
from mindspeed.optimizer.rules import StepOptions
from mindspeed.te import optimizer_policy
from mindspeed.te.stored_states import MASTER, StateSlice, StoredStates, wide_dtype


class FusedAdam(StoredStates):
    """Adam or AdamW, or another update rule, one call per param group.

    A moment that the rule does not have is read as zeros: Megatron's checkpoints hold both.

    Args:
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        amsgrad: Not available.
        bias_correction: Correct the moments for their start at zero.
        adam_w_mode: Decay the weights (AdamW) instead of adding to the gradient (L2).
        capturable: Keep ``step`` and ``lr`` as tensors.
        master_weights: Keep a more precise copy of 16-bit parameters.
        master_weight_dtype: fp32 or fp16.
        exp_avg_dtype: fp32, fp16, bf16, or ``torch.uint8`` for fp8.
        exp_avg_sq_dtype: Like ``exp_avg_dtype``.
        use_decoupled_grad: Read ``.decoupled_grad`` instead of ``.grad``.
        store_param_remainders: Keep only the 16 bits of a master weight that its bf16 parameter
            lacks.
        set_grad_none: Only accepted for compatibility.

    Attributes:
        grad_factors: multiplied into the gradients of the next steps one after the other, in fp32;
            the gradients themselves are not changed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam: amsgrad is not available")
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise RuntimeError(
                f"FusedAdam: master weights can be fp32 or fp16, not {master_weight_dtype}"
            )
        rule = optimizer_policy.update_rule()
        dtypes = {
            **dict.fromkeys(rule.states, torch.float32),
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            MASTER: master_weight_dtype,
        }
        self.adam_w_mode, self.capturable = adam_w_mode, capturable
        self.use_decoupled_grad = use_decoupled_grad
        self.grad_factors: tuple[float | Tensor, ...] = ()
        exact = master_weights and master_weight_dtype == torch.float32
        defaults = {
            "lr": torch.tensor(lr, dtype=torch.float32) if capturable else lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(
            params,
            defaults,
            rule,
            dtypes,
            master_weights=master_weights,
            store_param_remainders=store_param_remainders and exact,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients this optimizer reads."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                if set_to_none:
                    p.decoupled_grad = None
                elif getattr(p, "decoupled_grad", None) is not None:
                    p.decoupled_grad.zero_()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None
    ) -> Any:
        """Update the parameters once.

        Args:
            grad_scaler: A scaler whose scale is divided out (only with ``capturable``).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                self._step_group(group, grad_scaler)
        return loss

    def _step_group(self, group: dict[str, Any], grad_scaler: Any) -> None:
        device = group["params"][0].device
        found_inf = None
        if self.capturable and grad_scaler is not None:
            found_inf = grad_scaler._check_inf_per_device(self)[device]
        self._count(group, found_inf, device)
        direct: dict[torch.dtype, list[tuple[Tensor, ...]]] = {}
        swapped: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for p in group["params"]:
            if not self.state[p]:
                self.initialize_state(p)
            self._adopt(p)
            grad = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
            if grad is None or p.numel() == 0:
                continue
            if grad.is_sparse:
                raise RuntimeError("FusedAdam: sparse gradients are not supported")
            if self._swap is not None:
                swapped.setdefault(p.dtype, []).append((p, grad))
                continue
            tensors = (p.detach(), grad, *(self.state[p][name] for name in self._rule.states))
            if (
                self._in_place
                and MASTER not in self.state[p]
                and not self.grad_factors
                and len({t.dtype for t in tensors}) == 1
            ):
                direct.setdefault(p.dtype, []).append(tensors)
                continue
            for part in self._parts(p, grad):
                self._step_decoded(group, part, grad_scaler, found_inf)
        for rows in direct.values():
            weights, grads, *states = (list(column) for column in zip(*rows, strict=True))
            by_name = dict(zip(self._rule.states, states, strict=True))
            self._update(group, weights, grads, by_name, grad_scaler, found_inf)
        for pairs in swapped.values():
            self._step_swapped(group, pairs)

    def _step_swapped(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Update parameters of one dtype whose states are in host memory, window by window."""
        assert self._swap is not None
        place, wide = pairs[0][0].device, wide_dtype(pairs[0][0].dtype)

        def update(window: Sequence[Span], parts: Mapping[str, list[Tensor]]) -> None:
            cut = [slice(span.start, span.stop) for span in window]
            params = [
                pairs[s.index][0].detach().view(-1)[c] for s, c in zip(window, cut, strict=True)
            ]
            grads = [pairs[s.index][1].reshape(-1)[c] for s, c in zip(window, cut, strict=True)]
            weights = parts.get(MASTER) or [p.to(wide) for p in params]
            states = {name: parts[name] for name in self._rule.states}
            grads = [self._wide_grad(grad, wide) for grad in grads]
            self._update(group, weights, grads, states, None, None)
            for p, weight in zip(params, weights, strict=True):
                p.copy_(weight)

        total = sum(p.numel() for other in self.param_groups for p in other["params"])
        self._swap.stream([self.state[p] for p, _ in pairs], place, total, update)

    def _count(self, group: dict[str, Any], found_inf: Tensor | None, device: torch.device) -> None:
        if not self.capturable:
            group["step"] = group.get("step", 0) + 1
            return
        step = group.get("step", torch.zeros(1, dtype=torch.int32, device=device))
        step = step if isinstance(step, Tensor) else torch.tensor([step], device=device)
        group["step"] = step + (1 if found_inf is None else (found_inf == 0).to(step.dtype))

    def _step_decoded(
        self, group: dict[str, Any], part: StateSlice, grad_scaler: Any, found_inf: Tensor | None
    ) -> None:
        """Decode the states of a part of a parameter, update, encode."""
        param, wide = part.param, wide_dtype(part.param.dtype)
        codecs = {name: self._codec(part.whole, name) for name in part.stored}
        decoded = {
            name: codec.decode(part.stored[name], part.extra.get(name), param).to(wide)
            for name, codec in codecs.items()
        }
        weight = decoded[MASTER] if MASTER in decoded else param.to(wide)
        grads = [self._wide_grad(part.grad, wide)]
        states = {name: [decoded[name]] for name in self._rule.states}
        self._update(group, [weight], grads, states, grad_scaler, found_inf)
        step, start = int(group["step"]), getattr(part.whole, "parameter_start", 0) + part.start
        for name, value in decoded.items():
            if value is not part.stored[name]:
                codec = codecs[name].at(Occasion(step, name, start))
                codec.encode(value, part.stored[name], part.extra.get(name), param)
        if weight is not param and not self._keeps_remainder(param):
            param.copy_(weight)

    def _wide_grad(self, grad: Tensor, wide: torch.dtype) -> Tensor:
        """The gradient times ``grad_factors``, in the wide dtype."""
        grad = grad.to(wide, copy=bool(self.grad_factors))
        for factor in self.grad_factors:
            grad.mul_(factor)
        return grad

    def _update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        grads: list[Tensor],
        states: dict[str, list[Tensor]],
        grad_scaler: Any,
        found_inf: Tensor | None,
    ) -> None:
        """Apply the rule to lists of tensors of one dtype."""
        scale = None
        if self.capturable and grad_scaler is not None:
            scale = grad_scaler._get_scale_async()
        options = StepOptions(
            step=float(group["step"]),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            bias_correction=group["bias_correction"],
            decoupled_weight_decay=self.adam_w_mode,
            grad_scale=scale,
            found_inf=found_inf,
        )
        self._rule.update(weights, grads, states, options)


class FusedSGD(torch.optim.SGD):
    """SGD with momentum, on lists of tensors.

    Args:
        weight_decay: L2 penalty.
        wd_after_momentum: Only False is available.
        materialize_master_grads: Only accepted for compatibility.
        set_grad_none: Only accepted for compatibility.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise RuntimeError("FusedSGD: wd_after_momentum is not available")
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov=nesterov, foreach=True
        )


Lists = Sequence[Sequence[Tensor]]

CHUNK = 2048 * 32


def multi_tensor_applier(
    operation: Callable[..., Any], overflow: Tensor, lists: Lists, *arguments: Any
) -> Any:
    """Apply ``operation(chunk, overflow, lists, *arguments)`` to lists of tensors."""
    return operation(CHUNK, overflow, lists, *arguments)


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the L2 norm of all tensors together, and that of each with ``per_tensor``.

    Args:
        chunk: Not read.
        overflow: int32 ``[1]``; not set.
        lists: One list of n tensors.
        per_tensor: Return the norms of the tensors.

    Returns:
        fp32 ``[1]``, and fp32 ``[n]`` or None.
    """
    tensors = list(lists[0])
    if not tensors:
        nothing = torch.zeros(1, dtype=torch.float32, device=overflow.device)
        return nothing, nothing[:0] if per_tensor else None
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return torch.linalg.vector_norm(norms).unsqueeze(0), norms if per_tensor else None


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Lists, scale: Any) -> None:
    """Write ``source * scale`` into each destination.

    Args:
        chunk: Not read.
        overflow: int32 ``[1]``, set to 1 if a result is not finite.
        lists: Sources and destinations, pairwise of one shape; any floating dtypes.
    """
    pairs = [(a, b) for a, b in zip(lists[0], lists[1], strict=True) if b.numel()]
    sources, destinations = [a for a, _ in pairs], [b for _, b in pairs]
    if not sources:
        return
    factor = float(scale) if not isinstance(scale, Tensor) else scale
    if all(a is b for a, b in zip(sources, destinations, strict=True)):
        torch._foreach_mul_(destinations, factor)
    else:
        copied = isinstance(factor, float) and factor == 1.0  # no second copy for a cast
        scaled = sources if copied else torch._foreach_mul(sources, factor)
        torch._foreach_copy_(destinations, scaled)
    peaks = torch.stack(torch._foreach_norm(destinations, float("inf"), dtype=torch.float32))
    overflow.logical_or_(~torch.isfinite(peaks).all())
