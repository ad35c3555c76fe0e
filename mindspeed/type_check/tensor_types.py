"""Types of tensors, as the checker of ``spmd_types`` keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import spmd_types
import torch
from spmd_types import MeshAxis, SpmdTypeError
from spmd_types._type_attr import get_local_type
from spmd_types.runtime import _set_local_type

from mindspeed.spmd import I, P, R, Type, V

OWNER = "type-check"
TO_CHECKER = {R: spmd_types.R, I: spmd_types.I, V: spmd_types.V, P: spmd_types.P}
FROM_CHECKER = {one: own for own, one in TO_CHECKER.items()}


class WrongType(SpmdTypeError):
    """A tensor is used where its type does not fit.

    Args:
        what: the function, and what it was given.
        axis: on which ranks.
        found: the type of the tensor.
        needed: the types that fit.
    """

    def __init__(self, what: str, axis: MeshAxis, found: Type, needed: tuple[Type, ...]) -> None:
        super().__init__(f"{what} is {found.name} on {axis}, not {needed[0].name}")
        self.what, self.axis, self.found, self.needed = what, axis, found, needed


def types_of(tensor: Any) -> dict[MeshAxis, Type]:
    """The types of a tensor by axis; empty for what has none."""
    if not isinstance(tensor, torch.Tensor):
        return {}
    found: Any = get_local_type(tensor)
    return {axis: FROM_CHECKER[one] for axis, one in found.items()}


def give(tensor: torch.Tensor, types: Mapping[MeshAxis, Type]) -> torch.Tensor:
    """Give a tensor its types; returns it."""
    _set_local_type(tensor, {axis: TO_CHECKER[one] for axis, one in types.items()})
    return tensor
