"""Host memory that kernels of the device use; copies may not touch it."""

import torch

swapped: dict[int, torch.Tensor] = {}
"""Address -> swapped memory, which is kept so that nothing else gets the address."""


def empty_with_swapped_memory(size, *, dtype=None, device=None):
    result = torch.empty(size, dtype=dtype, device=device or "npu")
    swapped[result.untyped_storage().data_ptr()] = result
    return result


REFERENCE = {"empty_with_swapped_memory": empty_with_swapped_memory}
FACTORIES = {"npu::empty_with_swapped_memory"}
"""Operators that have no tensor among their arguments, so no kernel for the key of one."""
