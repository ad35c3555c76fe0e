"""Optimizer states in their storage, with the conventions of Megatron's checkpoints.

* The state of a parameter holds exactly ``exp_avg``, ``exp_avg_sq``, the other states of the update
  rule and, for 16-bit parameters with ``master_weights``, ``master_param``; every key is written to
  checkpoints.
* ``get_unscaled_state`` / ``set_scaled_state`` read and write states as fp32 whatever they are
  stored in, so a checkpoint does not depend on the storage; ``load_state_dict`` keeps the storage
  dtypes that torch's own would turn into the parameter's.
* The param groups of a state dict name the states of another rule than Adam, and a state dict
  without a state that this rule needs is refused: Megatron would read it as zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed.errors import CheckpointError
from mindspeed.optimizer.codecs import AbsentState, Full, StateCodec
from mindspeed.optimizer.placement import HostSwap
from mindspeed.optimizer.rules import ADAM, UpdateRule
from mindspeed.te import optimizer_policy

MASTER = "master_param"
MOMENTS = ("exp_avg", "exp_avg_sq")
RULE = "update_rule"  # in the param groups of a state dict
PART = 2**22
"""Elements that are decoded, updated and encoded at once: 16 MiB for each fp32 tensor of a part."""


@dataclass(frozen=True)
class StateSlice:
    """Views of a parameter, its gradient and its stored states: of all elements, or of some, flat.

    Attributes:
        start: position in it of the first element of this part.
        grad: shape of ``param``.
        stored: state -> stored tensor, of ``param``'s shape.
        extra: state -> what its codec keeps next to that, flat.
    """

    whole: Tensor
    start: int
    param: Tensor
    grad: Tensor
    stored: Mapping[str, Tensor]
    extra: Mapping[str, Tensor]


class StoredStates(torch.optim.Optimizer):
    """The states of an update rule, each stored by a codec.

    Args:
        rule: Names and initial values of the states.
        dtypes: State -> dtype that Megatron requires. A name that the rule does not have is read as
            zeros: Megatron's checkpoints hold both moments.
        master_weights: Keep a more precise copy of 16-bit parameters.
        store_param_remainders: Keep only the 16 bits of it that a bf16 parameter lacks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        rule: UpdateRule,
        dtypes: Mapping[str, torch.dtype],
        *,
        master_weights: bool,
        store_param_remainders: bool,
    ) -> None:
        self._rule = rule
        self._codecs: dict[str, StateCodec] = {
            name: optimizer_policy.state_codec(name, dtype)
            if name in (*rule.states, MASTER)
            else AbsentState()
            for name, dtype in dtypes.items()
        }
        self._placements = {
            name: optimizer_policy.state_placement(name) if type(codec) is Full else None
            for name, codec in self._codecs.items()
        }
        self._remainder = optimizer_policy.remainder_codec()
        self._full, self._keeps_fp32 = Full(), optimizer_policy.keeps_fp32
        self.master_weights = master_weights
        self.store_param_remainders = store_param_remainders
        self.extras: dict[Tensor, dict[str, Tensor]] = {}
        self._allocated: set[Tensor] = set()
        self._in_place = all(type(self._codecs[name]) is Full for name in rule.states)
        super().__init__(params, defaults)

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Create the states of ``param``: those of the rule, master equal to the parameter.

        Each has the shape of ``param`` in its storage dtype.
        """
        for name in self.names(param):
            self.set_scaled_state(param, name, self._initial(param, name))

    def _initial(self, param: Tensor, state_name: str) -> Tensor:
        weight = param.detach().to(wide_dtype(param.dtype))
        make = self._rule.states.get(state_name)
        return weight if make is None else make(weight)

    def _allocate(self, param: Tensor, state_name: str) -> None:
        """Create the storage of one state."""
        self._allocated.add(param)
        codec = self._codec(param, state_name)
        placement = self._placements[state_name]
        self.state[param][state_name] = (
            codec.allocate(param)
            if placement is None
            else placement.allocate(param.shape, wide_dtype(param.dtype), param.device)
        )
        extra = codec.allocate_extra(param)
        if extra is not None:
            self.extras.setdefault(param, {})[state_name] = extra

    def _adopt(self, param: Tensor) -> None:
        """Make states that Megatron has created itself (moments in fp32) those of the rule."""
        states = self.state[param]
        if not states or param in self._allocated:
            return
        self._allocated.add(param)
        names = self.names(param)
        if set(states) == set(names) and all(self._is_plain(param, name) for name in names):
            return
        given = dict(states)
        states.clear()
        self.initialize_state(param)
        for name in given.keys() & set(names):
            self.set_scaled_state(param, name, given[name])

    def get_unscaled_state(
        self, param: Tensor, state_name: str, skip_unscale: bool = False
    ) -> Tensor:
        """Return a state in fp32: the state itself when it is stored so, else a decoded copy.

        Args:
            state_name: For example ``exp_avg``.
            skip_unscale: Without effect.

        Returns:
            Shape of ``param``, fp32.
        """
        self._adopt(param)
        stored = self.state[param][state_name]
        if not isinstance(stored, Tensor) or state_name not in self._codecs:
            return stored
        placement = self._placements[state_name]
        if placement is not None:
            return placement.read(stored)
        extra = self.extras.get(param, {}).get(state_name)
        return self._codec(param, state_name).decode(stored, extra, param)

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store a state; ignore unknown names.

        Args:
            state_name: For example ``exp_avg``.
            unscaled_state: Shape of ``param``, fp32, or int16 for a remainder.
        """
        if state_name not in self._codecs:
            return
        if state_name not in self.state[param]:
            self._allocate(param, state_name)
        codec, stored = self._codec(param, state_name), self.state[param][state_name]
        if unscaled_state.dtype == torch.int16 and codec is not self._remainder:
            unscaled_state = self._remainder.decode(unscaled_state, None, param)
        placement = self._placements[state_name]
        if placement is not None:
            placement.write(stored, unscaled_state)
            return
        extra = self.extras.get(param, {}).get(state_name)
        codec.encode(unscaled_state, stored, extra, param)

    def state_bytes(self) -> int:
        """Bytes of all states as they are stored, scales and the like included."""
        kept = [*self.state.values(), *self.extras.values()]
        return sum(t.nbytes for state in kept for t in state.values())

    def _parts(self, param: Tensor, grad: Tensor) -> Iterator[StateSlice]:
        """Cut large parameters where rule and codecs allow it, to bound what is decoded at once."""
        stored = {name: t for name, t in self.state[param].items() if name in self._codecs}
        extra = self.extras.get(param, {})
        blocks = {name: self._codec(param, name).block for name in stored}
        tensors = (param, grad, *stored.values())
        if (
            param.numel() <= PART
            or not self._rule.elementwise
            or any(not block or PART % block for block in blocks.values())
            or not all(tensor.is_contiguous() for tensor in tensors)
        ):
            yield StateSlice(param, 0, param, grad, stored, extra)
            return
        for start in range(0, param.numel(), PART):
            some = slice(start, start + PART)
            yield StateSlice(
                param,
                start,
                param.view(-1)[some],
                grad.view(-1)[some],
                {name: tensor.view(-1)[some] for name, tensor in stored.items()},
                {
                    name: tensor[start // block : (start + PART) // block]
                    for name, tensor in extra.items()
                    if (block := blocks[name])
                },
            )

    @property
    def _swap(self) -> HostSwap | None:
        """The swap space of the states; all of them have the same."""
        spaces = (place for place in self._placements.values() if isinstance(place, HostSwap))
        return next(spaces, None)

    @property
    def additional_states(self) -> tuple[str, ...]:
        """States of the rule besides the two moments of Adam."""
        return tuple(name for name in self._rule.states if name not in MOMENTS)

    @property
    def holds_plain_moments(self) -> bool:
        """Whether ``state`` has Adam's two moments in fp32 on the device, and no other state."""
        codecs = {type(self._codecs[name]) for name in MOMENTS}
        return (
            codecs == {Full} and not self.additional_states and not any(self._placements.values())
        )

    def _is_plain(self, param: Tensor, state_name: str) -> bool:
        return type(self._codec(param, state_name)) is Full and not self._placements[state_name]

    def _codec(self, param: Tensor, state_name: str) -> StateCodec:
        if state_name == MASTER and self._keeps_remainder(param):
            return self._remainder
        codec = self._codecs[state_name]
        return self._full if codec.quantized and self._keeps_fp32(param) else codec

    def _keeps_remainder(self, param: Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def names(self, param: Tensor) -> tuple[str, ...]:
        """The states of ``param``, of its shape, with or before its first step."""
        own_copy = self.master_weights and param.dtype in (torch.float16, torch.bfloat16)
        return tuple(name for name in self._codecs if name != MASTER or own_copy)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with every tensor in fp32."""
        for param in self.state:
            self._adopt(param)
        state = super().state_dict()
        if set(self._rule.states) != set(MOMENTS):
            rule = {"flag": self._rule.flag, "states": list(self._rule.states)}
            for group in state["param_groups"]:
                group[RULE] = rule
        for number, param in self._numbered(state["param_groups"]).items():
            if number in state["state"]:
                names = state["state"][number]
                state["state"][number] = {n: self.get_unscaled_state(param, n) for n in names}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and states; states are converted to their storage dtypes.

        Raises:
            CheckpointError: it lacks a state of the rule.
        """
        states = state_dict["state"]
        check_rule(state_dict["param_groups"], self._rule)
        groups = [
            {name: value for name, value in group.items() if name != RULE}
            for group in state_dict["param_groups"]
        ]
        super().load_state_dict({"state": {}, "param_groups": groups})
        for number, param in self._numbered(state_dict["param_groups"]).items():
            for name, value in (states.get(number) or {}).items():
                if isinstance(value, Tensor):
                    wide = torch.promote_types(value.dtype, torch.float32)
                    dtype = torch.int16 if value.dtype == torch.int16 else wide
                    self.set_scaled_state(param, name, value.to(param.device, dtype))
            for name in set(self.names(param)) - set(self.state[param]) if states else ():
                self.set_scaled_state(param, name, self._initial(param, name))

    def _numbered(self, groups: list[dict[str, Any]]) -> dict[int, Tensor]:
        numbers = [n for group in groups for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        return dict(zip(numbers, params, strict=True))


def check_rule(groups: Iterable[Mapping[str, Any]], rule: UpdateRule) -> None:
    """See that the param groups of a state dict come from a rule with all states of ``rule``.

    Raises:
        CheckpointError: they do not.
    """
    for group in groups:
        saved = group.get(RULE) or {"flag": ADAM.flag, "states": MOMENTS}
        if lacking := [name for name in rule.states if name not in saved["states"]]:
            raise CheckpointError(
                f"its optimizer was trained with {saved['flag']} and has no {', '.join(lacking)}, "
                f"which {rule.flag} needs; continue with {saved['flag']}, or load without the "
                "states of the optimizer (--no-load-optim)"
            )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic for parameters of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)
