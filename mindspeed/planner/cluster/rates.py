"""Seconds of operators and communications on a cluster: a roofline with tiles.

    rates = DeviceRates(load_cluster("h100"))
    rates.product_seconds(4096, 4096, 4096, "bf16")
    with VirtualClock.of(rates) as clock: ...

An operation takes ``launch + max(computation, bytes / memory bandwidth)``.

* **Matrix products** ``[m, k] @ [k, n]`` are computed in tiles, one per core at a time. The last
  wave of tiles takes as long as a full one, so t tiles on c cores take

      computation = ceil(t / c) * (FLOPs of a tile) / (peak * gemm_efficiency / c)

  and tiles that cross an edge of the result count whole. The fastest of several tile sizes and
  splits of k is taken, as libraries do. Smaller tiles load more, so they attain less
  (:data:`TILES`); parts of k are accumulated in fp32 in memory. Experts of a rank have equal
  products: a plan is uneven between ranks.
* **Measured products** of the cluster correct this formula: a product is scaled by the ratios of
  measured to computed time, weighted by the distance of its sizes on a logarithmic scale.
* **Attention** takes FLOPs / (peak * efficiency), without FLOPs of masked pairs; the efficiency
  depends on the number of keys and the size of heads.
* **All others** are bound by the bytes that they read and write once; views take no time. Those
  that a device runs as one kernel are one (:mod:`mindspeed.planner.cluster.operations`).
* **The host** starts a kernel every ``host_us``; the device waits for it where its queue is empty.
  Where experts exchange tokens the host waits for the device, so their queue is never long.
* Devices hold a part of their peak, ``sustained``, for power and heat.
* **Precision**: a job in fp8 or fp4 is executed in bf16 or emulated, and priced in its precision.
  Products of linear layers run in it; those of the router and of the output layer stay bf16, as in
  Megatron-Core, and so does attention. To quantise an operand, its bf16 values are read twice: for
  the maximum of the whole tensor and for the values, or for values by rows and by columns in
  blocks; both are written. Weights are quantised once a step, which is left out.
* **Experts** exchange every copy of a token, or with the flexible dispatcher (DeepEP, HybridEP) a
  token once for each rank and node that has one of its experts: with E experts on R ranks, k of
  which a token takes at random, a rank is taken with probability ``1 - C(E - E/R, k) / C(E, k)``; a
  node likewise. An exchange takes as long as its busiest rank sends or receives, which is the
  counted one (:mod:`mindspeed.planner.expert_loads`).

Sources: Williams, Waterman, Patterson, "Roofline" (2009); NVIDIA, "Matrix Multiplication Background
User's Guide" (tile and wave quantisation); Osama et al., "Stream-K" (arXiv 2301.03598);
Transformer Engine's documentation of fp8 current scaling, MXFP8 and NVFP4; DeepEP's and HybridEP's
description of their all-to-all.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from math import ceil, comb, log2

from mindspeed.flags import read
from mindspeed.instruments.clock import Call, VirtualClock
from mindspeed.instruments.ledger import Communication
from mindspeed.job import MixtureOfExperts, Parallel, Precision
from mindspeed.models.model_config import ModelConfig
from mindspeed.planner.cluster import Cluster, MeasuredProduct
from mindspeed.planner.cluster.operations import ATTENTION, Kernels, Operation, Product
from mindspeed.planner.expert_loads import loads_of
from mindspeed.planner.interval import job_kind

WEIGHT_GRADIENTS = (
    "mindspeed::matmul_add",
    "mindspeed::grouped_outer",
    "mindspeed::groupmatmul_add",
)
TILES = ((1, 1, 1.0), (1, 2, 0.9), (2, 2, 0.75))
"""Divisors of a tile's rows and columns, and the efficiency relative to that of whole tiles."""
GROUP = 16
"""Equal products that fill the device, if those of experts run in one kernel."""
ALIGNED = 64
"""Entries of which leading dimensions of large operands are multiples, else loads are slower."""
SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which the summed dimension may be split."""

PRECISIONS = {"fp8": ("fp8", 1.0), "mxfp8": ("fp8", 1.0), "nvfp4": ("fp4", 0.5)}
"""Dtype and bytes of an entry, of precisions that are priced otherwise than they are executed."""
PASSES = 2
"""Times that an operand is read to be quantised."""


@dataclass(frozen=True)
class Experts:
    """Experts of a model: number, and how many a token takes."""

    number: int
    taken: int

    def reached(self, domains: int) -> float:
        """Domains that a token goes to on average, of so many equal ones."""
        if domains <= 1:
            return 1.0
        elsewhere = self.number - self.number // domains
        return domains * (1 - comb(elsewhere, self.taken) / comb(self.number, self.taken))


@dataclass(frozen=True)
class RatedJob:
    """A job, for its rates.

    Attributes:
        dtype: of parameters.
        precision: of :data:`PRECISIONS`, if linear layers multiply in less than ``dtype``.
        kept: sizes of products that stay in ``dtype``: of the vocabulary on a rank, of the router.
        once: experts, if a token is sent once to each rank that has one of its own.
        waits: whether the host waits for the sizes of an exchange, before it starts more kernels.
        imbalance: tokens of the busiest expert-parallel rank over the mean.
    """

    dtype: str = "bf16"
    precision: str = ""
    kept: frozenset[int] = frozenset()
    once: Experts | None = None
    waits: bool = True
    imbalance: float = 1.0

    @property
    def low(self) -> tuple[str, float] | None:
        """Dtype and bytes of an entry of products of linear layers, if they are not the job's."""
        return PRECISIONS.get(self.precision)


