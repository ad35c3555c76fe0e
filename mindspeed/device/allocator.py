"""Expandable segments of a device's caching allocator.

torch and torch_npu read an environment variable when the device is first used; later a call changes
the setting for segments to come.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from mindspeed.device.torch_versions import allocator_variables
from mindspeed.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed.device.accelerator import Accelerator

_OPTION = "expandable_segments"


def problem(device: Accelerator) -> str | None:
    """Why expandable segments cannot be switched on; None if they can."""
    given = _given(device)
    if len(given) > 1:
        return f"{' and '.join(given)} are both set: unset one"
    for name, text in given.items():
        options = _options(text)
        if options.get(_OPTION, "True").lower() == "false":
            return f"{name}={text} switches {_OPTION} off: unset it"
        for other in device.excluded_by_expandable_segments:
            if other in options:
                return f"{name}={text}: {other} cannot be combined with {_OPTION}: unset it"
    if device.module.is_initialized() and device.allocator_setter() is None:
        return (
            f"the {device.name} is in use, and its allocator cannot be changed any more: set "
            f"{allocator_variables(device.name)[0]}={_OPTION}:True in the environment"
        )
    return None


def use_expandable_segments(device: Accelerator) -> Callable[[], None]:
    """Let segments grow from now on; returns a function that restores the setting.

    Raises:
        ConfigError: :func:`problem` has an answer.
    """
    if found := problem(device):
        raise ConfigError(found)
    ((name, before),) = (_given(device) or {allocator_variables(device.name)[0]: ""}).items()
    options = _options(before)

    def apply(text: str, expandable: bool) -> None:
        if text:
            os.environ[name] = text
        else:
            os.environ.pop(name, None)
        if device.module.is_initialized() and (setter := device.allocator_setter()) is not None:
            setter(_text({**options, _OPTION: str(expandable)}))

    apply(_text({**options, _OPTION: "True"}), True)
    return lambda: apply(before, _OPTION in options)


def _given(device: Accelerator) -> dict[str, str]:
    names = allocator_variables(device.name)
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _options(text: str) -> dict[str, str]:
    parts = (part.partition(":") for part in text.split(",") if part)
    return {name.strip(): value.strip() for name, _, value in parts}


def _text(options: dict[str, str]) -> str:
    return ",".join(f"{name}:{value}" for name, value in options.items())
