"""A function with the repair that a session installs for it; without the patch there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed import device
from mindspeed.adaptor import repairs


def with_repair(owner: str, original: Callable[..., Any] | None, name: str, **values: Any) -> Any:
    """Wrap or replace ``original`` as Megatron's function of a name is.

    Args:
        owner: of the patch, without ``repair:``.
        original: stands for Megatron's.
        name: of Megatron's function.
        **values: Megatron's arguments, where only some need the repair.
    """
    installed = (
        *repairs.repairs_for(device.current(), "substitute"),
        *repairs.repairs_for_arguments(values),
    )
    (patch,) = (
        one
        for one in installed
        if one.owner == f"repair:{owner}" and one.target.rpartition(":")[2].endswith(name)
    )
    return patch.make(original)