def program_of(args: argparse.Namespace) -> RatedJob:
    """The program of a job, from its final values."""
    moe, parallel = MixtureOfExperts.of(args), Parallel.of(args)
    vocab = read(ModelConfig, args).padded_vocab_size
    flexible = moe.count > 0 and moe.dispatcher == "flex"
    return RatedJob(
        Precision.of(args).name,
        job_kind(args).precision,
        frozenset({vocab // parallel.tensor, moe.count} - {0}),
        Experts(moe.count, moe.topk) if flexible else None,
        waits=not flexible,
        imbalance=loads_of(args).imbalance(parallel.expert),
    )


PLAIN = RatedJob()
"""A job in bf16."""


class DeviceRates:
    """Rates of one device and its links, for :class:`~mindspeed.instruments.clock.VirtualClock`.

    Attributes:
        routed: seconds of products of experts.
    """

    def __init__(self, cluster: Cluster, program: RatedJob = PLAIN) -> None:
        self._cluster, self._device = cluster, cluster.device
        self.program = program
        self.routed = 0.0
        self._kernels = Kernels()
        self._ahead = 0.0  # seconds of work in the queue of the device
        self._known: dict[tuple[Product, int], float] = {}
        self._corrections: dict[str, list[tuple[MeasuredProduct, float]]] = {}
        for measured in self._device.products:
            product = (measured.m, measured.n, measured.k, measured.dtype)
            seconds = max(measured.seconds - self._launch, 0.1 * measured.seconds)
            ratio = seconds / (self._formula(product, 1) * self._device.sustained)
            self._corrections.setdefault(measured.dtype, []).append((measured, ratio))

    @property
    def slowdown(self) -> float:
        """Slowdown of computation while communication runs."""
        return self._cluster.overlap_slowdown

    def communication(self, communication: Communication) -> float:
        """Seconds of a communication over the cluster's links."""
        self._kernels.end()
        experts = self.program.once
        described = "EXPERT_MODEL_PARALLEL" in communication.description
        if communication.op == "all_to_all" and described:
            if self.program.waits:
                self._ahead = -self._device.exchange_us * 1e-6
            if experts is not None:
                return self._exchanged_once(communication, experts)
            if self.program.imbalance > 1:
                communication = _busiest(communication)
        return self._cluster.communication_seconds(communication)

    def _exchanged_once(self, communication: Communication, experts: Experts) -> float:
        """Seconds of an exchange in which a token goes once to each node, then to its ranks."""
        ranks, cluster = communication.ranks, self._cluster
        once = communication.payload / experts.taken
        if self.program.imbalance > 1:
            once = _busiest(communication).payload / experts.taken
        node, network = cluster.levels[0], cluster.levels[-1]
        nodes = len({node.domain(rank) for rank in ranks})
        reached = experts.reached(len(ranks)) * (1 - 1 / len(ranks))
        seconds = node.latency + once * reached / node.bytes_per_second
        if nodes > 1:
            sent = once * experts.reached(nodes) * (1 - 1 / nodes)
            seconds = max(seconds, network.latency + sent / network.bytes_per_second)
        return cluster.collective_us * 1e-6 + seconds

    def stream(self, communication: Communication) -> str:
        """The stream of a communication: one per process group, and per direction of messages."""
        if communication.op in ("send", "recv"):
            return f"{communication.group} {communication.op}"
        return communication.group

    def operator(self, call: Call) -> float:
        """Seconds of an executed operator, with those in which the device waits for the host."""
        operation = self._kernels.operation(call)
        return self.queued(operation, self.seconds(operation))

    def queued(self, operation: Operation, seconds: float) -> float:
        """Add the seconds in which the device waits for the host, which starts a kernel."""
        if operation.grouped:
            self.routed += seconds
        if not operation.starts or not seconds:
            return seconds
        ahead = self._ahead - self._device.host_us * 1e-6
        self._ahead = max(0.0, ahead) + seconds
        return seconds + max(0.0, -ahead)

    def seconds(self, operation: Operation) -> float:
        """Seconds of a described operator on the device."""
        if not operation.flops:
            if operation.stands_for == ATTENTION or (operation.stands_for and self.program.low):
                return 0.0  # inside of what it stands for
            starting = self._launch if operation.starts else 0.0
            return starting + self._moving(operation.nbytes)
        if operation.product is not None:
            return self._of_product(operation, operation.product)
        dtype = self.program.dtype if operation.stands_for else operation.dtype
        if operation.attention:
            attained = self._device.attention(operation.keys, operation.head, operation.backward)
        else:
            attained = self._device.efficiency(dtype)
        rate = self._device.peak(dtype) * self._device.sustained * attained
        return self._launch + max(operation.flops / rate, self._moving(operation.nbytes))

    def _of_product(self, operation: Operation, product: Product) -> float:
        """Seconds of a product, in the precision of the job and with the casts of its operands."""
        (m, n, k, dtype), batch, low = product, operation.batch, self.program.low
        if operation.stands_for:
            dtype = self.program.dtype
        together = GROUP if operation.grouped else 1  # one kernel computes them all
        starting = self._launch if operation.starts else 0.0
        kept = low is None or dtype != self.program.dtype or bool(self.program.kept & {m, n, k})
        if low is None or kept:
            computing = self._product((m, n, k, dtype), together * batch) / together
            return starting + max(computing, self._moving(operation.nbytes))
        low_dtype, width = low
        seconds = starting + self._product((m, n, k, low_dtype), together * batch) / together
        if operation.name in WEIGHT_GRADIENTS:  # its operands were quantised before
            return seconds
        quantised = batch * m * k * (2 * PASSES + 2 * width)
        return seconds + starting + self._moving(quantised)

    def product_seconds(self, m: int, n: int, k: int, dtype: str, batch: int = 1) -> float:
        """Seconds of ``batch`` products ``[m, k] @ [k, n]`` in one operator."""
        return self._launch + self._product((m, n, k, dtype), batch)

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
        return max(self._computing(product, batch), moving)

    def _computing(self, product: Product, batch: int) -> float:
        m, n, k, dtype = product
        attained = self._device.sustained * self._device.efficiency(dtype)
        rate = self._device.peak(dtype) * attained / self._device.cores
        if (n % ALIGNED or k % ALIGNED) and min(m, n, k) > ALIGNED:
            rate /= self._device.misaligned
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


def clock_of(cluster: Cluster, args: argparse.Namespace) -> VirtualClock:
    """The clock of a job with final values ``args`` on a cluster."""
    return VirtualClock.of(DeviceRates(cluster, program_of(args)))


def _busiest(communication: Communication) -> Communication:
    """An exchange of experts by what its busiest rank sends or receives, which is the counted one.

    All ranks route equally, so it receives from each as much as it keeps.
    """
    size, own = len(communication.ranks), communication.payload - communication.wire
    most = max(communication.payload, own * size)
    return replace(communication, payload=most, wire=most * (size - 1) // size)
