"""What an algorithm costs on a mask, in bytes: plans of any strategy side by side.

Ranks receive rows of keys and values, queries and their results as the plan says, and before and
behind it the exchange of rows for heads (Ulysses, the hybrids). Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mindspeed.attention import planners
from mindspeed.attention.figures import Sizes, figures
from mindspeed.attention.layout import Layout, length
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan
from mindspeed.attention.strategy import Strategy
from mindspeed.errors import ConfigError


@dataclass(frozen=True)
class Costs:
    """Of one layer, one number for each rank.

    Attributes:
        name: Of the algorithm.
        plan: Of all ranks, or of the groups that exchange rows for heads.
        layout: Tokens of all ranks.
        work: Pairs times heads.
        forward: Bytes received in the forward pass.
        backward: Bytes received in the backward pass.
        messages: Received, both passes.
        pieces: Parts of the mask computed in the forward pass.
        memory: Most bytes held: what is saved for the backward pass, and fp32 sums and rows of
            other ranks beside it. Without what operators need inside.
    """

    name: str
    plan: Plan
    layout: Layout
    work: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    messages: tuple[int, ...]
    pieces: tuple[int, ...]
    memory: tuple[int, ...]

    @property
    def balance(self) -> float:
        """Mean over largest work; 1 is perfect, attention takes 1 / balance of the ideal time."""
        return sum(self.work) / len(self.work) / max(max(self.work), 1)


def costs_of(
    strategy: Strategy, mask: Mask, ranks: int, sizes: Sizes, name: str | None = None
) -> Costs:
    """Plan and price a strategy.

    Args:
        strategy: The algorithm.
        mask: Of all samples.
        ranks: Context-parallel size.
        sizes: Of the tensors of a tensor-parallel rank.
        name: To show; default the plan's.

    Raises:
        ConfigError: Ranks, neighbours or heads do not divide.
    """
    inner = strategy.exchanging(ranks)
    if inner < 1 or ranks % inner:
        raise ConfigError(f"{strategy.algorithm}: degree {inner} must divide {ranks} ranks")
    if inner > sizes.heads:
        raise ConfigError(f"{strategy.algorithm}: {sizes.heads} query heads for {inner} ranks")
    layout = strategy.layout(mask, ranks)
    return _costs(strategy.plan(mask, layout), layout, inner, sizes, name)


def costs_of_mesh(mask: Mask, ranks: int, sizes: Sizes) -> Costs:
    """The same for the mesh whose sides move the fewest bytes."""
    layout = Strategy("ring").layout(mask, ranks)
    side = planners.mesh_side(ranks, sizes.heads, sizes.groups)
    return _costs(planners.mesh(mask, layout, side), layout, 1, sizes, None)


def _costs(plan: Plan, layout: Layout, inner: int, sizes: Sizes, name: str | None) -> Costs:
    ranks = [_of_rank(plan, layout, inner, sizes, rank) for rank in range(layout.ranks)]
    return Costs(name or plan.algorithm, plan, layout, *map(tuple, zip(*ranks, strict=True)))


def _of_rank(plan: Plan, layout: Layout, inner: int, sizes: Sizes, rank: int) -> tuple[int, ...]:
    """Work, bytes forward, bytes backward, messages, pieces, memory."""
    group, place = divmod(rank, inner)
    shares = [_share(sizes, inner, other) for other in range(inner)]
    mine = shares[place]
    price, rows = figures(plan), length(plan.layout.segments[group])
    own = length(layout.segments[rank])
    others = [share for other, share in enumerate(shares) if other != place]
    to_heads = (rows - own) * _inputs(mine) + own * sum(share.output_row for share in others)
    to_rows = (rows - own) * mine.output_row + own * sum(_inputs(share) for share in others)
    travelling = price.buffer[group] * mine.row + price.asked[group] * (
        mine.query_row + mine.output_row
    )
    wide = replace(mine, itemsize=4)
    saved = rows * (_inputs(mine) + mine.output_row + mine.statistics_row)
    summing = rows * _inputs(wide) + price.buffer[group] * wide.row
    return (
        price.area[group] * mine.heads,
        price.forward_bytes(mine)[group] + to_heads,
        price.backward_bytes(mine)[group] + to_rows,
        price.messages[group] + 4 * (inner - 1),
        price.pieces[group],
        saved + price.kept_bytes(mine)[group] + travelling + summing,
    )


def _share(sizes: Sizes, inner: int, place: int) -> Sizes:
    """Heads of one of the neighbours after the exchange, and the key heads that they use."""
    heads = range(sizes.heads * place // inner, sizes.heads * (place + 1) // inner)
    each = sizes.heads // sizes.groups
    used = heads[-1] // each - heads[0] // each + 1
    return replace(sizes, heads=len(heads), groups=used)


def _inputs(sizes: Sizes) -> int:
    """Bytes of a row of queries, keys and values."""
    return sizes.query_row + sizes.row


def compare(
    mask: Mask, ranks: int, sizes: Sizes, algorithms: Iterable[str], options: Strategy
) -> list[Costs]:
    """Price several algorithms, ``mesh`` among them.

    Args:
        mask: Of all samples.
        ranks: Context-parallel size.
        sizes: Of the tensors of a tensor-parallel rank.
        algorithms: Names of :class:`Strategy`, or ``mesh``.
        options: What the algorithms share.
    """
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
