"""FakeTensors whose values are known although nothing else is computed.

A routing map decides how many tokens each expert gets, so shapes depend on its values. Some
FakeTensors therefore carry a real tensor with their values (:func:`assume`). Operators on such
tensors also run on the real ones, and their results carry values in turn. So sums, sorts, splits
and ``.tolist()`` of a routing map return numbers; all other tensors have no values.

    assume(logits, values)                 # FakeTensor, real tensor
    logits.topk(2).indices.tolist()        # of the values
    (logits @ weight).sum().item()         # refused: the weights have none

Tensors with values: assumed ones, real ones, small results of ``arange``, ``zeros``, ``ones`` and
``full``, and results of operators all of whose inputs have values. Random operators have none.
Collectives assume that all ranks of the group hold the same values:

===============  =====================================================
all-gather       this rank's values, once for each rank
all-to-all       this rank's part for itself, once from each rank
broadcast        its values
others           unknown (a sum does not show which reduction it is)
===============  =====================================================

Instruments do not count the bytes and FLOPs of values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mindspeed.instruments.clock import tensors_in
from mindspeed.journal import Journal

MOST = 1 << 26
"""Maximum number of elements of a tensor with values."""
MOST_FLOATS = 1 << 12
"""The same for constants of a floating dtype: excludes gradient buffers."""
_aten = torch.ops.aten
_FACTORIES = {_aten.arange, _aten.zeros, _aten.ones, _aten.full, _aten.scalar_tensor}
_SELECTIONS = {_aten.masked_select, _aten.index}
"""Operators whose shape depends on a mask only; the selected values may be unknown."""
_NAME = "_known_values"


def assume(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Attach values, a real tensor of the same shape, to a FakeTensor; overwrite a real tensor."""
    with no_dispatch():
        if isinstance(tensor, FakeTensor):
            setattr(tensor, _NAME, values.to(tensor.dtype).reshape(tensor.shape).clone())
        else:
            tensor.data.copy_(values.reshape(tensor.shape))


