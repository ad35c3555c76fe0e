"""Collectives on tensors with known values, where every rank of the group holds the same ones.

===============  =====================================================
operation        what this rank has then
===============  =====================================================
all-gather       its own values, once for each rank
all-to-all       its own part for itself, once from each rank
broadcast        its values
others           nothing that is known (sums do not show which reduction they are)
===============  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from mindspeed.planner.known_values import KnownValues


def run(known: KnownValues, func: Any, args: Any, kwargs: Any) -> Any:
    """Execute a ``c10d`` operator; what it writes has values if what it reads has."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rule = _RULES.get(func._schema.name.partition("::")[2])
    found: list[torch.Tensor] | None = None
    if rule is None:  # the schemas do not say what is written
        known.lose([args, kwargs])
        return func(*args, **kwargs)
    output, source, compute = rule
    values = [known.of(x) for x in tree_leaves(given[source]) if isinstance(x, torch.Tensor)]
    outputs = [x for x in tree_leaves(given[output]) if isinstance(x, torch.Tensor)]
    if values and all(value is not None for value in values):
        with no_dispatch():
            found = compute(values, given, dist.ProcessGroup.unbox(given["process_group"]))
    result = func(*args, **kwargs)
    if found is None:
        known.lose(outputs)
    else:
        known.write(outputs, found)
    return result


Values = list[torch.Tensor]
Compute = Callable[[Any, dict[str, Any], Any], Values]


def _gathered(values: Values, given: dict[str, Any], group: Any) -> Values:
    return [torch.cat([x.reshape(-1)] * group.size()) for x in values]


def _gathered_lists(values: Values, given: dict[str, Any], group: Any) -> Values:
    return [x for x in values for _ in range(group.size())]


def _exchanged(values: Values, given: dict[str, Any], group: Any) -> Values:
    (x,), splits = values, given["input_split_sizes"]
    parts = x.split(splits) if splits else x.chunk(group.size())
    return [torch.cat([parts[group.rank()]] * group.size())]


def _same(values: Values, given: dict[str, Any], group: Any) -> Values:
    return values


_RULES: dict[str, tuple[str, str, Compute]] = {
    "_allgather_base_": ("output_tensor", "input_tensor", _gathered),
    "allgather_into_tensor_coalesced_": ("outputs", "inputs", _gathered),
    "allgather_": ("output_tensors", "input_tensors", _gathered_lists),
    "alltoall_base_": ("output", "input", _exchanged),
    "broadcast_": ("tensors", "tensors", _same),
}
"""Operator -> what it writes, what it reads, and the rule."""
