"""Costs of layers computed in parts, of exchanges that send a token once, and of bounded ones.

hot       experts that every rank computes for its own tokens: :mod:`mindspeed.moe.hot_experts`
chunks    of the sequence, attention included: :mod:`mindspeed.moe.ampipe`
groups    of local experts, under expert tensor parallelism: :mod:`mindspeed.moe.expert_groups`
pieces    local expert x slice of the tokens: :mod:`mindspeed.moe.pipe_experts`
dedup     once to each rank: :mod:`mindspeed.moe.dispatch.deduplicated`
two_level once to each node, there once to each rank: :mod:`mindspeed.moe.dispatch.hierarchical`

The sizes of bounded exchanges stay on the device:

                    sent                            besides
blocks              the bound, to every rank        stages in the order of a buffer move all of it
symmetric-memory    the rows and no others          they are copied into symmetric memory and out
hybridep            a token once to each rank       one kernel permutes and sends: nothing hides it

:mod:`mindspeed.moe.row_exchange` and :mod:`mindspeed.moe.dispatch.megatron_hybrid_ep` run them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed.moe.ampipe.rows import blocks
from mindspeed.moe.costs import (
    BACKWARD,
    COUNT_BYTES,
    PROB_BYTES,
    Computation,
    PassMessage,
    StageCosts,
    all_to_all,
    both_ways,
    exchange,
    expert_costs,
    expert_work,
    gathering,
    moving,
    packed_row,
    routing,
    shared_costs,
    slice_gather,
)
from mindspeed.moe.dispatch.level import metadata_bytes
from mindspeed.moe.expert_groups import GROUPS
from mindspeed.moe.pipe_experts import PIECES
from mindspeed.moe.simulate import Inner
from mindspeed.moe.sizes import Load, Sizes, chance

Parts = dict[str, Inner]


def groups(
    sizes: Sizes, load: Load, parts: Sequence[Load], *, anchored: bool
) -> tuple[dict[str, StageCosts], Parts]:
    """A layer with the stage ``groups`` in place of the steps from gather to scatter.

    Args:
        load: rows of this rank.
        parts: the same for each group of local experts.
        anchored: weight gradients of experts are computed where the anchor is.
    """
    costs = all_to_all(sizes, load, anchored=anchored)
    group = replace(sizes, experts=sizes.experts // len(parts))
    inner = [all_to_all(group, part, anchored=anchored) for part in parts]
    return {**costs, "groups": StageCosts()}, {"groups": Inner(GROUPS, inner)}


def pieces(
    sizes: Sizes, load: Load, parts: Sequence[Load], slices: int
) -> tuple[dict[str, StageCosts], Parts]:
    """A layer with the stage ``pieces`` in place of the steps from dispatch to combine.

    Args:
        load: rows of this rank.
        parts: the same for each local expert of each slice of the tokens.
    """
    costs = all_to_all(sizes, load, anchored=True)
    one = replace(sizes, experts=sizes.ep)
    inner = []
    for part in parts:
        found = all_to_all(one, part, anchored=True)
        arranged = found.pop("arrange", StageCosts())
        experts = found["experts"]
        found["experts"] = replace(
            experts,
            forward=experts.forward + arranged.forward,
            backward=experts.backward + arranged.backward,
        )
        inner.append({**found, "anchor": costs["anchor"], **shared_costs(sizes)})
    if sizes.ranks > 1:
        nbytes = COUNT_BYTES * sizes.experts * slices
        counts = gathering("count.counts", sizes, "tp_ep", sizes.ranks, nbytes)
        costs["count"] = StageCosts(messages=counts[:1])
    # Each slice has tensors of its own, which the log does not see in backward.
    costs["permute"] = replace(costs["permute"], silent=(BACKWARD,))
    costs["pieces"] = StageCosts(silent=(BACKWARD,))
    return costs, {"pieces": Inner(PIECES, inner)}


def chunks(
    sizes: Sizes, parts: Sequence[Load], attention: Sequence[StageCosts]
) -> list[dict[str, StageCosts]]:
    """The stages of each chunk of the sequence; those that run once are with the first.

    Args:
        parts: rows of this rank for each chunk.
        attention: of each chunk.
    """
    one = replace(sizes, tokens=sizes.tokens // len(parts))
    found = [all_to_all(one, part, anchored=True) for part in parts]
    rows = sum(part.rows for part in parts)
    found[0] |= {
        "anchor": expert_costs(sizes, rows, anchored=True)["anchor"],
        **shared_costs(sizes),
    }
    for stages, attn in zip(found, attention, strict=True):
        stages["attn"] = attn
    return found


def hot(
    sizes: Sizes,
    load: Load,
    own_rows: float,
    weights: Sequence[Sequence[float]],
    *,
    anchored: bool,
    busiest: float = 1.0,
) -> dict[str, StageCosts]:
    """A layer with hot experts; experts must be whole.

    Args:
        load: rows of this rank that travel.
        own_rows: of its own tokens for hot experts.
        weights: for each message the hot experts of each rank.
        anchored: weight gradients of the other experts are computed where the anchor is.
        busiest: of the messages of weights.
    """
    costs = all_to_all(sizes, load, anchored=anchored)
    first, second = expert_work(sizes, own_rows)
    products, moved = first + second, moving(own_rows, sizes).forward * 2
    costs["hot"] = StageCosts(products + moved, products * 2 + moved)
    matrices = expert_bytes(sizes)
    copied = Computation(bytes=2 * matrices * sum(message[load.rank] for message in weights))
    costs["choose"] = StageCosts(copied, copied)
    costs["weights"] = both_ways(
        [
            _weights(
                f"weights.hot_weights{i}",
                sizes,
                load.rank,
                [number * matrices for number in message],
                busiest,
            )
            for i, message in enumerate(weights)
        ]
    )
    return costs


def expert_bytes(sizes: Sizes) -> float:
    """Bytes of one expert's matrices on a rank that has a slice of it."""
    return sizes.hidden * (sizes.fc1 + sizes.ffn / sizes.etp) * sizes.itemsize


