"""Sizes of a mixture-of-experts layer, and the rows that one rank sends and receives.

sizes = Sizes(tokens=4096, hidden=7168, experts=256, topk=8, ffn=2048, ep=8)
load = uniform(sizes)  # the expectation of even routing
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb


def chance(experts: int, topk: int, owners: int) -> float:
    """Probability that a part, 1 / ``owners``, of the experts has one of a token's ``topk``."""
    return 1 - comb(experts - experts // owners, topk) / comb(experts, topk)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one layer, as one rank sees them.

    Attributes:
        tokens: of this rank before the dispatch: sequence x batch / (TP x CP).
        experts: of the layer, on all ranks.
        ffn: width of an expert, of all its slices.
        ep: ranks with different experts.
        etp: ranks with slices of the same experts.
        itemsize: bytes of an element of a token.
        shared: width of the shared experts; 0 without. Their tensor-parallel slices compute the
            tokens of all ranks that hold one, which is as much.
        gated: whether the first linear layer is twice as wide.
        node: ranks of a node; None: all ranks of the experts are in one.
    """

    tokens: int
    hidden: int
    experts: int
    topk: int
    ffn: int
    ep: int = 1
    etp: int = 1
    itemsize: int = 2
    shared: int = 0
    gated: bool = True
    node: int | None = None

    @property
    def ranks(self) -> int:
        """All ranks that share the experts."""
        return self.ep * self.etp

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ep

    @property
    def row(self) -> int:
        """Bytes of a token."""
        return self.hidden * self.itemsize

    @property
    def fc1(self) -> float:
        """Width of the first linear layer on this rank."""
        return self.ffn * (2 if self.gated else 1) / self.etp

    def node_of(self, rank: int) -> int:
        """The node of a rank of the expert group; slices of an expert are in one node."""
        return 0 if self.node is None else rank * self.etp // self.node


@dataclass(frozen=True)
class Load:
    """The rows of one rank.

    Attributes:
        rank: its index in the expert parallel group.
        sent: copies of its tokens for every rank of that group.
        received: copies that it gets from each.
        distinct_sent: its tokens that have an expert on each rank.
        distinct_received: the same of what it gets.
        slices: copies that the ranks with the other slices of its experts get, and it itself.
        index: its own among them.
    """

    rank: int
    sent: tuple[float, ...]
    received: tuple[float, ...]
    distinct_sent: tuple[float, ...]
    distinct_received: tuple[float, ...]
    slices: tuple[float, ...]
    index: int = 0

    @property
    def rows(self) -> float:
        """Rows that the experts of this rank compute."""
        return sum(self.slices)

    def part(self, chunks: int) -> Load:
        """One of several equal chunks."""
        return self.scaled(1 / chunks)

    def in_blocks(self, rows: int) -> Load:
        """This load, whose rows travel in blocks of ``rows`` rows to every rank."""
        blocks = (float(rows),) * len(self.sent)
        return replace(self, sent=blocks, received=blocks)

    def scaled(self, factor: float) -> Load:
        """This load with ``factor`` times the rows."""

        def share(rows: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(number * factor for number in rows)

        return Load(
            self.rank,
            share(self.sent),
            share(self.received),
            share(self.distinct_sent),
            share(self.distinct_received),
            share(self.slices),
            self.index,
        )


def uniform(sizes: Sizes) -> Load:
    """The expectation of even routing."""
    copies = (sizes.tokens * sizes.topk / sizes.ep,) * sizes.ep
    distinct = (sizes.tokens * chance(sizes.experts, sizes.topk, sizes.ep),) * sizes.ep
    return Load(0, copies, copies, distinct, distinct, (sum(copies),) * sizes.etp)


def padded(sizes: Sizes, capacity: int) -> Load:
    """Every rank sends ``capacity`` rows to each expert, whatever its tokens want."""
    rows = (float(sizes.local * capacity),) * sizes.ep
    return Load(0, rows, rows, rows, rows, (sum(rows),) * sizes.etp)
