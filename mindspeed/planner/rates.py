"""How long operators and communications take on a cluster: a roofline with tiles.

    rates = DeviceRates(load_cluster("h100"))
    rates.product_seconds(4096, 4096, 4096, "bf16")
    with VirtualClock.of(rates) as clock: ...

An operator takes ``launch + max(computation, bytes / memory bandwidth)``.

* **Matrix products** ``[m, k] @ [k, n]`` are computed in tiles, one per core at a time. The last
  wave of tiles takes as long as a full one, so with t tiles on c cores

      computation = ceil(t / c) * (FLOPs of a tile) / (peak * gemm_efficiency / c)

  and tiles that reach over an edge of the result count whole. The fastest of some tile sizes and
  divisions of k counts, as libraries choose; smaller tiles load more, so they attain less
  (:data:`TILES`), and parts of k are added in fp32 in the memory.
* **Measured products** of the cluster correct this formula: a product is scaled by the ratios of
  measured to computed time, weighted by the distance of its sizes on a logarithmic scale.
* **Attention** takes FLOPs / (peak * attention_efficiency); FLOPs of masked pairs do not count.
* **All others** are bound by the bytes that they read and write once; views take no time. With
  ``fused_chains`` what one hands to the next stays in registers: :mod:`mindspeed.planner.chains`.

Sources: Williams, Waterman, Patterson, "Roofline" (2009); NVIDIA, "Matrix Multiplication Background
User's Guide" (tile and wave quantisation); Osama et al., "Stream-K" (arXiv 2301.03598).
"""

from __future__ import annotations

from collections import Counter
from math import ceil, log2

from mindspeed.instruments.clock import Call
from mindspeed.instruments.ledger import Communication
from mindspeed.planner.chains import Chain
from mindspeed.planner.cluster import Cluster, Measured
from mindspeed.planner.operations import Operation, operation_of
from mindspeed.planner.products import Product

TILES = ((1, 1, 1.0), (1, 2, 0.9), (2, 2, 0.75))
"""Parts of a tile's rows and columns, and what they attain of the efficiency of whole tiles."""
SPLITS = (1, 2, 4, 8)
"""Parts that the summed dimension may be divided into."""


class DeviceRates:
    """Rates of one device and its links, for :class:`~mindspeed.instruments.clock.VirtualClock`.

    Args:
        cluster: the machine.

    Attributes:
        products: how often each matrix product was timed.
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
        """Of computation while communication runs."""
        return self._cluster.overlap_slowdown

    def communication(self, communication: Communication) -> float:
        """Seconds of a communication over the cluster's links."""
        self._chain.end()
        return self._cluster.communication_seconds(communication)

    def stream(self, communication: Communication) -> str:
        """One per process group; links carry both directions at once."""
        if communication.op in ("send", "recv"):
            return f"{communication.group} {communication.op}"
        return communication.group

    def operator(self, call: Call) -> float:
        """Seconds of an operator."""
        return self.seconds(operation_of(call, self._chain))

    def seconds(self, operation: Operation) -> float:
        """Seconds of an operator by its description."""
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
