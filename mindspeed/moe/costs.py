"""What the stages of a mixture-of-experts layer send, compute and keep, as formulas of its sizes.

    sizes = Sizes(tokens=4096, hidden=7168, experts=256, topk=8, ffn=2048, ep=8)
    costs = all_to_all(sizes, uniform(sizes))
    costs["dispatch"].messages[0].wire        # bytes of rows that this rank sends

Bytes that a rank sends in one direction of one pass (N tokens of the rank, k experts of a token,
H hidden size, e bytes of an element, R ranks of the experts, t ranks of an expert's slices):

====================================  ==========================================
all-gather, reduce-scatter            N H e (R - 1)
all-to-all, even routing              N k H e (R - 1) / R
all-to-all, then gather over t        N k H e ((EP - 1) / EP + t - 1)
a row for each (token, rank)          N H e (R - 1) (1 - C(E - E/R, k) / C(E, k))
====================================  ==========================================

For the :class:`mindspeed.moe.sizes.Load` of an actual routing all bytes are exact.
:mod:`mindspeed.moe.simulate` runs programs over these costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed.moe.save.policy import SavePolicy
from mindspeed.moe.sizes import Load, Sizes
from mindspeed.moe.wire import quantized_bytes

PROB_BYTES = 4  # probabilities are fp32
ID_BYTES = 2  # ids of experts are int16
PITCH = 16  # packed rows are as long as a multiple of it


@dataclass(frozen=True)
class PassMessage:
    """One communication of one pass.

    Attributes:
        name: as the log calls it: stage and tensor.
        group: "ep", "tp" (slices of experts), "tp_ep": groups have links of their own.
        op: as :mod:`mindspeed.instruments.ledger` calls it.
        given: bytes of the tensor that is sent.
        wire: bytes that this rank sends.
        between: those of them that leave the node.
        busiest: bytes that the busiest rank sends or gets, for which all wait, in multiples of
            ``wire``.
        copied: bytes that this rank reads and writes before and after, on the message's stream.
    """

    name: str
    group: str
    op: str
    given: float
    wire: float
    between: float = 0.0
    busiest: float = 1.0
    copied: float = 0.0


def exchange(
    name: str,
    sizes: Sizes,
    load: Load,
    row_bytes: float,
    *,
    distinct: bool = False,
    back: bool = False,
) -> tuple[PassMessage, PassMessage]:
    """An all-to-all and its reverse.

    Args:
        load: who gets how many rows.
        row_bytes: of one row.
        distinct: one row for each (token, rank), not for each copy.
        back: from the experts to the tokens.
    """
    sent = load.distinct_sent if distinct else load.sent
    received = load.distinct_received if distinct else load.received

    def message(rows: tuple[float, ...]) -> PassMessage:
        own = sizes.node_of(load.rank)
        away = sum(n for peer, n in enumerate(rows) if sizes.node_of(peer) != own)
        other = sum(n for peer, n in enumerate(rows) if peer != load.rank)
        return PassMessage(
            name, "ep", "all_to_all", sum(rows) * row_bytes, other * row_bytes, away * row_bytes
        )

    to, fro = message(sent), message(received)
    return (fro, to) if back else (to, fro)


def gathering(
    name: str, sizes: Sizes, group: str, ranks: int, nbytes: float, *, back: bool = False
) -> tuple[PassMessage, PassMessage]:
    """An all-gather of ``nbytes`` of every rank and its reverse, a reduce-scatter.

    Args:
        nbytes: of this rank's part.
        back: the reduce-scatter comes first.
    """
    nodes = 1 if sizes.node is None or group == "tp" else max(1, -(-ranks // sizes.node))
    sent = (ranks - 1) * nbytes
    between = sent * (ranks - ranks / nodes) / (ranks - 1) if ranks > 1 else 0.0
    gather = PassMessage(name, group, "all_gather", nbytes, sent, between)
    scatter = PassMessage(name, group, "reduce_scatter", ranks * nbytes, sent, between)
    return (scatter, gather) if back else (gather, scatter)


def packed_row(sizes: Sizes) -> int:
    """Bytes of a token that carries its probability."""
    return -(-(sizes.row + PROB_BYTES) // PITCH) * PITCH


def slice_gather(
    name: str, sizes: Sizes, load: Load, row_bytes: float, *, back: bool = False
) -> tuple[PassMessage, PassMessage]:
    """Rows gathered from the ranks with other slices, and the sum over them, its reverse.

    Where the ranks have different numbers of rows, both are exchanges, with the same bytes.
    """
    own, every = load.slices[load.index] * row_bytes, load.rows * row_bytes
    op = "all_gather" if len(set(load.slices)) == 1 else "all_to_all"
    gather = PassMessage(name, "tp", op, own, (sizes.etp - 1) * own)
    scatter = PassMessage(name, "tp", "all_to_all", every, every - own)
    return (scatter, gather) if back else (gather, scatter)


COUNT_BYTES = 8  # counts are int64
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Computation:
    """FLOPs and bytes of a computation.

    Attributes:
        flops: of matrix products.
        bytes: that other operators read and write.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Computation) -> Computation:
        return Computation(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> Computation:
        return Computation(self.flops * factor, self.bytes * factor)


@dataclass(frozen=True)
class StageCosts:
    """One stage in both passes.

    Attributes:
        messages: what is started in forward, in this order.
        reverses: what is started in backward, in this order.
        silent: names of passes in which the log has no event of it.
        logged: its name in the log, where that is another.
    """

    forward: Computation = Computation()
    backward: Computation = Computation()
    messages: tuple[PassMessage, ...] = ()
    reverses: tuple[PassMessage, ...] = ()
    silent: tuple[str, ...] = ()
    logged: str = ""


Costs = Mapping[str, StageCosts]
"""Costs by name of the stage; one that is missing does nothing on these ranks."""


def counting(sizes: Sizes) -> StageCosts:
    """Every rank learns the counts of every rank; there is no gradient."""
    nbytes = COUNT_BYTES * sizes.experts
    return StageCosts(messages=gathering("count.counts", sizes, "tp_ep", sizes.ranks, nbytes)[:1])


def routing(sizes: Sizes) -> StageCosts:
    """The product with the router's weight."""
    work = Computation(2.0 * sizes.tokens * sizes.hidden * sizes.experts)
    return StageCosts(work, work * 2)


def shared_costs(sizes: Sizes) -> dict[str, StageCosts]:
    """Shared experts, whole and in halves; {} without them."""
    if not sizes.shared:
        return {}
    unit = 2.0 * sizes.tokens * sizes.hidden * sizes.shared
    first, second = Computation(unit * (2 if sizes.gated else 1)), Computation(unit)
    return {
        "shared": StageCosts(first + second, (first + second) * 2),
        "shared_fc1": StageCosts(first, first * 2),
        "shared_fc2": StageCosts(second, second * 2),
    }


def expert_work(sizes: Sizes, rows: float) -> tuple[Computation, Computation]:
    """Forward products of the first and second linear layer of this rank's experts."""
    width = sizes.ffn / sizes.etp
    return (
        Computation(2.0 * rows * sizes.hidden * sizes.fc1),
        Computation(2.0 * rows * sizes.hidden * width),
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
    work = Computation(bytes=2.0 * rows * sizes.row)
    return StageCosts(work, work)


def all_to_all(
    sizes: Sizes, load: Load, *, anchored: bool = False, packed: bool = True
) -> dict[str, StageCosts]:
    """The costs of the all-to-all dispatcher's stages.

    Args:
        load: rows of this rank.
        anchored: weight gradients of experts are computed where the anchor is.
        packed: probabilities travel in the rows.
    """
    packed = packed and sizes.ep > 1
    costs = {
        "route": routing(sizes),
        "permute": moving(sum(load.sent), sizes),
        "unpermute": moving(sum(load.sent), sizes),
        **expert_costs(sizes, load.rows, anchored=anchored),
        **shared_costs(sizes),
    }
    if sizes.ranks > 1:
        costs["count"] = counting(sizes)
    carried = [("rows", packed_row(sizes))]
    if not packed:
        carried = [("rows", sizes.row), ("row_probs", PROB_BYTES)]
    if sizes.ep > 1:
        costs["dispatch"] = both_ways(
            [exchange(f"dispatch.{name}", sizes, load, row) for name, row in carried]
        )
        costs["combine"] = both_ways([exchange("combine.rows", sizes, load, sizes.row, back=True)])
    if sizes.etp > 1:
        costs["gather"] = both_ways(
            [slice_gather(f"gather.{name}", sizes, load, row) for name, row in carried]
        )
        costs["scatter"] = both_ways(
            [slice_gather("scatter.rows", sizes, load, sizes.row, back=True)]
        )
    if sizes.local > 1:
        costs["disarrange"] = moving(load.rows, sizes)
    if sizes.local > 1 or packed:
        costs["arrange"] = moving(load.rows, sizes)
    return costs


def in_eight_bits(costs: Mapping[str, StageCosts], sizes: Sizes, fp8: str) -> dict[str, StageCosts]:
    """The costs of the all-to-all dispatcher's stages with rows in eight bits.

    Args:
        fp8: "tokens", or "both": the gradients of results, too.
    """
    saved = sizes.row - quantized_bytes(sizes.hidden)

    def shrunk(message: PassMessage, row: int) -> PassMessage:
        part = 1 - saved / row
        return replace(
            message,
            given=message.given * part,
            wire=message.wire * part,
            between=message.between * part,
        )

    found = dict(costs)
    for name in {"dispatch", "gather"} & costs.keys():
        there = [shrunk(one, packed_row(sizes)) for one in costs[name].messages]
        found[name] = replace(costs[name], messages=tuple(there))
    for name in {"combine", "scatter"} & costs.keys() if fp8 == "both" else ():
        back = [shrunk(one, sizes.row) for one in costs[name].reverses]
        found[name] = replace(costs[name], reverses=tuple(back))
    return found


def all_gather(
    sizes: Sizes, load: Load, *, anchored: bool = False, packed: bool = True
) -> dict[str, StageCosts]:
    """The costs of the all-gather dispatcher's stages.

    Args:
        load: rows of this rank.
        anchored: weight gradients of experts are computed where the anchor is.
        packed: ids and weights of the chosen experts travel, not maps and weights of all.
    """
    n, ranks = sizes.tokens, sizes.ranks
    routed = n * (sizes.topk if packed else sizes.experts)
    costs = {
        "route": routing(sizes),
        "compact": StageCosts(),
        "locate": StageCosts(silent=(BACKWARD,)),  # ids have no gradient
        "arrange": moving(load.rows, sizes),
        "disarrange": moving(load.rows, sizes),
        "finish": StageCosts(),
        **expert_costs(sizes, load.rows, anchored=anchored),
        **shared_costs(sizes),
    }
    if ranks > 1:
        ids = gathering("ids.ids", sizes, "tp_ep", ranks, routed * (ID_BYTES if packed else 1))
        weights = gathering("weights.weights", sizes, "tp_ep", ranks, routed * PROB_BYTES)
        tokens = gathering("tokens.rows", sizes, "tp_ep", ranks, n * sizes.row)
        # Sums leave in the dtype of the probabilities.
        sums = gathering(
            "combine.rows", sizes, "tp_ep", ranks, n * sizes.hidden * PROB_BYTES, back=True
        )
        costs["ids"] = StageCosts(messages=ids[:1])
        costs |= {"weights": both_ways([weights]), "tokens": both_ways([tokens])}
        costs["combine"] = both_ways([sums])
    return costs


def both_ways(pairs: Sequence[tuple[PassMessage, PassMessage]]) -> StageCosts:
    """Messages that start together; their reverses start in the opposite order."""
    return StageCosts(
        messages=tuple(message for message, _ in pairs),
        reverses=tuple(reverse for _, reverse in reversed(pairs)),
    )


def saved_bytes(sizes: Sizes, rows: float, policy: SavePolicy) -> float:
    """Bytes that live until backward of the rows of routed and shared experts.

    A row has its input, the output of the first linear layer and the activation; the input of
    shared experts is that of the layer.
    """
    kept = rows * policy.elements(sizes.hidden, sizes.ffn // sizes.etp, gated=sizes.gated)
    factor = (2 if sizes.gated else 1) + policy.act if policy.shared else 0
    return (kept + factor * sizes.tokens * sizes.shared) * sizes.itemsize