def _weights(
    name: str, sizes: Sizes, rank: int, owned: Sequence[float], busiest: float
) -> tuple[PassMessage, PassMessage]:
    """Matrices from their owners to all, and the sums of their gradients back."""
    own, ranks, every = owned[rank], len(owned), sum(owned)
    nodes = 1 if sizes.node is None else -(-ranks // sizes.node)
    away = (ranks - ranks / nodes) / (ranks - 1)  # part of the other ranks
    sent, back = (ranks - 1) * own, every - own
    even = len(set(owned)) == 1
    op = "all_gather" if even else "all_to_all"
    return (
        PassMessage(name, "ep", op, own, sent, sent * away, busiest),
        PassMessage(name, "ep", "all_to_all", every, back, back * away, busiest),
    )


def dedup(sizes: Sizes, load: Load, *, anchored: bool) -> dict[str, StageCosts]:
    """The costs of the stages of the deduplicated exchange; experts must be whole."""
    places = metadata_bytes(min(sizes.topk, sizes.local))
    costs = _once(sizes, load, sum(load.distinct_sent), sizes.ep, anchored)
    costs["dispatch"] = both_ways(
        [
            exchange("dispatch.metadata", sizes, load, places, distinct=True),
            exchange("dispatch.rows", sizes, load, sizes.row, distinct=True),
        ]
    )
    combine = exchange("combine.rows", sizes, load, sizes.row, distinct=True, back=True)
    costs["combine"] = both_ways([combine])
    return costs


def two_level(sizes: Sizes, load: Load, *, anchored: bool) -> dict[str, StageCosts]:
    """The costs of the stages of the hierarchical exchange, for even routing."""
    assert sizes.node is not None
    nodes = sizes.ep // sizes.node
    to_node = sizes.tokens * chance(sizes.experts, sizes.topk, nodes)
    to_rank = nodes * sizes.tokens * chance(sizes.experts, sizes.topk, sizes.ep)
    width = min(sizes.topk, sizes.experts // nodes)
    places = metadata_bytes(width), metadata_bytes(min(width, sizes.local))
    costs = _once(sizes, load, to_node * nodes, sizes.ep + nodes, anchored)

    def outer(name: str, row: float) -> tuple[PassMessage, PassMessage]:
        sent = (nodes - 1) * to_node * row
        found = PassMessage(name, "between", "all_to_all", nodes * to_node * row, sent, sent)
        return found, found

    def inner(name: str, row: float) -> tuple[PassMessage, PassMessage]:
        assert sizes.node is not None
        given = sizes.node * to_rank * row
        found = PassMessage(name, "within", "all_to_all", given, (sizes.node - 1) * to_rank * row)
        return found, found

    costs["dispatch"] = both_ways(
        [outer("dispatch.metadata", places[0]), outer("dispatch.rows", sizes.row)]
    )
    costs["dispatch_node"] = both_ways(
        [inner("dispatch_node.metadata", places[1]), inner("dispatch_node.rows", sizes.row)]
    )
    costs["combine_node"] = both_ways([inner("combine_node.rows", sizes.row)])
    costs["combine"] = both_ways([outer("combine.rows", sizes.row)])
    costs["relay"] = costs["merge"] = moving(sizes.node * to_rank, sizes)
    return costs


def _once(
    sizes: Sizes, load: Load, sent: float, destinations: int, anchored: bool
) -> dict[str, StageCosts]:
    """Stages that both exchanges share; counts are of experts, of destinations, and of errors."""
    nbytes = COUNT_BYTES * (sizes.experts + destinations + 1)
    counts = gathering("count.counts", sizes, "ep", sizes.ep, nbytes)
    return {
        "route": routing(sizes),
        "count": StageCosts(messages=counts[:1]),
        "permute": moving(sent, sizes),
        "arrange": moving(load.rows, sizes),
        "disarrange": moving(load.rows, sizes),
        "unpermute": moving(sent, sizes),
        **expert_costs(sizes, load.rows, anchored=anchored),
        **shared_costs(sizes),
    }


@dataclass(frozen=True)
class Attention:
    """FLOPs of the forward of one layer's attention on one rank.

    Attributes:
        inputs: of the products that make queries, keys and values.
        core: of scores and weighted sums.
        output: of the projection.
    """

    inputs: float = 0.0
    core: float = 0.0
    output: float = 0.0

    def whole(self) -> StageCosts:
        """The stage ``attn``."""
        return _stage(self.inputs + self.core + self.output)

    def chunks(self, degree: int, ranks: int) -> list[StageCosts]:
        """The stage ``attn`` of each chunk; queries, keys and values are made before the first.

        Args:
            degree: Chunks of the sequence.
            ranks: Tensor-parallel ranks, each with a block of rows in every chunk.
        """
        total = (degree * ranks) ** 2
        found = []
        for chunk in blocks(degree * ranks, degree, ranks):
            share = sum(end**2 - start**2 for start, end in chunk) / total
            found.append(self.core * share + self.output / degree)
        return [_stage(flops + self.inputs * (i == 0)) for i, flops in enumerate(found)]


def _stage(flops: float) -> StageCosts:
    work = Computation(flops)
    return StageCosts(work, work * 2)


def bounded(
    costs: Mapping[str, StageCosts], sizes: Sizes, load: Load, bound: int, carrier: str
) -> dict[str, StageCosts]:
    """The costs of the all-to-all dispatcher's stages with sizes on the device.

    Args:
        costs: with sizes on the host.
        load: rows of this rank.
        bound: the most rows that a rank sends another.
        carrier: "", "symmetric-memory" or "hybridep".
    """
    if carrier == "hybridep":
        return _by_one_kernel(costs, sizes, load)
    length = bound * sizes.ep
    ordered = dict.fromkeys(("arrange", "disarrange"), moving(length * sizes.etp, sizes))
    found = {**costs, **ordered}
    if sizes.etp == 1:  # else all ranks get those of all, as on the host
        counts = exchange("count.counts", sizes, load.in_blocks(sizes.local), COUNT_BYTES)
        found["count"] = StageCosts(messages=counts[:1])
    else:
        buffers = replace(load, slices=(float(length),) * sizes.etp)
        row = packed_row(sizes)
        found["gather"] = both_ways([slice_gather("gather.rows", sizes, buffers, row)])
        summed = slice_gather("scatter.rows", sizes, buffers, sizes.row, back=True)
        found["scatter"] = both_ways([summed])
    if not carrier:
        blocks = load.in_blocks(bound)
        there = exchange("dispatch.rows", sizes, blocks, packed_row(sizes))
        back = exchange("combine.rows", sizes, blocks, sizes.row, back=True)
        buffer = moving(length, sizes)
        found |= {"permute": buffer, "unpermute": buffer}
    else:
        there = _copied(sizes, load, bound, packed_row(sizes), "dispatch.rows", back=False)
        back = _copied(sizes, load, bound, sizes.row, "combine.rows", back=True)
    found["dispatch"], found["combine"] = both_ways([there]), both_ways([back])
    return found


def _copied(
    sizes: Sizes, load: Load, bound: int, row: int, name: str, *, back: bool
) -> tuple[PassMessage, PassMessage]:
    """Rows by symmetric memory, and the way back: each copies its buffers, one in and one out."""
    send = min(bound * sizes.ep, sizes.tokens * sizes.topk) * row
    receive = bound * sizes.ep * row
    to, fro = exchange(name, sizes, load, row)
    copied = 2.0 * (send + receive)
    to = replace(to, given=send, copied=copied)
    fro = replace(fro, given=receive, copied=copied)
    return (fro, to) if back else (to, fro)


def _by_one_kernel(
    costs: Mapping[str, StageCosts], sizes: Sizes, load: Load
) -> dict[str, StageCosts]:
    """Stages between permutation and permutation do nothing; probabilities travel with a token."""
    without = ("count", "dispatch", "arrange", "disarrange", "combine")
    found = {name: one for name, one in costs.items() if name not in without}
    row = sizes.row + PROB_BYTES * sizes.local
    there = exchange("permute.rows", sizes, load, row, distinct=True)
    back = exchange("unpermute.rows", sizes, load, sizes.row, distinct=True, back=True)
    moved = moving(load.rows, sizes)
    found["permute"] = replace(moved, messages=there[:1], reverses=there[1:])
    found["unpermute"] = replace(moved, messages=back[:1], reverses=back[1:])
    return found
