"""Executed operators as a device would run them: products, attention, and kernels of small ones.

    kernels = Kernels()
    operation = kernels.operation(call)          # of each call of a step, in its order

An :class:`Operation` does not depend on the device, so a step that was executed once can be timed
for any. Operators without FLOPs are kernels of their own, but for those of functions that a device
runs as one kernel (:data:`FUSED`): Megatron's fusions, if the job's flags choose them, and what
Transformer Engine computes. Inside such a kernel, a tensor that is written and read again is not
moved, and only its first operator is launched. Operators of a backward pass belong to the function
whose forward made their autograd node.

Where a CPU emulates an operator (products in fp8, dropout inside attention), it is described as
what it stands for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any

import torch

from mindspeed.instruments.clock import Call, extent, storage_of, tensors_in

Product = tuple[int, int, int, str]
"""Rows m, columns n, summed entries k, dtype of ``[m, k] @ [k, n]``."""
DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
FUSED = (
    "megatron/core/fusions/",
    "mindspeed/te/attention.py",
    "mindspeed/te/cross_entropy.py",
    "mindspeed/te/local_norm.py",
    "mindspeed/te/norm.py",
    "mindspeed/te/permutation.py",
    "mindspeed/te/quantization.py",
    "mindspeed/te/rope.py",
    "mindspeed/te/router.py",
)
"""Files whose functions a device runs as one kernel each."""
ATTENTION, PRODUCT = "attention", "product"
EMULATED = {
    "mindspeed/te/attention.py": ATTENTION,
    "mindspeed/te/linear_function.py": PRODUCT,
    "mindspeed/te/quantization.py": PRODUCT,
    "mindspeed/te/weight_gradient.py": PRODUCT,
}
"""What operators in fp32 stand for, by file: parts of an attention, products in fp8 with casts."""
GROUPED = ("mindspeed/te/grouped.py", "mindspeed/te/fused_experts.py")
"""Files whose equal products, one of each expert, a device runs as one kernel."""
OUTSIDE = (
    "megatron/core/pipeline_parallel/schedules.py",
    "megatron/core/transformer/transformer_layer.py",
)
"""Files whose functions no others of these files call."""
_DROPOUT = torch.nn.functional.dropout.__code__
_NOT_FUSED: dict[str, Callable[[FrameType], bool]] = {
    "_bias_dropout_add": lambda frame: True,  # of bias_dropout_add_unfused
    "forward_torch_softmax": lambda frame: (
        not getattr(frame.f_locals.get("self"), "scaled_masked_softmax_fusion", True)
    ),
}
"""Functions of :data:`FUSED` that run operator by operator, and when."""


@dataclass(frozen=True)
class Operation:
    """One call of an operator.

    Attributes:
        flops: executed FLOPs.
        nbytes: bytes that are read and written; of a kernel of several operators, without those
            that stay inside.
        product: its matrix product, if any.
        batch: number of these products.
        dtype: dtype of the multiplication, for operators with FLOPs.
        keys: of an attention: keys that a query sees on average.
        head: of an attention: entries of a head.
        starts: whether a kernel is launched; else the operator belongs to the kernel before it.
        grouped: whether a product is one of many equal ones in a kernel.
        stands_for: :data:`ATTENTION` or :data:`PRODUCT`, if a CPU runs something else.
    """

    name: str
    flops: int
    nbytes: int
    product: Product | None = None
    batch: int = 1
    dtype: str = ""
    keys: int = 0
    head: int = 0
    starts: bool = True
    grouped: bool = False
    stands_for: str = ""

    @property
    def attention(self) -> bool:
        """Whether it is a fused attention."""
        return self.keys > 0

    @property
    def backward(self) -> bool:
        """Whether an attention computes gradients."""
        return "backward" in self.name


class Kernels:
    """Describes the calls of one process, in their order."""

    def __init__(self) -> None:
        self._of_node: dict[int, _Place] = {}  # autograd node -> place of its forward
        self._running: CodeType | None = None
        self._made: dict[int, int] = {}  # storage -> bytes written and not read yet
        self._credit = 0
        self._product: Product | None = None  # of the experts before

    def end(self) -> None:
        """End the kernel at a product, an attention or a communication."""
        self._running = self._product = None

    def operation(self, call: Call) -> Operation:
        """Describe an executed call."""
        name = call.func._schema.name
        function, stands_for, grouped = self._place()
        if call.flops:
            self._running = None
            return self._with_flops(name, call, stands_for, grouped)
        starts = function is None or function is not self._running
        if starts:
            self._running = function
            self._made.clear()
        moved = self._moved(call, inside=function is not None)
        return Operation(name, 0, moved, starts=starts, stands_for=stands_for)

    def _with_flops(self, name: str, call: Call, stands_for: str, grouped: bool) -> Operation:
        dtype, before = dtype_of(call), self._product
        self._product = None
        if "attention" in name:
            query = next(leaf for leaf in tensors_in(call.args) if leaf.dim() > 2)
            per_key = (10 if "backward" in name else 4) * query.numel()
            keys, head = max(1, round(call.flops / per_key)), query.shape[-1]
            return Operation(name, call.flops, call.nbytes, dtype=dtype, keys=keys, head=head)
        found = product_of(call)
        if found is None:
            return Operation(name, call.flops, call.nbytes, dtype=dtype)
        product, batch = found
        if stands_for == ATTENTION:  # scores and values under a causal mask, which a kernel uses
            _, n, k, _ = product
            keys, head = max(1, max(n, k) // 2), min(n, k)
            return Operation(
                name, call.flops // 2, 0, dtype=dtype, keys=keys, head=head, stands_for=stands_for
            )
        if grouped:
            self._product = product
        return Operation(
            name,
            call.flops,
            call.nbytes,
            product,
            batch,
            dtype,
            starts=not grouped or product != before,
            grouped=grouped,
            stands_for=stands_for if dtype == "fp32" else "",
        )

    def _moved(self, call: Call, inside: bool) -> int:
        """Bytes of an operator, less those of operators before that turned out to stay inside."""
        nbytes = call.nbytes - self._credit
        if inside:
            for tensor in tensors_in((call.args, call.kwargs)):
                key = storage_of(tensor)
                if key in self._made:  # neither read nor written by one kernel
                    nbytes -= extent(tensor) + self._made[key]
                    self._made[key] = 0
            for tensor in tensors_in(call.result):
                self._made[storage_of(tensor)] = extent(tensor)
        self._credit = max(0, -nbytes)
        return max(0, nbytes)

    def _place(self) -> _Place:
        found = _on_stack()
        if torch.is_grad_enabled():
            made = torch._C._autograd._get_sequence_nr() - 1
            self._of_node.setdefault(made, found)
        elif found == _NOWHERE and (node := torch._C._current_autograd_node()) is not None:
            found = self._of_node.get(node._sequence_nr(), found)
        return found


_Place = tuple[CodeType | None, str, bool]
"""The outermost fused function that runs, what its operators stand for, whether for experts."""
_NOWHERE: _Place = (None, "", False)


def _on_stack() -> _Place:
    frame: FrameType | None = sys._getframe(3)
    function, stands_for, grouped = _NOWHERE
    dropout = None
    while frame is not None:
        code = frame.f_code
        fused, stands, many, outside, _ = _KINDS.get(id(code)) or _kind_of(code)
        if outside:
            break
        stands_for, grouped = stands_for or stands, grouped or many
        if code is _DROPOUT:
            dropout = code
        if fused:
            alone = code.co_name in _NOT_FUSED and _NOT_FUSED[code.co_name](frame)
            function = dropout if alone else code
        frame = frame.f_back
    return function, stands_for, grouped


_Kind = tuple[bool, str, bool, bool, CodeType]
_KINDS: dict[int, _Kind] = {}
"""By the ids of functions, which live as long: hashing one reads all of its instructions."""


def _kind_of(code: CodeType) -> _Kind:
    """What :data:`FUSED`, :data:`EMULATED`, :data:`GROUPED` and :data:`OUTSIDE` say about it."""
    path = PurePath(code.co_filename).as_posix()
    fused = code is _DROPOUT or any(part in path for part in FUSED)
    stands = next((kind for file, kind in EMULATED.items() if path.endswith(file)), "")
    _KINDS[id(code)] = fused, stands, path.endswith(GROUPED), path.endswith(OUTSIDE), code
    return _KINDS[id(code)]


_Sizes = tuple[int, int, int, int]  # m, n, k, batch


def product_of(call: Call) -> tuple[Product, int] | None:
    """The matrix product of an operator and its batch size; None: it is no plain product."""
    sizes_of = _SIZES.get(call.func._schema.name)
    if sizes_of is None:
        return None
    m, n, k, batch = sizes_of(*call.args)
    return (m, n, k, dtype_of(call)), batch


def dtype_of(call: Call) -> str:
    """Name of the dtype that an operator multiplies: that of its narrowest tensor argument."""
    found = [
        tensor.dtype
        for value in call.args
        for tensor in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES and tensor.numel() > 1
    ]
    return DTYPES[min(found, key=lambda dtype: dtype.itemsize)] if found else "fp32"


def _plain(left: Any, right: Any, *_: Any) -> _Sizes:
    rows, columns = left.shape[-2], right.shape[-1]
    return rows, columns, left.shape[-1], left.shape[0] if left.dim() == 3 else 1


def _added(_: Any, left: Any, right: Any, *__: Any) -> _Sizes:
    return _plain(left, right)


def _weight_gradient(x: Any, dy: Any, *_: Any) -> _Sizes:
    return dy.shape[1], x.shape[1], x.shape[0], 1


def _grouped(x: Any, weight: Any, *_: Any) -> _Sizes:
    groups = weight.shape[0]
    return -(-x.shape[0] // groups), weight.shape[2], weight.shape[1], groups


def _grouped_outer(x: Any, dy: Any, ends: Any, *_: Any) -> _Sizes:
    groups = ends.shape[0]
    return x.shape[1], dy.shape[1], -(-x.shape[0] // groups), groups


_SIZES: dict[str, Callable[..., _Sizes]] = {
    "aten::mm": _plain,
    "aten::bmm": _plain,
    "aten::_scaled_mm": _plain,
    "aten::addmm": _added,
    "aten::addmm_": _added,
    "aten::baddbmm": _added,
    "aten::baddbmm_": _added,
    "mindspeed::matmul_add": _weight_gradient,
    "mindspeed::grouped_matmul": _grouped,
    "mindspeed::grouped_outer": _grouped_outer,
    "mindspeed::groupmatmul_add": _grouped_outer,
}
