"""A frozen weight that is stored in 4 or 8 bits, as a parameter.

It has the shape, dtype and marks of the weight that it stands for, and no numbers of that: only
codes and scales (:mod:`mindspeed.ops.quantized_weight`). Who multiplies with it asks
:func:`dense` for its values, or :mod:`mindspeed.te.kernels` for the product; every other operator
refuses it by name, so that nothing makes a copy of it unnoticed, or trains it. Saved for backward:
the parameter itself; its values are computed again there.

    with quantized_weights():          # linear layers allocate no weight
        model = ...
    store(model, QuantizedFormat("nf4", double=True))
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from mindspeed.errors import ConfigError


def _ops() -> Any:
    """The operators, which a script that only imports this package does not load."""
    from mindspeed.ops import quantized_weight

    return quantized_weight


_pending: ContextVar[bool] = ContextVar("quantized_weights", default=False)
_FIRST = 8
_PARTS = ("codes", "scales_stored", "scales_of_scales", "mean_of_scales")
_DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True)
class QuantizedFormat:
    """How weights are stored.

    Attributes:
        name: ``nf4``, ``int8`` or ``fp8``.
        double: The scales of nf4 are quantised, too.
    """

    name: str
    double: bool = True

    @property
    def doubled(self) -> bool:
        """Whether there are scales of scales."""
        return self.double and self.name == "nf4"


class QuantizedWeight(Tensor):
    """Codes and scales of a weight ``[out, in]``.

    Attributes:
        form: How it is stored.
        first: The first values of the weight before it was quantised, ``[1, 8]``.
    """

    form: QuantizedFormat
    first: Tensor

    @staticmethod
    def __new__(
        cls, form: QuantizedFormat, parts: tuple[Tensor, ...], shape: Any, dtype: torch.dtype
    ) -> QuantizedWeight:
        """Stand for a weight of ``shape`` and ``dtype``."""
        made: QuantizedWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(shape), dtype=dtype, device=parts[0].device, requires_grad=False
        )
        made.form = form
        for name, part in zip(_PARTS, parts, strict=False):
            setattr(made, name, part)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Names of the tensors that it holds; memory is counted by them."""
        return [name for name in _PARTS if name in vars(self)], self.form

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], form: QuantizedFormat, size: Any, stride: Any
    ) -> QuantizedWeight:
        """Rebuild from the tensors that it holds; in fp32, for nothing reads the result's dtype."""
        return QuantizedWeight(form, tuple(inner.values()), size, torch.float32)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Codes, then scales, or codes, scales of scales and mean of scales."""
        return tuple(getattr(self, name) for name in _PARTS if name in vars(self))

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        """Format and shape."""
        return f"QuantizedWeight({self.form.name}, {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Detach; nothing else."""
        if func is _DETACH:
            (own,) = args
            return QuantizedWeight(own.form, own.parts, own.shape, own.dtype)
        raise ConfigError(
            f"a weight in {_first(args).form.name} (--base-weights) cannot be read by {func}: what "
            "is switched on reads weights of linear layers as they are; drop that, or "
            "--base-weights"
        )

    @property
    def scales(self) -> Tensor:
        """The scales, fp32, see :mod:`mindspeed.ops.quantized_weight`."""
        ops = _ops()
        return ops.dequantize_scales(*self.parts[1:]) if self.form.doubled else self.parts[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in ``dtype``, ``[out, in]``."""
        ops = _ops()
        return ops.dequantize_weight(self.parts[0], self.scales, self.form.name, dtype)

    def product(self, x: Tensor, *, transposed: bool) -> Tensor:
        """``x W^T``, or ``x W`` with ``transposed=False``, in the dtype of ``x [..., k]``."""
        ops = _ops()
        codes = self.parts[0]
        return ops.quantized_matmul(x, codes, self.scales, self.form.name, transposed=transposed)

    @torch.no_grad()
    def set(self, weight: Tensor) -> None:
        """Take the values of ``weight [out, in]``, any floating dtype; keep its first ones."""
        self.first = weight[:1, :_FIRST].clone()
        for own, new in zip(self.parts, _parts_of(weight, self.form), strict=True):
            own.copy_(new)


def _first(args: Any) -> QuantizedWeight:
    """The first such weight among arguments, which may be lists."""
    for one in args:
        found = _first(one) if isinstance(one, list | tuple) else one
        if isinstance(found, QuantizedWeight):
            return found
    return None  # type: ignore[return-value]


def _parts_of(weight: Tensor, form: QuantizedFormat) -> tuple[Tensor, ...]:
    ops = _ops()
    codes, scales = ops.QUANTIZE_WEIGHT(weight, form.name)
    return (codes, *(ops.quantize_scales(scales) if form.doubled else (scales,)))


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a weight ``[out, in]``, stored in whatever way, in ``dtype``."""
    return weight.dense(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)


def operand(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight ``[out, in]`` for a product of :mod:`mindspeed.te.kernels` in ``dtype``."""
    return weight if isinstance(weight, QuantizedWeight) else weight.to(dtype)


def stored(parameter: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold a parameter of any shape: itself, or codes and scales."""
    return parameter.parts if isinstance(parameter, QuantizedWeight) else (parameter,)


def quantizing() -> bool:
    """Whether weights of linear layers are allocated later, by :func:`store`."""
    return _pending.get()


@contextlib.contextmanager
def quantized_weights() -> Iterator[None]:
    """Let linear layers that are built inside allocate no weights."""
    token = _pending.set(True)
    try:
        yield
    finally:
        _pending.reset(token)


def store(model: torch.nn.Module, form: QuantizedFormat, place: torch.device) -> None:
    """Allocate the weights that were left out, in ``form``: zeros.

    Args:
        model: Built inside :func:`quantized_weights`.
        form: How they are stored.

    Raises:
        ConfigError: Blocks of a layer do not end with its shard.
    """
    ops = _ops()
    for name, module in model.named_modules():
        for key, weight in list(module._parameters.items()):
            if weight is None or not weight.is_meta:
                continue
            rows, columns = weight.shape
            if form.name == "nf4" and columns % ops.BLOCK:
                raise ConfigError(
                    f"--base-weights nf4: {name} has {columns} columns on each tensor-parallel "
                    f"rank, which blocks of {ops.BLOCK} do not divide; use int8, or fewer ranks"
                )
            parts = _allocated(rows, columns, form, place)
            new = Parameter(
                QuantizedWeight(form, parts, weight.shape, weight.dtype), requires_grad=False
            )
            vars(new).update(_marks(weight))
            module._parameters[key] = new


class StandIns:
    """Weights of a module on the meta device, while a state dict is made of them."""

    def __init__(self) -> None:
        self.owners: dict[int, tuple[QuantizedWeight, Parameter]] = {}
        self._current: tuple[QuantizedWeight, Tensor] | None = None

    def writable(self, data: Tensor) -> Tensor:
        """Memory for a view of one of them, any shape; other tensors as they are.

        The weight of the call before is complete by now, if it is another one.
        """
        if not data.is_meta:
            return data
        owner, _ = self.owners[data.untyped_storage()._cdata]
        if self._current is None or self._current[0] is not owner:
            self.finish()
            self._current = owner, torch.empty(owner.shape, dtype=owner.dtype, device=owner.device)
        return self._current[1].as_strided(data.size(), data.stride(), data.storage_offset())

    def finish(self) -> None:
        """Quantise the last one."""
        if self._current is not None:
            owner, values = self._current
            owner.set(values)
            self._current = None


@contextlib.contextmanager
def stand_ins(model: torch.nn.Module) -> Iterator[StandIns]:
    """Put weights without memory in the place of those stored in fewer bits, for a moment."""
    found = StandIns()
    kept = list[tuple[torch.nn.Module, str, QuantizedWeight]]()
    for module in model.modules():
        for key, weight in module._parameters.items():
            if isinstance(weight, QuantizedWeight):
                meta = Parameter(
                    torch.empty(weight.shape, dtype=weight.dtype, device="meta"), False
                )
                vars(meta).update(_marks(weight))
                found.owners[meta.untyped_storage()._cdata] = weight, meta
                kept.append((module, key, weight))
                module._parameters[key] = meta
    try:
        yield found
    finally:
        for module, key, own in kept:
            module._parameters[key] = own  # type: ignore[assignment]


def replace(module: torch.nn.Module, weight: QuantizedWeight, values: Tensor) -> None:
    """Give a module a plain weight ``[out, in]``, in the dtype of the one it stands for."""
    key = next(key for key, one in module._parameters.items() if one is weight)
    plain = Parameter(values.to(weight.dtype), requires_grad=False)
    vars(plain).update(_marks(weight))
    module._parameters[key] = plain


def rounded(weight: Tensor, form: QuantizedFormat) -> Tensor:
    """A weight ``[out, in]`` as it is once it was stored in ``form``; its dtype stays."""
    parts = _parts_of(weight, form)
    return QuantizedWeight(form, parts, weight.shape, weight.dtype).dense(weight.dtype)


def _marks(weight: Tensor) -> dict[str, Any]:
    """Attributes that others have set."""
    own = ("form", "first", *_PARTS)
    return {name: value for name, value in vars(weight).items() if name not in own}


def _allocated(
    rows: int, columns: int, form: QuantizedFormat, place: torch.device
) -> tuple[Tensor, ...]:
    ops = _ops()
    width, codes = (columns // 2, torch.uint8) if form.name == "nf4" else (columns, torch.uint8)
    codes = torch.int8 if form.name == "int8" else codes
    shape = ops.scales_shape(rows, columns, form.name)
    made = [torch.zeros(rows, width, dtype=codes, device=place)]
    if not form.doubled:
        return (*made, torch.zeros(shape, device=place, dtype=torch.float32))
    blocks = -(-(shape[0] * shape[1]) // ops.SCALES_BLOCK)
    made.append(torch.zeros(shape, dtype=torch.uint8, device=place))
    made += [torch.zeros(n, device=place, dtype=torch.float32) for n in (blocks, 1)]
    return tuple(made)
