"""What the stages of a mixture-of-experts layer send, compute and keep, as formulas of its sizes.

    sizes = Sizes(tokens=4096, hidden=7168, experts=256, topk=8, ffn=2048, ep=8)
    costs = all_to_all(sizes, uniform(sizes))
    costs["dispatch"].messages[0].wire        # bytes of rows that this rank sends

Bytes that one rank sends in one direction of one pass (N tokens of the rank, k experts of a token,
H hidden size, e bytes of an element, R ranks of the experts, t ranks of an expert's slices):

====================================  ==========================================
all-gather, reduce-scatter            N H e (R - 1)
all-to-all, even routing              N k H e (R - 1) / R
all-to-all, then gather over t        N k H e ((EP - 1) / EP + t - 1)
a row for each (token, rank)          N H e (R - 1) (1 - C(E - E/R, k) / C(E, k))
====================================  ==========================================

Even routing is an expectation; :func:`load_of` takes the experts of every token instead, and
all figures are then exact. :mod:`mindspeed.moe.timeline` executes a program over these costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

Policy = Literal["all", "act", "level0", "level1"]
COUNT_BYTES = 8  # counts are int64
PROB_BYTES = 4  # probabilities are fp32
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Sizes:
    """Sizes of one layer, as one rank sees them.

    Attributes:
        tokens: of this rank before the dispatch: sequence x batch / (TP x CP).
        hidden: size of a token.
        experts: of the layer, on all ranks.
        topk: experts of a token.
        ffn: width of an expert, of all its slices.
        ep: ranks with different experts.
        etp: ranks with slices of the same experts.
        itemsize: bytes of an element of a token.
        shared: width of the shared experts, on this rank; 0 without.
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
        rows: of the experts of this rank, those of the slices' other ranks included.
    """

    rank: int
    sent: tuple[float, ...]
    received: tuple[float, ...]
    distinct_sent: tuple[float, ...]
    distinct_received: tuple[float, ...]
    rows: float

    def part(self, chunks: int) -> Load:
        """One of several equal chunks."""

        def share(rows: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(number / chunks for number in rows)

        return Load(
            self.rank,
            share(self.sent),
            share(self.received),
            share(self.distinct_sent),
            share(self.distinct_received),
            self.rows / chunks,
        )


def uniform(sizes: Sizes) -> Load:
    """The expectation of even routing."""
    copies = (sizes.tokens * sizes.topk / sizes.ep,) * sizes.ep
    distinct = (sizes.tokens * share_with_an_expert(sizes, sizes.ep),) * sizes.ep
    return Load(0, copies, copies, distinct, distinct, sizes.etp * sum(copies))


def share_with_an_expert(sizes: Sizes, parts: int) -> float:
    """Expected share of the tokens that have an expert in one of ``parts`` equal parts of them."""
    outside = sizes.experts - sizes.experts // parts
    return 1.0 - comb(outside, sizes.topk) / comb(sizes.experts, sizes.topk)


Choices = Sequence[Sequence[Sequence[int]]]
"""Experts of every token of every rank: ``choices[rank][token]``, ranks with slices fastest."""


def load_of(sizes: Sizes, choices: Choices, rank: int) -> Load:
    """The rows of one rank for an actual routing; ``rank`` is its index in ``choices``."""
    own, slice_ = divmod(rank, sizes.etp)

    def rows(source: int, target: int, distinct: bool) -> float:
        first = target * sizes.local
        found = [sum(first <= e < first + sizes.local for e in token) for token in choices[source]]
        return sum(map(bool, found)) if distinct else sum(found)

    def both(distinct: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
        peers = range(sizes.ep)
        sent = tuple(rows(rank, peer, distinct) for peer in peers)
        received = tuple(rows(peer * sizes.etp + slice_, own, distinct) for peer in peers)
        return sent, received

    every = sum(rows(source, own, False) for source in range(sizes.ranks))
    return Load(own, *both(False), *both(True), every)


@dataclass(frozen=True)
class Message:
    """One communication of one pass.

    Attributes:
        name: as the log calls it: stage and tensor.
        group: "ep", "tp" (slices of experts), "tp_ep": groups have links of their own.
        op: as :mod:`mindspeed.testing.ledger` calls it.
        payload: bytes that the call is given.
        wire: bytes that this rank sends.
        between: those of them that leave the node.
    """

    name: str
    group: str
    op: str
    payload: float
    wire: float
    between: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a computation takes.

    Attributes:
        flops: of matrix products.
        bytes: that other operators read and write.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> Work:
        return Work(self.flops * factor, self.bytes * factor)


@dataclass(frozen=True)
class StageCosts:
    """One stage in both passes.

    Attributes:
        forward: what is computed.
        backward: what is computed.
        messages: what is started in forward, in this order.
        reverses: what is started in backward, in this order.
        silent: names of passes in which the log has no event of it.
        logged: its name in the log, where that is another.
    """

    forward: Work = Work()
    backward: Work = Work()
    messages: tuple[Message, ...] = ()
    reverses: tuple[Message, ...] = ()
    silent: tuple[str, ...] = ()
    logged: str = ""


Costs = Mapping[str, StageCosts]
"""By name of the stage; a stage that is missing does nothing on these ranks."""


def exchange(
    name: str,
    sizes: Sizes,
    load: Load,
    row_bytes: float,
    *,
    distinct: bool = False,
    back: bool = False,
) -> tuple[Message, Message]:
    """An all-to-all and its reverse.

    Args:
        name: of the message.
        sizes: of the layer.
        load: who gets how many rows.
        row_bytes: of one row.
        distinct: one row for each (token, rank), not for each copy.
        back: from the experts to the tokens.
    """
    sent = load.distinct_sent if distinct else load.sent
    received = load.distinct_received if distinct else load.received

    def message(rows: tuple[float, ...]) -> Message:
        own = sizes.node_of(load.rank)
        away = sum(n for peer, n in enumerate(rows) if sizes.node_of(peer) != own)
        other = sum(n for peer, n in enumerate(rows) if peer != load.rank)
        return Message(
            name, "ep", "all_to_all", sum(rows) * row_bytes, other * row_bytes, away * row_bytes
        )

    to, fro = message(sent), message(received)
    return (fro, to) if back else (to, fro)


def gathering(
    name: str, sizes: Sizes, group: str, ranks: int, nbytes: float, *, back: bool = False
) -> tuple[Message, Message]:
    """An all-gather of ``nbytes`` of every rank and its reverse, a reduce-scatter.

    Args:
        name: of the message.
        sizes: of the layer.
        group: its name.
        ranks: of the group.
        nbytes: of this rank's part.
        back: the reduce-scatter comes first.
    """
    nodes = 1 if sizes.node is None or group == "tp" else max(1, -(-ranks // sizes.node))
    sent = (ranks - 1) * nbytes
    between = sent * (ranks - ranks / nodes) / (ranks - 1) if ranks > 1 else 0.0
    gather = Message(name, group, "all_gather", nbytes, sent, between)
    scatter = Message(name, group, "reduce_scatter", ranks * nbytes, sent, between)
    return (scatter, gather) if back else (gather, scatter)


def counting(sizes: Sizes) -> StageCosts | None:
    """Every rank learns the counts of every rank; there is no gradient."""
    if sizes.ranks == 1:
        return None
    nbytes = COUNT_BYTES * sizes.experts
    return StageCosts(messages=gathering("count.counts", sizes, "tp_ep", sizes.ranks, nbytes)[:1])


def routing(sizes: Sizes) -> StageCosts:
    """The product with the router's weight."""
    work = Work(2.0 * sizes.tokens * sizes.hidden * sizes.experts)
    return StageCosts(work, work * 2)


