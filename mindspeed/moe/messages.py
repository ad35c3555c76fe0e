"""Communications of a mixture-of-experts layer as bytes: what one call of one rank sends.

Bytes that a rank sends in one direction of one pass (N tokens of the rank, k experts of a token,
H hidden size, e bytes of an element, R ranks of the experts, t ranks of an expert's slices):

====================================  ==========================================
all-gather, reduce-scatter            N H e (R - 1)
all-to-all, even routing              N k H e (R - 1) / R
all-to-all, then gather over t        N k H e ((EP - 1) / EP + t - 1)
a row for each (token, rank)          N H e (R - 1) (1 - C(E - E/R, k) / C(E, k))
====================================  ==========================================

For an actual routing (:func:`mindspeed.moe.sizes.load_of`) all bytes are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed.moe.sizes import Load, Sizes

PROB_BYTES = 4  # probabilities are fp32
ID_BYTES = 2  # ids of experts are int16
PITCH = 16  # packed rows are as long as a multiple of it


@dataclass(frozen=True)
class Message:
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
    """

    name: str
    group: str
    op: str
    given: float
    wire: float
    between: float = 0.0
    busiest: float = 1.0


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


def packed_row(sizes: Sizes) -> int:
    """Bytes of a token that carries its probability."""
    return -(-(sizes.row + PROB_BYTES) // PITCH) * PITCH


def slice_gather(
    name: str, sizes: Sizes, load: Load, row_bytes: float, *, back: bool = False
) -> tuple[Message, Message]:
    """Rows gathered from the ranks with other slices, and the sum over them, its reverse.

    Where the ranks have different numbers of rows, both are exchanges, with the same bytes.
    """
    own, every = load.slices[load.index] * row_bytes, load.rows * row_bytes
    op = "all_gather" if len(set(load.slices)) == 1 else "all_to_all"
    gather = Message(name, "tp", op, own, (sizes.etp - 1) * own)
    scatter = Message(name, "tp", "all_to_all", every, every - own)
    return (scatter, gather) if back else (gather, scatter)
