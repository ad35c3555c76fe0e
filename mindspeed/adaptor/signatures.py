"""Signatures as the contract of a patch: parameter names, in order.

``"(self, hidden_states, attention_mask, ...)"`` promises that the target takes at least these
parameters, first and in this order; without the final ``...`` it promises that there are no others.
Defaults and annotations are not compared: they change often and break nobody who binds by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from packaging.version import Version

from mindspeed.errors import PatchTargetChanged

_signatures: WeakKeyDictionary[Callable[..., Any], inspect.Signature] = WeakKeyDictionary()
"""Of what :func:`bind` has met: reading one takes five times as long as binding by it."""


def parse_signature(text: str) -> tuple[list[str], bool]:
    """``"(a, *b, ...)"`` -> (``["a", "*b"]``, True): the names and whether more are allowed."""
    names = [name.strip() for name in text.strip().removeprefix("(").removesuffix(")").split(",")]
    names = [name for name in names if name]
    open_ended = bool(names) and names[-1] == "..."
    return (names[:-1] if open_ended else names), open_ended


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """The parameter names of a callable, ``*args`` and ``**kwargs`` with their stars."""
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    parameters = inspect.signature(function).parameters.values()
    return [stars.get(parameter.kind, "") + parameter.name for parameter in parameters]


def fits(expected: str, actual: list[str]) -> bool:
    """Whether the parameter names ``actual`` keep the promise ``expected``."""
    names, open_ended = parse_signature(expected)
    return actual[: len(names)] == names and (open_ended or len(actual) == len(names))


def check_signature(
    owner: str,
    target: str,
    expected: str,
    original: Callable[..., Any],
    version: Version | None,
) -> None:
    """Raise :class:`PatchTargetChanged` unless ``original`` has the ``expected`` parameters."""
    actual = parameter_names(original)
    if not fits(expected, actual):
        raise PatchTargetChanged(
            f"feature '{owner}' was written for {target}{expected}, but megatron-core {version} "
            f"has {target}({', '.join(actual)})"
        )


def bind(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The call's arguments by parameter name, defaults included.

    Wrappers read arguments with this, never by position, and pass ``*args, **kwargs`` on unchanged.
    """
    signature = _signatures.get(original)
    if signature is None:
        signature = _signatures[original] = inspect.signature(original)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
