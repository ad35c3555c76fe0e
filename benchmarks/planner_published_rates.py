"""Rates of the published runs: what their programs do and those of the planned job do not.

Megatron-Bridge's runs use Transformer Engine. Its matrix products of linear layers run in fp8 or
fp4 and quantise their operands, its grouped products are one kernel, and HybridEP sends a token
once to each rank and node that has one of its experts. The planned job is in bf16 with an
all-to-all of every copy; its recorded operators and messages are priced as follows.

* **Products** of linear layers run in the row's precision, with the peak and the efficiency of that
  dtype. Those of the router and of the output layer stay bf16, as in Megatron-Core. Attention stays
  bf16.
* **Quantisation** reads the bf16 activations (forward) or gradients (backward) and writes them
  twice, by rows and by columns; scaling by the maximum of the whole tensor (fp8, current scaling,
  and nvfp4) reads them once more before. MXFP8's blocks need no further pass. Weights are quantised
  once a step, which is left out.
* **All-to-all of experts**: with E experts on R ranks, k of which a token takes at random, a rank
  is taken with probability ``1 - C(E - E/R, k) / C(E, k)``; a node likewise. Copies that stay are
  free. Over the network a token goes once to each node, then over NVLink to the ranks.

Sources: Transformer Engine's documentation of fp8 current scaling, MXFP8 and NVFP4; DeepEP's and
HybridEP's description of their all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import comb
from typing import Any

from planner_recordings import Recording

from mindspeed.instruments.ledger import Communication
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.cluster.rates import DeviceRates, Operation

WEIGHT_GRADIENTS = (
    "mindspeed::matmul_add",
    "mindspeed::grouped_outer",
    "mindspeed::groupmatmul_add",
)


@dataclass(frozen=True)
class Precision:
    """A row's precision.

    Attributes:
        dtype: of products.
        width: bytes of an entry.
        passes: times that an operand is read to be quantised.
    """

    dtype: str
    width: float
    passes: int


PRECISIONS = {
    "bf16": None,
    "fp8": Precision("fp8", 1, 2),
    "mxfp8": Precision("fp8", 1, 1),
    "nvfp4": Precision("fp4", 0.5, 2),
}


@dataclass(frozen=True)
class Experts:
    """Of a model: number, and how many a token takes."""

    number: int
    taken: int

    def reached(self, domains: int) -> float:
        """Of so many equal domains of ranks, those that a token goes to, on average."""
        if domains <= 1:
            return 1.0
        elsewhere = self.number - self.number // domains
        return domains * (1 - comb(elsewhere, self.taken) / comb(self.number, self.taken))


class PublishedRates(DeviceRates):
    """Rates of a row.

    Args:
        cluster: the machine.
        precision: of :data:`PRECISIONS`.
        kept: sizes of products that stay bf16: of the vocabulary's shard, and number of experts.
        experts: of the model, if any.
    """

    def __init__(
        self, cluster: Cluster, precision: str, kept: Iterable[int], experts: Experts | None
    ) -> None:
        super().__init__(cluster)
        self._precision, self._kept, self._experts = PRECISIONS[precision], set(kept), experts

    def seconds(self, operation: Operation) -> float:
        """Of an operator in the row's precision."""
        low, product = self._precision, operation.product
        if low is None or product is None or product[3] != "bf16" or self._kept & {*product[:3]}:
            return super().seconds(operation)
        m, n, k, _ = product
        operands = operation.batch * (m * k + k * n)
        found = super().seconds(
            replace(
                operation,
                product=(m, n, k, low.dtype),
                dtype=low.dtype,
                nbytes=round(operation.nbytes - (2 - low.width) * operands),
            )
        )
        if operation.name in WEIGHT_GRADIENTS:  # its operands were quantised before
            return found
        entries = operation.batch * m * k
        return found + self.moving_seconds(entries * (2 * low.passes + 2 * low.width))

    def communication(self, communication: Communication) -> float:
        """Of a communication; experts' tokens go once to each rank and node."""
        experts = self._experts
        described = "EXPERT_MODEL_PARALLEL" in communication.description
        if experts is None or communication.op != "all_to_all" or not described:
            return super().communication(communication)
        ranks, cluster = communication.ranks, self._cluster
        once = communication.payload / experts.taken
        node, network = cluster.levels[0], cluster.levels[-1]
        nodes = len({node.domain(rank) for rank in ranks})
        reached = experts.reached(len(ranks)) * (1 - 1 / len(ranks))
        seconds = node.latency + once * reached / node.bytes_per_second
        if nodes > 1:
            sent = once * experts.reached(nodes) * (1 - 1 / nodes)
            seconds = max(seconds, network.latency + sent / network.bytes_per_second)
        return cluster.collective_us * 1e-6 + seconds


def with_grouped_products(recording: Recording) -> Recording:
    """The recording with equal products next to each other, those of experts, as one kernel."""
    events: list[int | None] = []
    things: list[Any] = list(recording.things)
    known: dict[tuple[int, int], int] = {}
    shift: dict[int, int] = {}  # communications' events move
    index, waits = 0, []
    while index < len(recording.events):
        number = recording.events[index]
        thing = None if number is None else recording.things[number]
        count = 1
        if isinstance(thing, Operation) and thing.product is not None:
            while recording.events[index + count : index + count + 1] == [number]:
                count += 1
            if count > 1:
                assert number is not None
                key = number, count
                if key not in known:
                    known[key] = len(things)
                    batch, flops, nbytes = thing.batch, thing.flops, thing.nbytes
                    things.append(
                        replace(
                            thing, batch=count * batch, flops=count * flops, nbytes=count * nbytes
                        )
                    )
                number = known[key]
        elif isinstance(thing, tuple):
            shift[index] = len(events)
        elif isinstance(thing, int):
            waits.append(len(events))
        events.append(number)
        index += count
    for position in waits:
        number = events[position]
        assert number is not None
        things.append(shift[recording.things[number]])  # type: ignore[index]
        events[position] = len(things) - 1
    return Recording(recording.observed, events, things)
