"""Main weights and states of Megatron's optimizers, by the parameter they belong to.

With Megatron-FSDP (ZeRO 2 and 3) a parameter's shard is a range of the flattened parameter, in the
buffers of weights and gradients and in the optimizer's tensors alike. Ranks that hold all weights
(ZeRO 2) tell their range of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.compare.digest import Elements
from mindspeed.compare.megatron_places import place_of_pieces


@dataclass(frozen=True)
class Shard:
    """A rank's range of a parameter.

    Attributes:
        path: Of the parameter in its chunk.
        start: First element of the flattened parameter.
        weights: The elements from there on ``[n]``, in the dtype of the model.
        main: The same for the optimizer, a DTensor.
    """

    path: str
    start: int
    weights: torch.Tensor
    main: torch.nn.Parameter

    @property
    def gradient(self) -> torch.Tensor | None:
        """The reduced gradient ``[n]``, once the schedule has ended."""
        found = getattr(self.main, "decoupled_grad", None)
        found = self.main.grad if found is None else found
        return None if found is None else local(found)


def local(x: torch.Tensor) -> torch.Tensor:
    """The elements of a DTensor on this rank, flat ``[n]``."""
    return x.detach().to_local().view(-1)  # type: ignore[attr-defined, no-any-return]


def fsdp_shards(wrapped: Any, module: Any) -> Iterator[Shard]:
    """This rank's shards of a chunk's parameters.

    Args:
        wrapped: The chunk as the schedule gets it.
        module: Without wrappers.
    """
    buffer, prefix = wrapped.param_and_grad_buffer, _prefix(wrapped, module)
    for name, main in buffer.optimizer_named_parameters:
        group = buffer.parameter_groups[buffer.param_to_param_group[main.orig_param]]
        weights = group.model_weight_buffer
        if weights is None:
            continue
        own = weights.get_item(weights.param_idx[main.orig_param], only_shard=True)
        if own.numel():
            path = name.removeprefix(prefix)
            yield Shard(path, main.megatron_fsdp_slice.start, own, main)


def fsdp_places(wrapped: Any, module: Any) -> dict[str, Elements]:
    """Place of each whole parameter of a chunk: its rows are parts of a checkpoint's tensors.

    None are known of a chunk that our trainer has not wrapped.

    Args:
        wrapped: The chunk as the schedule gets it.
        module: Without wrappers.
    """
    parts: defaultdict[str, list[Any]] = defaultdict(list)
    for part in getattr(getattr(wrapped, "contents", None), "parts", ()):
        parts[part.parameter].append(part)
    found = {}
    for name, own in parts.items():
        count = sum(math.prod(part.tensor.local_shape) for part in own)
        numbers = torch.arange(count)
        pieces = [
            (numbers[part.start :][: math.prod(shape)].view(shape), part.tensor)
            for part in own
            for shape in [part.tensor.local_shape]
        ]
        place = place_of_pieces(pieces, count // math.prod(own[0].tensor.local_shape[1:]))
        if place is not None:
            found[name.removeprefix(_prefix(wrapped, module))] = place
    return found


def _prefix(wrapped: Any, module: Any) -> str:
    """What the names of parameters begin with that Megatron-FSDP gives."""
    outer, prefix = wrapped.module.module, ""
    while outer is not module:
        outer, prefix = outer.module, f"{prefix}module."
    return prefix


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
