"""FakeTensors of a planned step: constants for known readers, and results by cheap keys.

Code that reads the value of a tensor gets a constant if the value does not change what is executed;
any other read is an error with file and line.

A planned step calls the same operators with tensors of the same shapes again and again. The cache
of :class:`FakeTensorMode` builds keys for symbolic shapes, which takes longer than the rest of the
step; keys here know FakeTensors of fixed shapes alone, and every other call goes to that mode.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from mindspeed.errors import ConfigError
from mindspeed.ops.registry import find

READERS: dict[tuple[str, str], float] = {
    ("clip_grads.py", "get_grad_norm_fp32"): 1e6,  # gradients are clipped
    ("finalize_model_grads.py", "finalize_model_grads"): 1,  # there are tokens
    ("step.py", "_must_skip"): 0,
    ("optimizer.py", "_unscale_main_grads_and_check_for_nan"): 0.0,
    ("utils.py", "logical_and_across_model_parallel_group"): 1,
    ("utils.py", "reduce_max_stat_across_model_parallel_group"): 0.0,
    ("utils.py", "_broadcast_cu_seqlens"): 0,
}
"""Constant that a function reads, by its file and name."""
_INSIDE = (
    "/torch/",
    "/spmd_types/",
    "/mindspeed/planner/",
    "/mindspeed/instruments/",
    "/mindspeed/type_check/",
)


class ReadsValue(ConfigError):
    """The model depends on the value of a tensor."""


class NoFakeKernel(ConfigError):
    """An operator has no fake kernel, which gives the shapes of its results."""


class PlannedTensors(FakeTensorMode):
    """FakeTensor mode in which known functions read constants; real tensors may be mixed in."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # The cache of torch keeps storages alive, and gets freed memory back for views of it.
        self.cache_enabled = False
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of a new FakeTensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing here is compiled, and torch's wrapper imports its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on FakeTensors.

        Raises:
            ReadsValue: the operator needs the value of a tensor; names file and line.
            NoFakeKernel: the operator has no fake kernel; names operator, file and line.
        """
        if func is torch.ops.aten._local_scalar_dense.default:
            return _answer(args[0])
        kwargs = kwargs or {}
        if func.namespace == "c10d" and self._has_all(tree_leaves((args, kwargs))):
            with in_kernel_invocation_manager(self):  # whose tensors stay what they are
                return func(*args, **kwargs)
        key = self._key(func, args, kwargs)
        if key is None:
            return self._propagate(func, types, args, kwargs)
        if _is_view(func):
            return self._view(func, args, kwargs)
        found = _results.get(key)
        if found is not None:
            return found.made(self, args)
        result = self._propagate(func, types, args, kwargs)
        if key not in _results:
            changed = self._key(func, args, kwargs) != key
            _results[key] = None if changed else self._recorded(args, kwargs, result)
            _own.append(key)
        return result

    def _has_all(self, values: Iterable[Any]) -> bool:
        """Whether all tensors are of this mode."""
        return all(
            type(x) is FakeTensor and x.fake_mode is self
            for x in values
            if isinstance(x, torch.Tensor)
        )

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A view of a tensor without values is that of its tensor on the meta device."""
        with in_kernel_invocation_manager(self):
            found = func(*args, **kwargs)
        device = args[0].fake_device
        if type(found) is list:
            return [self.fake(one, device) for one in found]
        return self.fake(found, device)

    def fake(self, tensor: torch.Tensor, device: torch.device) -> FakeTensor:
        """The FakeTensor of a tensor on the meta device, as torch makes it, in a third of the time.

        Args:
            tensor: on the meta device.
            device: where it would be.
        """
        if (attributes := self._attributes.get(device)) is None:
            made = FakeTensor(self, tensor, device)
            self._attributes[device] = dict(vars(made))
            return made
        made = torch.Tensor._make_subclass(
            FakeTensor,
            tensor,
            tensor.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        return made

    def _propagate(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ReadsValue(
                f"{_place()} calls {func}, whose result depends on values of tensors, which do not "
                f"exist in planning{_ADVICE}"
            ) from error
        except UnsupportedOperatorException as error:
            raise NoFakeKernel(
                f"{_place()} calls {func}, which has no fake kernel: register one with "
                "torch.library.register_fake"
            ) from error

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """All that the result of an operator of ATen or of ours depends on, or None."""
        if func.namespace != "aten" and ((own := find(func)) is None or own.communicates):
            return None
        key = [func, torch.get_default_dtype()]
        for x in args:  # a generator would take as long as what it yields
            if not self._describe(key, x):
                return None
        if kwargs:
            key += kwargs
            for x in kwargs.values():
                if not self._describe(key, x):
                    return None
        return tuple(key)

    def _describe(self, key: list[Any], value: Any) -> bool:
        """Append what is known of an argument to a key; False where it has to be looked at."""
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not self or not _is_plain(value):
                return False
            key += _metadata(value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            return all(self._describe(key, x) for x in value)
        elif kind in _VALUES:
            key += (kind, value)  # 1, 1.0 and True are equal
        else:
            return False
        return True

    def _recorded(self, args: Any, kwargs: Any, result: Any) -> _Result | None:
        """How to make a result again, or None."""
        several = type(result) in (list, tuple)
        tensors = [] if result is None else list(result) if several else [result]
        if any(type(x) is not FakeTensor or not _is_plain(x) for x in tensors):
            return None
        places = {_storage(x): i for i, x in enumerate(args) if isinstance(x, torch.Tensor)}
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        new = [_storage(x) for x in tensors if _storage(x) not in places]
        if len(set(new) - given) < len(new):  # shared by results, or of a tensor inside a list
            return None
        outputs = []
        for x in tensors:
            index = places.get(_storage(x))
            same = index is not None and args[index] is x
            outputs.append(_Output(index, None if same else _metadata(x)))
        found = _Result(tuple(outputs), type(result) if several else None)
        again = found.made(self, args) if tensors else []
        pairs = zip(tensors, again if several or not tensors else [again], strict=True)
        return found if all(_equal(*pair) for pair in pairs) else None


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that an operator returns.

    Attributes:
        index: of the argument that it is, or is a view of; None for a new storage.
        metadata: of a tensor that is no argument.
    """

    index: int | None
    metadata: tuple[Any, ...] | None

    def made(self, mode: PlannedTensors, args: Any) -> Any:
        if self.metadata is None:
            return args[self.index]
        shape, stride, offset, dtype, device = self.metadata[:5]
        tensor = _empty_strided(shape, stride, dtype=dtype, device="meta")
        if self.index is not None:
            tensor.set_(args[self.index].untyped_storage(), offset, shape, stride)
        return mode.fake(tensor, device)


@dataclass(frozen=True, slots=True)
class _Result:
    """What an operator returns: nothing, one tensor, or several in a list or tuple."""

    outputs: tuple[_Output, ...]
    several: type | None

    def made(self, mode: PlannedTensors, args: Any) -> Any:
        """Make the result for arguments of the same metadata."""
        if self.several is None:
            return self.outputs[0].made(mode, args) if self.outputs else None
        return self.several([one.made(mode, args) for one in self.outputs])


_results: dict[Any, _Result | None] = {}
"""Results of operators by all that they depend on; None: not to be made from the key."""
_own: list[Any] = []
"""Keys that this process has added."""


def learned() -> list[Any]:
    """What this process has found about operators, for :func:`learn`; can be pickled."""
    found = ((key, result) for key in _own if (result := _results[key]) is not None)
    return [((key[0]._schema.name, key[0]._overloadname), key[1:], one) for key, one in found]


def learn(found: Iterable[Any]) -> None:
    """Know what another process has found, so that those forked from now on need not find it."""
    for (name, overload), rest, result in found:
        namespace, _, name = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:  # one of ours is registered by the module that needs it
            _results[(getattr(packet, overload), *rest)] = result


_VALUES = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout}
    | {torch.memory_format}
)
_empty_strided = torch._C._VariableFunctions.empty_strided  # torch's own, below any wrapper


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether an operator only makes views; composite ones, such as ``to``, may copy."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return func.is_view and not func.has_kernel_for_dispatch_key(composite)


def _is_plain(tensor: FakeTensor) -> bool:
    """Whether a tensor is all that its metadata says: no constant, strided, no lazy bits.

    Its memory is not freed: making a view of it would get it back.
    """
    return (
        tensor.constant is None
        and (tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0)
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def _metadata(tensor: FakeTensor) -> tuple[Any, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.fake_device,
        tensor.requires_grad,
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _equal(tensor: FakeTensor, again: FakeTensor) -> bool:
    """Whether a tensor that was made again stands for the first one."""
    return (
        _metadata(tensor) == _metadata(again)
        and tensor.untyped_storage().nbytes() == again.untyped_storage().nbytes()
        and torch._C._dispatch_key_set(tensor) == torch._C._dispatch_key_set(again)
    )


_ADVICE = "; compute it from shapes or arguments instead"


def _answer(tensor: torch.Tensor) -> float | int | bool:
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        with no_dispatch():
            return constant.item()  # type: ignore[no-any-return]
    code = _reader().f_code
    value = READERS.get((code.co_filename.rpartition("/")[2], code.co_name))
    if value is None:
        raise ReadsValue(
            f"{_place()} reads the value of a tensor {list(tensor.shape)} {tensor.dtype}, which "
            f"does not exist in planning{_ADVICE}"
        )
    return bool(value) if tensor.dtype == torch.bool else value


def _place() -> str:
    frame = _reader()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _reader() -> FrameType:
    """The innermost frame outside of torch, the planner and dispatch modes."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_dispatch__"
        or any(part in frame.f_code.co_filename for part in _INSIDE)
    ):
        frame = frame.f_back
    return frame
