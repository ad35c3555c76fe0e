"""Defect: printed models and process groups are wrong, or end in an error.

Where: ``__repr__`` (in 0.17 ``extra_repr``) of ``ColumnParallelLinear`` and
``RowParallelLinear`` in ``megatron.core.tensor_parallel.layers`` compares the bias with ``True``
(Megatron-LM PR 4330); that of ``ProcessGroupCollection`` in
``megatron.core.process_groups_config`` takes every field for one group, and that of hierarchical
context parallelism is a list (PR 3753).
Symptom: a printed model says ``bias=False`` for every layer; ``'list' object has no attribute
'size'`` in a log message.
Fix: the bias is looked at, and lists show the size of each group.
Versions: layers <0.18, groups >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from mindspeed.adaptor.patch import repair

_LAYERS = ("ColumnParallelLinear", "RowParallelLinear")


def with_its_bias(original: Callable[[Any], str]) -> Callable[[Any], str]:
    """Wrap ``__repr__`` or ``extra_repr`` of a linear layer."""

    def described(self: Any) -> str:
        return original(self).replace("bias=False", f"bias={self.bias is not None}")

    return described


def with_every_size(original: Callable[[Any], str]) -> Callable[[Any], str]:
    """Replace ``ProcessGroupCollection.__repr__``."""

    def __repr__(self: Any) -> str:
        named = {f.name: vars(self)[f.name] for f in fields(self) if f.name in vars(self)}
        sizes = (f"{name}({_size(group)})" for name, group in named.items())
        return f"ProcessGroupCollection({', '.join(sizes) or 'empty'})"

    return __repr__


def _size(group: Any) -> Any:
    if isinstance(group, list):
        return [_size(one) for one in group]
    return None if group is None else group.size()


PATCHES = (
    *(
        repair(
            f"megatron.core.tensor_parallel.layers:{name}.{method}",
            with_its_bias,
            "printed layers show their bias",
            expects="(self)",
            versions=versions,
        )
        for method, versions in (("__repr__", "<0.17"), ("extra_repr", ">=0.17,<0.18"))
        for name in _LAYERS
    ),
    repair(
        "megatron.core.process_groups_config:ProcessGroupCollection.__repr__",
        with_every_size,
        "collections with lists of groups can be printed",
        expects="(self)",
        versions=">=0.16",
    ),
)
