"""The two linear layers of each expert as calls that can be watched and replaced.

A module with ``linear_fc1`` and ``linear_fc2`` (grouped experts, or each of those that run one by
one) calls them; grouped experts of the local layer spec have two objects in their place
(:mod:`mindspeed.te.local_experts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mindspeed.te.local_experts import products_of

_ABSENT = object()


@dataclass(frozen=True)
class Call:
    """A method of an object, looked up on the object at each call."""

    owner: Any
    name: str = "forward"


def calls_of(experts: torch.nn.Module) -> list[tuple[Call, Call]]:
    """The first and the second layer of each expert, in the order of the forward.

    Raises:
        NotImplementedError: experts of another kind.
    """
    found = [
        (Call(module.linear_fc1), Call(module.linear_fc2))
        for module in experts.modules()
        if hasattr(module, "linear_fc1") and hasattr(module, "linear_fc2")
    ]
    if not found and hasattr(experts, "weight1") and hasattr(experts, "weight2"):
        first, second = products_of(experts)
        found = [(Call(first), Call(second))]
    if not found:
        raise NotImplementedError(f"{type(experts).__name__} has no linear_fc1 and linear_fc2")
    return found


Watch = Callable[..., Any]


@contextlib.contextmanager
def watched(calls: Sequence[tuple[Call, Call]], first: Watch, second: Watch) -> Iterator[None]:
    """Inside, ``first(number, method, *args)`` runs in place of each first layer, and so on.

    Args:
        calls: Of the experts.
        first: Gets the number of the call and the method in whose place it runs.
        second: Likewise.
    """
    before = []
    try:
        for number, pair in enumerate(calls):
            for call, watch in zip(pair, (first, second), strict=True):
                own = vars(call.owner).get(call.name, _ABSENT)
                method = getattr(call.owner, call.name, None)
                before.append((call, own))
                object.__setattr__(call.owner, call.name, partial(watch, number, method))
        yield
    finally:
        for call, own in reversed(before):
            if own is _ABSENT:
                object.__delattr__(call.owner, call.name)
            else:
                object.__setattr__(call.owner, call.name, own)
