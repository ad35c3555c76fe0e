"""A part of a module's forward, by the module's own code: until it first calls one of its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Called(Exception):
    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        super().__init__()
        self.given = arguments, options


def arguments_of_first_call(
    part: torch.nn.Module, run: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run ``run`` until it calls ``part``, which does not run; returns what it would get.

    Hooks of ``part`` do not run either: they see the call that follows, and no other.
    """

    def stop(part: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        raise _Called(arguments, options)

    handle = part.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        run()
    except _Called as call:
        return call.given
    finally:
        handle.remove()
    raise RuntimeError(f"{type(part).__name__} was not called")
