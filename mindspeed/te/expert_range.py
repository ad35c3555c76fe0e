"""Some of a rank's experts as a module of its own, which shares their parameters.

    some = expert_range(experts, first=2, count=1)
    out, _ = some(rows, tokens_per_expert, probs)      # tokens_per_expert [1]

A layer that computes its experts piece by piece, so that one piece hides the communication of
another, calls these. Gradients reach the parameters of the whole, and each parameter's hooks run
once in a backward, however many pieces there are: autograd sums first.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.te.device_groups import DeviceSizes
from mindspeed.te.grouped import GroupedLinear
from mindspeed.tensor_parallel.regions import WHOLE

_NUMBERED = re.compile(r"(weight|bias)(\d+)")


def expert_range(experts: Any, first: int, count: int) -> torch.nn.Module:
    """The local experts ``first`` to ``first + count - 1``.

    Cheap, so it is made for every call: attributes that others set on the modules (a store of
    weight gradients, hooks, adapters) are those of the moment.

    Args:
        experts: Megatron's ``TEGroupedMLP``, ``SequentialMLP`` or ``GroupedMLP``, also with
            adapters.

    Returns:
        A module that is called like the whole, with ``tokens_per_expert [count]``.

    Raises:
        ValueError: the range is empty or ends behind the last expert.
    """
    total = experts.num_local_experts
    if count < 1 or first < 0 or first + count > total:
        raise ValueError(f"experts {first} to {first + count - 1}: there are {total}")
    if count == total:
        return experts  # type: ignore[no-any-return]
    grouped = [name for name, x in experts.named_children() if isinstance(x, GroupedLinear)]
    replaced = any("forward" in vars(x) for x in (experts, *(experts._modules[n] for n in grouped)))
    one_by_one = isinstance(getattr(experts, "local_experts", None), torch.nn.ModuleList)
    if replaced or not (grouped or one_by_one):
        return _Padded(experts, first, count)
    part = _shallow(experts)
    part.num_local_experts = count
    for name in grouped:
        part._modules[name] = _some_weights(getattr(experts, name), first, count)
    if not grouped:
        part._modules["local_experts"] = experts.local_experts[first : first + count]
    return part


def expert_weights(linear: GroupedLinear) -> list[Tensor]:
    """The weights of a grouped layer, ``[out, in]`` each, for other uses than its own product.

    They are read by a call of the layer, so that its forward hooks run: distributed data
    parallelism waits in them for parameters that are still being gathered
    (``--overlap-param-gather``).
    """
    names = [f"weight{i}" for i in range(linear.num_gemms)]
    reader = _shallow(linear)
    reader.forward = lambda: [getattr(linear, name) for name in names]
    return reader()  # type: ignore[no-any-return]


def experts_with_weights(experts: Any, weights: Mapping[str, Sequence[Tensor]]) -> torch.nn.Module:
    """Experts that compute with other weights, whose gradients autograd returns at once.

    Args:
        experts: Megatron's ``TEGroupedMLP`` without adapters and biases.
        weights: By name of the linear layer a matrix ``[out, in]`` for each expert.

    Returns:
        A module that is called like ``experts``, with as many experts as there are matrices.
    """
    part = _shallow(experts)
    for name, matrices in weights.items():
        linear = part._modules[name] = _part(getattr(experts, name))
        linear.num_gemms = part.num_local_experts = len(matrices)
        linear._parameters = {f"weight{i}": matrix for i, matrix in enumerate(matrices)}
        linear.weight_gradients = linear._delayed = None
    return part  # type: ignore[no-any-return]


def _shallow(module: torch.nn.Module) -> Any:
    """A copy with the same parameters, buffers, children and hooks, but dictionaries of its own."""
    found = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        found.__dict__[name] = dict(module.__dict__[name])
    return found


def _part(linear: GroupedLinear) -> Any:
    """A copy that stands for the layer where recomputation asks who reads its output."""
    found = _shallow(linear)
    vars(found)[WHOLE] = linear
    return found


def _some_weights(linear: GroupedLinear, first: int, count: int) -> GroupedLinear:
    part: Any = _part(linear)
    part.num_gemms = count
    part._parameters = {}
    for name, parameter in linear._parameters.items():
        number = _NUMBERED.fullmatch(name)
        if number is None:
            part._parameters[name] = parameter
        elif first <= int(number[2]) < first + count:
            part._parameters[f"{number[1]}{int(number[2]) - first}"] = parameter
    for name, child in linear._modules.items():  # adapters: one for each expert
        if isinstance(child, torch.nn.ModuleList) and len(child) == linear.num_gemms:
            part._modules[name] = child[first : first + count]
    return part  # type: ignore[no-any-return]


class _Padded(torch.nn.Module):
    """All experts, of which those outside the range get no rows.

    For one stacked weight (``GroupedMLP``), and where a module's ``forward`` was replaced: that
    one would compute with the whole module.
    """

    def __init__(self, experts: Any, first: int, count: int) -> None:
        super().__init__()
        self.experts = experts
        self._before, self._after = first, experts.num_local_experts - first - count

    def forward(self, rows: Tensor, sizes: Tensor | DeviceSizes, probs: Tensor) -> Any:
        """Compute ``rows [t, h]`` of ``sizes [count]`` rows for each expert, ``probs [t]``."""
        if isinstance(sizes, DeviceSizes):
            return self.experts(rows, sizes.among(self._before, self._after), probs)
        none = sizes.new_zeros(1)
        sizes = torch.cat([none.expand(self._before), sizes, none.expand(self._after)])
        return self.experts(rows, sizes, probs)
