"""Is our kernel for NPU a true implementation of our operator, going by shapes and dtypes?

Under FakeTensorMode our operator answers with its own fake kernel, and our NPU kernel with the meta
kernels of the real torch_npu, after the dispatcher has held every call against torch_npu's schemas.
Both must give the same. No arithmetic, hence no emulation, takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map


def assert_contract(
    operator: Callable[..., Any],
    kernel: Callable[..., Any],
    arguments: Sequence[Any],
    on_host: Sequence[int] = (),
) -> None:
    """Compares ``operator(*arguments)`` with ``kernel(*arguments)`` on fake npu tensors.

    Args:
        operator: our op.
        kernel: our kernel for npu tensors: calls into torch_npu.
        arguments: for both; CPU tensors stand for npu tensors of the same strides and dtype.
        on_host: positions of arguments that stay on the host, with their values.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [
            value if position in on_host else tree_map(_on_npu, value)
            for position, value in enumerate(arguments)
        ]
        ours, theirs = operator(*given), kernel(*given)
    assert _described(theirs) == _described(ours), (_described(theirs), _described(ours))


def _on_npu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="npu")


def _described(result: Any) -> list[tuple[str, tuple[int, ...], str]]:
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [(str(t.dtype), tuple(t.shape), t.device.type) for t in tensors]
