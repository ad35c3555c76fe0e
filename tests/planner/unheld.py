"""Collectives of real ranks whose libraries hold no tensor that a step made.

A thread of gloo holds the tensors of a collective until some time after its ``wait``, so a storage
that the program has dropped may live on, and the peak of a step would depend on timing. Here the
library gets what the program does not hold: copies of inputs, and tensors that share the memory of
outputs without owning it. The program's own references alone decide what lives, as on FakeTensors.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Unheld(TorchDispatchMode):
    """Enter it before the counter, which then sees the program's tensors.

    Results are those of the program's tensors: a tensor of the library in a result is replaced by
    the one that it stands for.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "c10d":
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        originals: dict[int, torch.Tensor] = {}
        sends = func._schema.name.endswith("::send")

        def handed(tensor: torch.Tensor, copied: bool) -> torch.Tensor:
            with no_dispatch():
                other = tensor.clone() if copied else shared(tensor)
            originals[id(other)] = tensor
            return other

        changed = {
            name: tree_map_only(
                torch.Tensor, lambda x, copied=sends or "input" in name: handed(x, copied), value
            )
            for name, value in given.items()
        }
        result = func(**changed)
        return tree_map_only(torch.Tensor, lambda x: originals.get(id(x), x), result)


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory, shape and strides, whose storage does not own the memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(buffer, dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