def share_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Set each row of ``target``, uint8 ``[n, bytes]``, to the bytes of the scalar ``source``.

    Both are FakeTensors; ``source`` has values.
    """
    values = source.__dict__.get(_NAME)
    if values is not None:
        with no_dispatch():
            assume(target, values.view(1).view(torch.uint8).expand(target.shape))


class KnownValues(TorchDispatchMode):
    """Dispatch mode that propagates values; to be used inside a ``FakeTensorMode``."""

    def __init__(self) -> None:
        super().__init__()
        self._journal = Journal()
        self._lost: dict[int, torch.UntypedStorage] = {}  # values that were overwritten

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing here is compiled."""
        return False

    def __enter__(self) -> KnownValues:
        super().__enter__()
        self._journal.set(FakeTensor, "tolist", self._list_of(FakeTensor.tolist), owner="planner")
        self._journal.set(FakeTensor, "numpy", self._array_of(torch.Tensor.numpy), owner="planner")
        return self

    def __exit__(self, *error: Any) -> None:
        self._journal.undo()
        super().__exit__(*error)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, in the same shape, or None."""
        if not isinstance(tensor, FakeTensor):
            return None if tensor.device.type == "meta" else tensor
        values: torch.Tensor | None = tensor.__dict__.get(_NAME)
        if values is None or values.shape != tensor.shape or values.dtype != tensor.dtype:
            return None
        return None if self._lost and _storage(values) in self._lost else values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        values = [self.of(tensor) for tensor in tensors]
        known = sum(value is not None for value in values)
        if func.namespace == "c10d":
            return _run_collective(self, func, args, kwargs)
        if known < len(tensors) or (not tensors and func.overloadpacket not in _FACTORIES):
            return self._without_values(func, args, kwargs, known)
        if func is _aten._local_scalar_dense.default:
            with no_dispatch():
                return values[0].item()  # type: ignore[union-attr]
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._without_values(func, args, kwargs, known)
        if torch.Tag.dynamic_output_shape in func.tags:
            return self._real_first(func, args, kwargs)
        result = func(*args, **kwargs)
        found = tensors_in(result)
        if not found or any(x.numel() > MOST for x in found):
            return result
        if not tensors and any(x.is_floating_point() and x.numel() > MOST_FLOATS for x in found):
            return result
        self._attach(found, self._execute(func, args, kwargs))
        return result

    def _without_values(self, func: Any, args: Any, kwargs: Any, known: int) -> Any:
        if known and func.overloadpacket in _SELECTIONS and self._mask_is_known(args):
            return self._real_first(func, args, kwargs, keep=False)
        if known and func._schema.is_mutable:
            self._lose(func, args, kwargs)
        return func(*args, **kwargs)

    def _mask_is_known(self, args: Any) -> bool:
        masks = [x for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
        return any(mask.dtype == torch.bool for mask in masks) and all(
            self.of(mask) is not None for mask in masks
        )

    def _real_first(self, func: Any, args: Any, kwargs: Any, keep: bool = True) -> Any:
        """Execute on values first, because shapes depend on the result."""
        device = next(x.device for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        real = self._execute(func, args, kwargs)
        result = tree_map_only(
            torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), real
        )
        if keep:
            self._attach([x for x in tree_leaves(result) if isinstance(x, torch.Tensor)], real)
        return result

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute an operator on values; unknown ones are zero."""
        with no_dispatch():
            args, kwargs = tree_map_only(torch.Tensor, self._stand_in, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("cpu")
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return func(*args, **kwargs)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self.of(tensor)
        if values is not None:
            return values.detach()
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    def _attach(self, fakes: list[torch.Tensor], real: Any) -> None:
        found = [x for x in tree_leaves(real) if isinstance(x, torch.Tensor)]
        for fake, values in zip(fakes, found, strict=True):
            if isinstance(fake, FakeTensor):
                setattr(fake, _NAME, values)

    def _lose(self, func: Any, args: Any, kwargs: Any) -> None:
        """Drop the values of tensors that an operator writes, and of all that share memory."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.lose(value)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.lose(kwargs.get(argument.name))

    def lose(self, written: Any) -> None:
        """Drop the values of written tensors, and of all that share their memory."""
        for tensor in tree_leaves(written):
            values = self.of(tensor) if isinstance(tensor, FakeTensor) else None
            if values is not None:
                self._lost[_storage(values)] = values.untyped_storage()

    def write(self, tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Set the values of written tensors; shapes of values may differ, sizes are the same."""
        for tensor, one in zip(tensors, values, strict=True):
            if isinstance(tensor, FakeTensor):
                self.lose(tensor)
                assume(tensor, one)

    def _list_of(self, otherwise: Any) -> Any:
        def tolist(tensor: torch.Tensor) -> Any:
            values = self.of(tensor)
            if values is None:
                return otherwise(tensor)
            with no_dispatch():
                return torch.Tensor.tolist(values)

        return tolist

    def _array_of(self, otherwise: Any) -> Any:
        def numpy(tensor: torch.Tensor, **options: Any) -> Any:
            values = self.of(tensor)
            if values is None:  # .item() is an error that names the reader
                return [one.item() for one in tensor.flatten()]
            with no_dispatch():
                array = otherwise(values, **options)
            weakref.finalize(array, _keeps, tensor).atexit = False
            return array

        return numpy


def _keeps(tensor: torch.Tensor) -> None:
    """Keep a tensor alive while an array shares its memory."""


def _storage(values: torch.Tensor) -> int:
    return values.untyped_storage()._cdata


def _run_collective(known: KnownValues, func: Any, args: Any, kwargs: Any) -> Any:
    """Execute a ``c10d`` operator; its outputs have values if its inputs have."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rule = _RULES.get(func._schema.name.partition("::")[2])
    found: list[torch.Tensor] | None = None
    if rule is None:  # the schema does not say which arguments are written
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
"""Written argument, read argument, and the rule, by operator."""
