"""With and without the repairs that a session installs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed import device
from mindspeed.adaptor import repairs


def configured(repair: Any, arguments: dict[str, Any], repaired: bool) -> None:
    """Switch the library on for these arguments, without one repair unless ``repaired``."""
    from mindspeed import session

    session.current().configure(arguments)
    if not repaired:
        session.current().engine.remove(repair.PATCHES[0].owner)


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
        *repairs.repairs_for_arguments(values, "substitute"),
    )
    (patch,) = (
        one
        for one in installed
        if one.owner == f"repair:{owner}" and one.target.rpartition(":")[2].endswith(name)
    )
    return patch.make(original)
