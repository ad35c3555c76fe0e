"""Main weights and states of Megatron's optimizers, by the parameter they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.compare.megatron_fsdp import local


@dataclass(frozen=True)
class Owned:
    """What an optimizer holds of a parameter on this rank.

    Attributes:
        parameter: Of the model.
        start: First element of the parameter, flat.
        tensors: ``main_weight`` and states by name, each flat with the elements from ``start`` on.
    """

    parameter: torch.nn.Parameter
    start: int
    tensors: dict[str, torch.Tensor]


def owned(optimizer: Any) -> Iterator[Owned]:
    """What an optimizer, or the ones that it is a chain of, holds on this rank.

    States of other sizes (quantized, on the host in another form) are left out.
    """
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(one, "optimizer", None)
        if inner is None:
            continue
        index = getattr(one, "model_param_group_index_map", None)
        if index is not None:
            for parameter, (group, order) in index.items():
                main = inner.param_groups[group]["params"][order]
                start = one._get_model_param_range_map(parameter)["param"].start
                yield _owned(inner, parameter, main, start)
            continue
        pairs = [
            pair
            for models, mains in zip(
                getattr(one, "float16_groups", ()),
                getattr(one, "fp32_from_float16_groups", ()),
                strict=True,
            )
            for pair in zip(models, mains, strict=True)
        ]
        mains = {id(main) for _, main in pairs}
        rest = [p for group in inner.param_groups for p in group["params"] if id(p) not in mains]
        for parameter, main in (*pairs, *((p, p) for p in rest)):
            yield _owned(inner, parameter, main, 0)


def states(optimizer: Any, parameter: torch.nn.Parameter, start: int) -> Owned:
    """What an optimizer, or one of the chain that it is, holds of a DTensor that it optimizes.

    Args:
        optimizer: Of Megatron.
        parameter: Of the optimizer.
        start: First element of the parameter of the model, flat.
    """
    tensors = {"main_weight": local(parameter)}
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        for name, value in (one.optimizer.state.get(parameter) or {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                tensors[name] = local(value)
    return Owned(parameter, start, tensors)


def _owned(inner: Any, parameter: torch.nn.Parameter, main: torch.Tensor, start: int) -> Owned:
    tensors = {} if main is None else {"main_weight": main.detach().reshape(-1)}
    for name, value in (inner.state.get(main) or {}).items():
        if isinstance(value, torch.Tensor) and value.numel() == main.numel() and value.dim():
            tensors[name] = value.detach().reshape(-1)
    return Owned(parameter, start, tensors)


def learning_rate(optimizer: Any) -> float | None:
    """Learning rate of the first group of parameters; None without one on this rank."""
    groups = optimizer.param_groups
    return float(groups[0]["lr"]) if groups else None
