"""What a rank holds of the parameters that Megatron-FSDP shares in flat buffers (ZeRO 2 and 3).

A parameter's shard is a range of the flattened parameter, in the buffers of weights and gradients
and in the optimizer's tensors alike. Ranks that hold all weights (ZeRO 2) tell their range of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.compare.digest import Place
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


def shards_of(wrapped: Any, module: Any) -> Iterator[Shard]:
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


def places_of(wrapped: Any, module: Any) -> dict[str, Place]:
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
