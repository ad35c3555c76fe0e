"""``ascendspeed.data.data_handler``: ``GeneralInstructionHandler`` and the others by name."""

from typing import Any

from mindspeed.data.handlers import HANDLERS

__all__ = list(HANDLERS)


def __getattr__(name: str) -> Any:
    if name not in HANDLERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return HANDLERS[name]
