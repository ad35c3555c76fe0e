"""No-op layers, which balance the stages of a pipeline.

Megatron gives every stage the same number of layers. If the number of layers is not a multiple of
the stages, or if the embedding or the output layer makes a stage slow, some layers are declared
no-op: they are numbered like other layers and compute nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from mindspeed.errors import ConfigError

T = TypeVar("T")


def indices_of(value: Any) -> tuple[int, ...]:
    """``--noop-layers`` as a namespace has it (``["0,7"]``, ``(0, 7)``, None) as indices.

    Raises:
        ConfigError: one is no number from 0.
    """
    words = [value] if isinstance(value, str) else value or ()
    parts = [part.strip() for word in words for part in str(word).split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdecimal()]:
        raise ConfigError(f"--noop-layers takes numbers from 0, not {wrong[0]!r}")
    return tuple(map(int, parts))


def problem_of(noop_layers: Collection[int], num_layers: int) -> str:
    """The error message for invalid indices; empty if they are valid."""
    wrong = sorted(index for index in noop_layers if not 0 <= index < num_layers)
    if wrong:
        return f"names layer {wrong[0]}; the {num_layers} layers are 0 to {num_layers - 1}"
    twice = sorted({index for index in noop_layers if list(noop_layers).count(index) > 1})
    if twice:
        return f"names layer {twice[0]} twice"
    if len(noop_layers) == num_layers:
        return f"names all {num_layers} layers; at least one must compute"
    return ""


def without_noop(layers: Sequence[T], noop_layers: Collection[int]) -> list[T]:
    """The entries of a per-layer list that belong to computing layers."""
    return [layer for index, layer in enumerate(layers) if index not in noop_layers]


def with_noop(layers: Sequence[int], noop_layers: Collection[int]) -> list[int]:
    """The inverse of :func:`without_noop`, with 0 for no-op layers."""
    entries = iter(layers)
    indices = range(len(layers) + len(noop_layers))
    return [0 if index in noop_layers else next(entries) for index in indices]
