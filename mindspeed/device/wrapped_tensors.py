"""Tensors that hold others, as ``DTensor`` holds the shard of its rank.

They have the shape of the whole and no memory of their own. A dispatch mode that counts leaves
their operators to them, by ``return NotImplemented``, and then sees those on the tensors that they
hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)


@lru_cache(maxsize=1024)
def any_wraps(types: tuple[type, ...]) -> bool:
    """Whether an operator is one of tensors that hold others.

    Args:
        types: of its tensors, as a dispatch mode gets them.
    """
    return any(is_traceable_wrapper_subclass_type(kind) for kind in types)


def held(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory: those that ``tensor`` holds, or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):  # a DTensor names its mesh, too
            yield from held(inner)
