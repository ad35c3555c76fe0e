"""Costs of an algorithm on a mask, in bytes and pairs: the comparison of all strategies.

Computed from the plans, nothing is measured. Bytes are those of the plan (keys and values, queries
and their results, gradients), plus the all-to-alls before and after it (Ulysses and the hybrids).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mindspeed.attention import planners
from mindspeed.attention.cost_metrics import Sizes, cost_metrics
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan
from mindspeed.attention.sequence_sharding import SequenceSharding, length
from mindspeed.attention.strategy import Strategy
from mindspeed.errors import ConfigError


@dataclass(frozen=True)
class AlgorithmCosts:
    """Costs of one layer, one number per rank.

    Attributes:
        name: To show.
        plan: Of all ranks, or of the Ulysses groups as one rank each.
        sharding: Of all ranks.
        work: Query-key pairs times heads.
        forward: Bytes received in the forward pass.
        backward: Bytes received in the backward pass.
        messages: Received, both passes.
        regions: Mask regions computed in the forward pass.
        memory: Peak bytes of the attention: saved for backward, fp32 accumulators and rows of other
            ranks. Workspace of the operators is not included.
    """

    name: str
    plan: Plan
    sharding: SequenceSharding
    work: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    messages: tuple[int, ...]
    regions: tuple[int, ...]
    memory: tuple[int, ...]

    @property
    def balance(self) -> float:
        """Mean over largest work; 1 is perfect, attention takes 1 / balance of the ideal time."""
        return sum(self.work) / len(self.work) / max(max(self.work), 1)


def costs_of(
    strategy: Strategy, mask: Mask, ranks: int, sizes: Sizes, name: str | None = None
) -> AlgorithmCosts:
    """Plan and price a strategy.

    Raises:
        ConfigError: The Ulysses degree does not divide the ranks, or exceeds the heads.
    """
    inner = strategy.ulysses_ranks(ranks)
    if inner < 1 or ranks % inner:
        raise ConfigError(f"{strategy.algorithm}: degree {inner} must divide {ranks} ranks")
    if inner > sizes.heads:
        raise ConfigError(f"{strategy.algorithm}: {sizes.heads} query heads for {inner} ranks")
    sharding = strategy.sharding(mask, ranks)
    return _costs(strategy.plan(mask, sharding), sharding, inner, sizes, name)


def costs_of_mesh(mask: Mask, ranks: int, sizes: Sizes) -> AlgorithmCosts:
    """The same for the mesh whose shape sends the fewest bytes."""
    sharding = Strategy("ring").sharding(mask, ranks)
    side = planners.mesh_side(ranks, sizes.heads, sizes.groups)
    return _costs(planners.mesh(mask, sharding, side), sharding, 1, sizes, None)


def _costs(
    plan: Plan, sharding: SequenceSharding, inner: int, sizes: Sizes, name: str | None
) -> AlgorithmCosts:
    ranks = [_of_rank(plan, sharding, inner, sizes, rank) for rank in range(sharding.ranks)]
    return AlgorithmCosts(
        name or plan.algorithm, plan, sharding, *map(tuple, zip(*ranks, strict=True))
    )


def _of_rank(
    plan: Plan, sharding: SequenceSharding, inner: int, sizes: Sizes, rank: int
) -> tuple[int, ...]:
    """Work, bytes forward, bytes backward, messages, regions, memory."""
    group, ulysses_rank = divmod(rank, inner)
    shares = [_share(sizes, inner, other) for other in range(inner)]
    mine = shares[ulysses_rank]
    price, rows = cost_metrics(plan), length(plan.sharding.segments[group])
    own = length(sharding.segments[rank])
    others = [share for other, share in enumerate(shares) if other != ulysses_rank]
    to_heads = (rows - own) * _inputs(mine) + own * sum(share.output_row for share in others)
    to_rows = (rows - own) * mine.output_row + own * sum(_inputs(share) for share in others)
    received = price.kv_buffered[group] * mine.row + price.q_received[group] * (
        mine.query_row + mine.output_row
    )
    wide = replace(mine, itemsize=4)
    saved = rows * (_inputs(mine) + mine.output_row + mine.statistics_row)
    accumulators = rows * _inputs(wide) + price.kv_buffered[group] * wide.row
    return (
        price.area[group] * mine.heads,
        price.forward_bytes(mine)[group] + to_heads,
        price.backward_bytes(mine)[group] + to_rows,
        price.messages[group] + 4 * (inner - 1),
        price.regions[group],
        saved + price.saved_bytes(mine)[group] + received + accumulators,
    )


def _share(sizes: Sizes, inner: int, rank: int) -> Sizes:
    """Sizes of a rank after the all-to-all: its heads, and the key heads that they use."""
    heads = range(sizes.heads * rank // inner, sizes.heads * (rank + 1) // inner)
    each = sizes.heads // sizes.groups
    used = heads[-1] // each - heads[0] // each + 1
    return replace(sizes, heads=len(heads), groups=used)


def _inputs(sizes: Sizes) -> int:
    """Bytes of a row of q, k and v."""
    return sizes.query_row + sizes.row


def compare(
    mask: Mask, ranks: int, sizes: Sizes, algorithms: Iterable[str], options: Strategy
) -> list[AlgorithmCosts]:
    """Price several algorithms, ``mesh`` among them."""
    found = []
    for algorithm in algorithms:
        if algorithm == "mesh":
            found.append(costs_of_mesh(mask, ranks, sizes))
            continue
        degree = options.ulysses_degree if algorithm.startswith("hybrid") else 1
        strategy = replace(options, algorithm=algorithm, ulysses_degree=degree)  # type: ignore[arg-type]
        shown = algorithm.replace("_", " ")
        if algorithm.startswith("hybrid"):
            shown += f" {degree} x {ranks // degree}"
        found.append(costs_of(strategy, mask, ranks, sizes, shown))
    return found