def shared_costs(sizes: Sizes) -> dict[str, StageCosts]:
    """Shared experts, whole and in halves; {} without them."""
    if not sizes.shared:
        return {}
    unit = 2.0 * sizes.tokens * sizes.hidden * sizes.shared
    first, second = Work(unit * (2 if sizes.gated else 1)), Work(unit)
    return {
        "shared": StageCosts(first + second, (first + second) * 2),
        "shared_fc1": StageCosts(first, first * 2),
        "shared_fc2": StageCosts(second, second * 2),
    }


def expert_work(sizes: Sizes, rows: float) -> tuple[Work, Work]:
    """Forward products of the first and second linear layer of this rank's experts."""
    width = sizes.ffn / sizes.etp
    return (
        Work(2.0 * rows * sizes.hidden * sizes.fc1),
        Work(2.0 * rows * sizes.hidden * width),
    )


def expert_costs(sizes: Sizes, rows: float, *, anchored: bool) -> dict[str, StageCosts]:
    """Experts; with an anchor their weight gradients are computed there."""
    first, second = expert_work(sizes, rows)
    forward = first + second
    if not anchored:
        return {"experts": StageCosts(forward, forward * 2)}
    return {
        "experts": StageCosts(forward, forward),
        # It computes nothing in forward, so the log has no event of it there.
        "anchor": StageCosts(backward=forward, silent=(FORWARD,), logged="weight_gradients"),
    }


def moving(rows: float, sizes: Sizes) -> StageCosts:
    """Rows copied once in each pass: read and written."""
    work = Work(bytes=2.0 * rows * sizes.row)
    return StageCosts(work, work)


def all_to_all(
    sizes: Sizes, load: Load, *, anchored: bool = False, packed: bool = False
) -> dict[str, StageCosts]:
    """The costs of the all-to-all dispatcher's stages.

    Args:
        sizes: of the layer.
        load: rows of this rank.
        anchored: weight gradients of experts are computed where the anchor is.
        packed: probabilities travel in the rows.
    """
    costs = {
        "route": routing(sizes),
        "permute": moving(sum(load.sent), sizes),
        "unpermute": moving(sum(load.sent), sizes),
        **expert_costs(sizes, load.rows, anchored=anchored),
        **shared_costs(sizes),
    }
    if (counts := counting(sizes)) is not None:
        costs["count"] = counts
    if sizes.ep > 1:
        row = sizes.row + (PROB_BYTES if packed else 0)
        there = [exchange("dispatch.rows", sizes, load, row)]
        if not packed:
            there.append(exchange("dispatch.row_probs", sizes, load, PROB_BYTES))
        costs["dispatch"] = _both_ways(there)
        costs["combine"] = _both_ways([exchange("combine.rows", sizes, load, sizes.row, back=True)])
    if sizes.local > 1:
        costs["arrange"] = costs["disarrange"] = moving(sum(load.received), sizes)
    return costs


def _both_ways(pairs: Sequence[tuple[Message, Message]]) -> StageCosts:
    """What is started together; its reverses start in the opposite order."""
    return StageCosts(
        messages=tuple(message for message, _ in pairs),
        reverses=tuple(reverse for _, reverse in reversed(pairs)),
    )


def saved_bytes(sizes: Sizes, rows: float, policy: Policy) -> float:
    """Bytes of the experts' rows that live until backward: input, first layer, activation."""
    width = sizes.ffn / sizes.etp
    kept = {
        "all": sizes.hidden + sizes.fc1 + width,
        "act": sizes.hidden + sizes.fc1,
        "level0": sizes.fc1,
        "level1": 0.0,
    }
    return rows * kept[policy] * sizes.itemsize
