"""How a Python type is spelled on the command line.

    bool                 a switch with two spellings, --swiglu and --no-swiglu
    int, float, str      one word; 1e6 is a whole number too
    Literal, Enum        one word out of a list
    torch.dtype          fp32, bf16, fp16, fp8
    list, tuple          several words
    int or list of int   a layer pattern, 4 or ([1]*3+[0])*2

Any other type has no spelling: :func:`argparse_type` returns None.
"""

from __future__ import annotations

import argparse
import ast
import enum
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

import torch

from mindspeed.errors import ConfigError
from mindspeed.ranges import LAYERS, Number, Range, whole_number

# Megatron's optimizer calls fp8 states uint8, as NVIDIA's Transformer Engine does.
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}


class Switch(argparse.Action):
    """A flag without value that has a positive and a negative spelling."""

    def __init__(self, option_strings: Sequence[str], *, negative: Sequence[str], **kwargs: Any):
        self.negative = frozenset(negative)
        super().__init__([*option_strings, *negative], nargs=0, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        setattr(namespace, self.dest, option_string not in self.negative)


class Ignored(argparse.Action):
    """A flag of older scripts that has no effect."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        namespace.ignored_flags = [*getattr(namespace, "ignored_flags", []), option_string]


class AbsentFlag(argparse.Action):
    """A flag of a later Megatron, ``--x`` and ``--no-x``: refused, except where it is no change."""

    def __init__(self, *args: Any, needs: str, **kwargs: Any) -> None:
        self.needs = needs
        super().__init__(*args, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        wanted = option_string == self.option_strings[0]
        if wanted is not self.default:
            raise ConfigError(f"{option_string} {self.needs}")


def argparse_type(kind: Any) -> dict[str, Any] | None:
    """Keyword arguments of ``add_argument`` for a type, or None if it has no spelling."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        parts = tuple(part for part in parts if part is not type(None))
        return argparse_type(parts[0]) if len(parts) == 1 else _union_type(parts)
    if kind is bool:
        return {"action": Switch}
    if kind in (int, float, str):
        return {"type": {int: whole_number, float: float, str: str}[kind]}
    if kind is torch.dtype:
        return dtype_among(tuple(DTYPES))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        names = "{" + ",".join(member.name for member in kind) + "}"
        return {"type": lambda text: _member(kind, text), "metavar": names}
    if origin is Literal:
        return {"type": type(parts[0]), "choices": parts}
    if origin in (list, tuple) and parts and parts[0] in (int, float, str):
        if origin is tuple and parts == (int, int):
            return {"type": pair}
        return {"type": whole_number if parts[0] is int else parts[0], "nargs": "+"}
    return None


def in_range(how: dict[str, Any], range: Range | None) -> dict[str, Any]:
    """The same keyword arguments with the range of the number that they convert to."""
    convert = how.get("type")
    if range is None or convert in (None, str):
        return how
    names = {float: "a number", whole_number: "a whole number", pair: "a pair such as 128,0"}
    name = names.get(convert, "a number or a pattern such as ([1]*3+[0]*1)*2")
    return {**how, "type": Number(convert, range, name)}


def _union_type(parts: tuple[Any, ...]) -> dict[str, Any] | None:
    """A value or a list of values; a layer pattern for numbers."""
    if parts[0] is int:
        return {"type": layer_pattern}
    if (
        parts[0] in (float, str)
        and typing.get_origin(parts[1]) is list
        and typing.get_args(parts[1])
    ):
        return {"type": parts[0], "nargs": "+"}
    return {"type": str} if parts[0] is str else None


def layer_pattern(text: str) -> int | list[int]:
    """Parse ``4`` or a list of ones and zeros such as ``([1]*3+[0])*2``."""
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        message = f"{text!r} is neither a number nor a pattern such as ([1]*3+[0]*1)*2"
        raise argparse.ArgumentTypeError(message) from error


def _evaluate(node: ast.expr) -> Any:
    """The value of an expression made of integers, lists, ``+`` and ``*`` only."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        value = left + right if isinstance(node.op, ast.Add) else _product(left, right)
        if isinstance(value, list) and len(value) > LAYERS.high:
            raise ValueError("pattern too long")
        return value
    raise ValueError("only lists of numbers, + and *")


def _product(left: Any, right: Any) -> Any:
    """``left * right``, which is a list of a length that fits, or a number."""
    length = max((len(value) for value in (left, right) if isinstance(value, list)), default=1)
    times = max((value for value in (left, right) if isinstance(value, int)), default=1)
    if length * times > LAYERS.high:
        raise ValueError("pattern too long")
    return left * right


def pair(text: str) -> tuple[int, int]:
    left, right = text.strip("()").split(",")
    return int(left), int(right)


def dtype_among(names: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of ``add_argument`` for a data type out of a list of names."""

    def dtype(text: str) -> torch.dtype:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r}: choose one of {', '.join(names)}")
        return DTYPES[text]

    return {"type": dtype, "metavar": "{" + ",".join(names) + "}"}


def _member(kind: type[enum.Enum], text: str) -> enum.Enum:
    if text not in kind.__members__:
        raise argparse.ArgumentTypeError(f"{text!r}: choose one of {', '.join(kind.__members__)}")
    return kind[text]


def show(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    names = {dtype: name for name, dtype in DTYPES.items()}
    return names.get(value, str(value)) if isinstance(value, torch.dtype) else str(value)
