"""Seconds of operators and communications on a cluster: a roofline with tiles.

    rates = DeviceRates(load_cluster("h100"))
    rates.product_seconds(4096, 4096, 4096, "bf16")
    with VirtualClock.of(rates) as clock: ...

An :class:`Operation` describes a call independently of the device, so a step that was executed once
can be timed for any device. It takes ``launch + max(computation, bytes / memory bandwidth)``.

* **Matrix products** ``[m, k] @ [k, n]`` are computed in tiles, one per core at a time. The last
  wave of tiles takes as long as a full one, so t tiles on c cores take

      computation = ceil(t / c) * (FLOPs of a tile) / (peak * gemm_efficiency / c)

  and tiles that cross an edge of the result count whole. The fastest of several tile sizes and
  splits of k is taken, as libraries do. Smaller tiles load more, so they attain less
  (:data:`TILES`); parts of k are accumulated in fp32 in memory. Grouped products of experts are
  counted as equal products: the planner assumes balanced experts.
* **Measured products** of the cluster correct this formula: a product is scaled by the ratios of
  measured to computed time, weighted by the distance of its sizes on a logarithmic scale.
* **Attention** takes FLOPs / (peak * attention_efficiency), without FLOPs of masked pairs.
* **All others** are bound by the bytes that they read and write once; views take no time. With
  ``fused_chains`` a :class:`Chain` of them runs as one kernel.

Sources: Williams, Waterman, Patterson, "Roofline" (2009); NVIDIA, "Matrix Multiplication Background
User's Guide" (tile and wave quantisation); Osama et al., "Stream-K" (arXiv 2301.03598).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mindspeed.instruments.clock import Call, extent, storage_of
from mindspeed.instruments.ledger import Communication
from mindspeed.planner.cluster import Cluster, Measured

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


class Chain:
    """Bytes that a chain of memory-bound operators moves if it runs as one kernel.

    Fused kernels and compilers keep intermediate results in registers. A chain is all operators
    between two matrix products, attentions or communications. A tensor that is written and read
    inside it is not moved at all, and the chain is launched once. This is a lower bound: a residual
    that a later layer reads has to be written.
    """

    def __init__(self) -> None:
        self._made: dict[int, int] = {}  # storage -> bytes written and not read yet
        self._credit = 0
        self._started = False

    def end(self) -> None:
        """End the chain at a product, an attention or a communication."""
        self._made.clear()
        self._credit, self._started = 0, False

    def moved(self, call: Call) -> tuple[int, bool]:
        """Add an operator; bytes that it moves, and whether it is the first one."""
        nbytes = call.nbytes - self._credit
        for tensor in _tensors((call.args, call.kwargs)):
            key = storage_of(tensor)
            if key in self._made:  # neither read nor written by a fused kernel
                nbytes -= extent(tensor) + self._made[key]
                self._made[key] = 0
        for tensor in _tensors(call.result):
            self._made[storage_of(tensor)] = extent(tensor)
        self._credit = max(0, -nbytes)
        first, self._started = not self._started, True
        return max(0, nbytes), first


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Operation:
    """One call of an operator.

    Attributes:
        name: name of the operator.
        flops: executed FLOPs.
        nbytes: bytes that are read and written once.
        product: its matrix product, if any.
        batch: number of these products.
        dtype: dtype of the multiplication, for operators with FLOPs.
        attention: whether it is a fused attention.
        chain_bytes: bytes that a memory-bound operator moves if its :class:`Chain` is one kernel.
        starts_chain: whether it is the first operator of its chain.
    """

    name: str
    flops: int
    nbytes: int
    product: Product | None = None
    batch: int = 1
    dtype: str = ""
    attention: bool = False
    chain_bytes: int = 0
    starts_chain: bool = False


def operation_of(call: Call, chain: Chain) -> Operation:
    """Describe an executed call, which ends or continues the chain of operators before it."""
    name = call.func._schema.name
    if not call.flops:
        moved, first = chain.moved(call)
        return Operation(name, 0, call.nbytes, chain_bytes=moved, starts_chain=first)
    chain.end()
    dtype = dtype_of(call)
    if (found := product_of(call)) is not None:
        product, batch = found
        return Operation(name, call.flops, call.nbytes, product, batch, dtype)
    attention = "attention" in name
    return Operation(name, call.flops, call.nbytes, dtype=dtype, attention=attention)


TILES = ((1, 1, 1.0), (1, 2, 0.9), (2, 2, 0.75))
"""Divisors of a tile's rows and columns, and the efficiency relative to that of whole tiles."""
SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which the summed dimension may be split."""


class DeviceRates:
    """Rates of one device and its links, for :class:`~mindspeed.instruments.clock.VirtualClock`.

    Args:
        cluster: the machine.

    Attributes:
        products: executions of each matrix product.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._device = cluster, cluster.device
        self.products: Counter[Product] = Counter()
        self._chain = Chain()
        self._known: dict[tuple[Product, int], float] = {}
        self._corrections: dict[str, list[tuple[Measured, float]]] = {}
        for measured in self._device.products:
            ratio = measured.seconds / self._formula(
                (measured.m, measured.n, measured.k, measured.dtype), 1
            )
            self._corrections.setdefault(measured.dtype, []).append((measured, ratio))

    @property
    def slowdown(self) -> float:
        """Slowdown of computation while communication runs."""
        return self._cluster.overlap_slowdown

    def communication(self, communication: Communication) -> float:
        """Seconds of a communication over the cluster's links."""
        self._chain.end()
        return self._cluster.communication_seconds(communication)

    def stream(self, communication: Communication) -> str:
        """The stream of a communication: one per process group, and per direction of messages."""
        if communication.op in ("send", "recv"):
            return f"{communication.group} {communication.op}"
        return communication.group

    def operator(self, call: Call) -> float:
        """Seconds of an executed operator."""
        return self.seconds(operation_of(call, self._chain))

    def seconds(self, operation: Operation) -> float:
        """Seconds of a described operator."""
        if not operation.flops:
            return self._memory_bound(operation)
        if operation.product is not None:
            product, batch = operation.product, operation.batch
            self.products[product] += batch
            return max(self._product(product, batch), self.moving_seconds(operation.nbytes))
        peak = self._device.peak(operation.dtype)
        if operation.attention:
            computing = operation.flops / (peak * self._device.attention_efficiency)
        else:
            computing = operation.flops / (peak * self._device.efficiency(operation.dtype))
        return self._launch + max(computing, self._moving(operation.nbytes))

    def _memory_bound(self, operation: Operation) -> float:
        if not self._cluster.fused_chains:
            return self.moving_seconds(operation.nbytes)
        starting = self._launch if operation.starts_chain else 0.0
        return self._moving(operation.chain_bytes) + starting

    def product_seconds(self, m: int, n: int, k: int, dtype: str, batch: int = 1) -> float:
        """Seconds of ``batch`` products ``[m, k] @ [k, n]`` in one operator."""
        return self._product((m, n, k, dtype), batch)

    def moving_seconds(self, nbytes: float) -> float:
        """Seconds of an operator that reads and writes ``nbytes`` and computes little."""
        return self._launch + self._moving(nbytes)

    @property
    def _launch(self) -> float:
        return self._device.launch_us * 1e-6

    def _moving(self, nbytes: float) -> float:
        return nbytes / (self._device.memory_gbs * 1e9 * self._device.memory_efficiency)

    def _product(self, product: Product, batch: int) -> float:
        key = product, batch
        if key not in self._known:
            self._known[key] = self._formula(product, batch) * self._correction(product)
        return self._known[key]

    def _formula(self, product: Product, batch: int) -> float:
        m, n, k, dtype = product
        itemsize = {"fp8": 1, "int8": 1, "fp32": 4, "fp64": 8}.get(dtype, 2)
        moving = self._moving(batch * itemsize * (m * k + k * n + m * n))
        return self._launch + max(self._computing(product, batch), moving)

    def _computing(self, product: Product, batch: int) -> float:
        m, n, k, dtype = product
        rate = self._device.peak(dtype) * self._device.efficiency(dtype) / self._device.cores
        rows, columns = self._device.tile
        fastest = float("inf")
        for high, wide, attained in TILES:
            height, width = max(1, rows // high), max(1, columns // wide)
            tiles = batch * ceil(m / height) * ceil(n / width)
            for split in SPLITS:
                waves = ceil(tiles * split / self._device.cores)
                seconds = waves * 2 * height * width * ceil(k / split) / (rate * attained)
                if split > 1:
                    seconds += self._moving(2 * 4 * split * batch * m * n)
                fastest = min(fastest, seconds)
        return fastest

    def _correction(self, product: Product) -> float:
        """Mean ratio of measured to computed time, by inverse squared distance."""
        m, n, k, dtype = product
        weighted = total = 0.0
        for measured, ratio in self._corrections.get(dtype, ()):
            sizes = (m / measured.m, n / measured.n, k / measured.k)
            distance = sum(log2(size) ** 2 for size in sizes)
            if distance == 0:
                return ratio
            weighted += ratio / distance
            total += 1 / distance
        return weighted / total if total else 1.0
