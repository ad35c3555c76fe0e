"""``FusedAdam`` with the conventions Megatron's optimizers rely on.

* ``step`` is a number in the param group, not a tensor per parameter.
* The state of a parameter holds exactly ``exp_avg``, ``exp_avg_sq``, the other states of the update
  rule and, with ``master_weights``, ``master_param``; every key is written to checkpoints.
* ``get_unscaled_state`` / ``set_scaled_state`` read and write states as fp32 whatever they are
  stored in, so a checkpoint does not depend on the storage; ``load_state_dict`` keeps the storage
  dtypes that torch's own would turn into the parameter's.

All arithmetic is fp32 (or wider, for wider parameters) and belongs to the update rule
(:mod:`mindspeed.te.update_rules`). fp32 states are updated in place by one call per group; other
storages (:mod:`mindspeed.te.state_codec`) are decoded and encoded one parameter at a time. Which
rule and which storage: :mod:`mindspeed.te.optimizer_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mindspeed.te import optimizer_policy
from mindspeed.te.state_codec import Absent, Codec, Full, Remainder
from mindspeed.te.update_rules import StepOptions

MASTER = "master_param"


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW, or another update rule, one call per param group.

    A moment that the rule does not have is read as zeros: Megatron's checkpoints hold both.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
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
        self._rule = optimizer_policy.update_rule()
        dtypes = {
            **dict.fromkeys(self._rule.states, torch.float32),
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            MASTER: master_weight_dtype,
        }
        self._codecs: dict[str, Codec] = {
            name: optimizer_policy.state_codec(name, dtype)
            if name in (*self._rule.states, MASTER)
            else Absent()
            for name, dtype in dtypes.items()
        }
        self._remainder = Remainder()
        exact = master_weights and master_weight_dtype == torch.float32
        self.store_param_remainders = store_param_remainders and exact
        self.adam_w_mode, self.capturable = adam_w_mode, capturable
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._allocated: set[torch.Tensor] = set()
        self._in_place = all(type(self._codecs[name]) is Full for name in self._rule.states)
        defaults = {
            "lr": torch.tensor(lr, dtype=torch.float32) if capturable else lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

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

    def initialize_state(
        self, param: torch.Tensor, store_param_remainders: bool | None = None
    ) -> None:
        """Create the states of ``param``: those of the rule, master equal to the parameter."""
        for name in self._names(param):
            self.set_scaled_state(param, name, self._initial(param, name))

    def _initial(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        weight = param.detach().to(_wide(param.dtype))
        make = self._rule.states.get(state_name)
        return weight if make is None else make(weight)

    def _allocate(self, param: torch.Tensor, state_name: str) -> None:
        """Create the storage of one state."""
        self._allocated.add(param)
        codec = self._codec(param, state_name)
        self.state[param][state_name] = codec.allocate(param)
        scale = codec.allocate_scale(param)
        if scale is not None:
            self._scales.setdefault(param, {})[state_name] = scale

    def _adopt(self, param: torch.Tensor) -> None:
        """Make states that Megatron has created itself (moments in fp32) those of the rule."""
        states = self.state[param]
        if not states or param in self._allocated:
            return
        self._allocated.add(param)
        names = self._names(param)
        if set(states) == set(names) and all(type(self._codec(param, n)) is Full for n in names):
            return
        given = dict(states)
        states.clear()
        self.initialize_state(param)
        for name in given.keys() & set(names):
            self.set_scaled_state(param, name, given[name])

    def get_unscaled_state(
        self, param: torch.Tensor, state_name: str, skip_unscale: bool = False
    ) -> torch.Tensor:
        """Return a state in fp32: the state itself when it is stored so, else a decoded copy."""
        stored = self.state[param][state_name]
        if not isinstance(stored, torch.Tensor) or state_name not in self._codecs:
            return stored
        scale = self._scales.get(param, {}).get(state_name)
        return self._codec(param, state_name).decode(stored, scale, param)

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Store a state given in fp32 (or a remainder given in int16); ignore unknown names."""
        if state_name not in self._codecs:
            return
        if state_name not in self.state[param]:
            self._allocate(param, state_name)
        codec, stored = self._codec(param, state_name), self.state[param][state_name]
        if unscaled_state.dtype == torch.int16 and codec is not self._remainder:
            unscaled_state = self._remainder.decode(unscaled_state, None, param)
        scale = self._scales.get(param, {}).get(state_name)
        codec.encode(unscaled_state, stored, scale, param)

    def _codec(self, param: torch.Tensor, state_name: str) -> Codec:
        if state_name == MASTER and self._keeps_remainder(param):
            return self._remainder
        return self._codecs[state_name]

    def _keeps_remainder(self, param: torch.Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def _names(self, param: torch.Tensor) -> tuple[str, ...]:
        own_copy = self.master_weights and param.dtype in (torch.float16, torch.bfloat16)
        return tuple(name for name in self._codecs if name != MASTER or own_copy)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with every tensor in fp32."""
        for param in self.state:
            self._adopt(param)
        state = super().state_dict()
        for number, param in self._numbered(state["param_groups"]).items():
            if number in state["state"]:
                names = state["state"][number]
                state["state"][number] = {n: self.get_unscaled_state(param, n) for n in names}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and states; states are converted to their storage dtypes."""
        states = state_dict["state"]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for number, param in self._numbered(state_dict["param_groups"]).items():
            for name, value in (states.get(number) or {}).items():
                if isinstance(value, torch.Tensor):
                    wide = torch.promote_types(value.dtype, torch.float32)
                    dtype = torch.int16 if value.dtype == torch.int16 else wide
                    self.set_scaled_state(param, name, value.to(param.device, dtype))
            for name in set(self._names(param)) - set(self.state[param]) if states else ():
                self.set_scaled_state(param, name, self._initial(param, name))

    def _numbered(self, groups: list[dict[str, Any]]) -> dict[int, torch.Tensor]:
        numbers = [n for group in groups for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        return dict(zip(numbers, params, strict=True))

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None
    ) -> Any:
        """Update the parameters once.

        Args:
            closure: Recomputes and returns the loss.
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
        place = group["params"][0].device
        found_inf = None
        if self.capturable and grad_scaler is not None:
            found_inf = grad_scaler._check_inf_per_device(self)[place]
        self._count(group, found_inf, place)
        direct: dict[torch.dtype, list[tuple[torch.Tensor, ...]]] = {}
        for p in group["params"]:
            if not self.state[p]:
                self.initialize_state(p)
            self._adopt(p)
            grad = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
            if grad is None or p.numel() == 0:
                continue
            if grad.is_sparse:
                raise RuntimeError("FusedAdam: sparse gradients are not supported")
            tensors = (p.detach(), grad, *(self.state[p][name] for name in self._rule.states))
            if (
                self._in_place
                and MASTER not in self.state[p]
                and len({t.dtype for t in tensors}) == 1
            ):
                direct.setdefault(p.dtype, []).append(tensors)
            else:
                self._step_decoded(group, p, grad, grad_scaler, found_inf)
        for rows in direct.values():
            weights, grads, *states = (list(column) for column in zip(*rows, strict=True))
            by_name = dict(zip(self._rule.states, states, strict=True))
            self._update(group, weights, grads, by_name, grad_scaler, found_inf)

    def _count(
        self, group: dict[str, Any], found_inf: torch.Tensor | None, place: torch.device
    ) -> None:
        if not self.capturable:
            group["step"] = group.get("step", 0) + 1
            return
        step = group.get("step", torch.zeros(1, dtype=torch.int32, device=place))
        step = step if isinstance(step, torch.Tensor) else torch.tensor([step], device=place)
        group["step"] = step + (1 if found_inf is None else (found_inf == 0).to(step.dtype))

    def _step_decoded(
        self,
        group: dict[str, Any],
        p: torch.Tensor,
        grad: torch.Tensor,
        grad_scaler: Any,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Decode the states of one parameter, update, encode."""
        wide = _wide(p.dtype)
        names = [name for name in self.state[p] if name in self._codecs]
        decoded = {name: self.get_unscaled_state(p, name).to(wide) for name in names}
        weight = decoded[MASTER] if MASTER in decoded else p.detach().to(wide)
        states = {name: [decoded[name]] for name in self._rule.states}
        self._update(group, [weight], [grad.to(wide)], states, grad_scaler, found_inf)
        for name, value in decoded.items():
            if value is not self.state[p][name]:
                self.set_scaled_state(p, name, value)
        if weight is not p and not self._keeps_remainder(p):
            p.detach().copy_(weight)

    def _update(
        self,
        group: dict[str, Any],
        weights: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: dict[str, list[torch.Tensor]],
        grad_scaler: Any,
        found_inf: torch.Tensor | None,
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic for parameters of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)
