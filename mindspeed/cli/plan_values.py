"""Values of layouts on the command line: ``--fix tp=8,recompute=full``, ``--search tp,pp``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from mindspeed.planner.layout import (
    CP_ALGORITHMS,
    EXPERT_PROGRAMS,
    MEMORY,
    OPTIMIZERS,
    Recompute,
)
from mindspeed.planner.search.space import Space

DIMENSIONS = tuple(item.name for item in fields(Space))
_NUMBERS = ("tp", "cp", "ep", "etp", "pp", "mbs", "vpp")


def fixed(text: str) -> dict[str, Any]:
    """``tp=8,recompute=full:4`` as values by dimension."""
    found = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=VALUE, such as tp=8")
        found[_known(name)] = _value(name, value)
    return found


def dimensions(text: str) -> tuple[str, ...]:
    """``tp,pp`` as names."""
    return tuple(_known(name.strip()) for name in text.split(","))


def _known(name: str) -> str:
    if name in DIMENSIONS:
        return name
    near = get_close_matches(name, DIMENSIONS, n=1, cutoff=0.4)
    hint = f"; closest: {near[0]}" if near else ""
    raise argparse.ArgumentTypeError(
        f"{name!r} is no dimension of the search{hint} (there are {', '.join(DIMENSIONS)})"
    )


def _value(name: str, text: str) -> Any:
    if name in _NUMBERS:
        if not text.isdigit() or not 0 < int(text) <= 1 << 20:
            raise argparse.ArgumentTypeError(f"{name}={text}: give a number of at least 1")
        return int(text)
    if text in ("none", "") and name not in ("recompute", "memory"):
        return None
    return _TEXTS.get(name, str)(text)


def _recompute(text: str) -> Recompute:
    """``none``, ``full``, ``full:4`` or modules such as ``core_attn+mlp``."""
    if text == "none":
        return Recompute()
    kind, _, layers = text.partition(":")
    if kind != "full":
        return Recompute(modules=tuple(text.split("+")))
    if layers and not layers.isdigit():
        raise argparse.ArgumentTypeError(f"recompute={text}: give layers, as in full:4")
    return Recompute(layers=int(layers) if layers else -1)


def _memory(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    return tuple(sorted(_one_of("memory", MEMORY)(name) for name in text.split("+")))


def _one_of(name: str, table: Mapping[str, Any]) -> Callable[[str], str]:
    def find(text: str) -> str:
        if text.partition(":")[0] not in table:
            raise argparse.ArgumentTypeError(
                f"{name}={text}: there are {', '.join(sorted(table))}, and none"
            )
        return text

    return find


def _split(text: str) -> Any:
    if text in ("even", "ends"):
        return text
    try:
        return tuple(int(part) for part in text.split("+"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"split={text}: give even, ends, or the layers of stages as 9+10+10+9"
        ) from None


_TEXTS: dict[str, Callable[[str], Any]] = {
    "recompute": _recompute,
    "memory": _memory,
    "split": _split,
    "cp_algorithm": _one_of("cp_algorithm", CP_ALGORITHMS),
    "optimizer": _one_of("optimizer", OPTIMIZERS),
    "expert_program": _one_of("expert_program", EXPERT_PROGRAMS),
}
