"""``plan``: from a mask and a number of ranks to a plan, with a layout that suits the algorithm."""

from __future__ import annotations

from typing import Any

from mindspeed.attention import planners
from mindspeed.attention.layout import Layout
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan
from mindspeed.attention.strategy import Strategy
from mindspeed.errors import ConfigError

ALGORITHMS = ("ring", "all_gather", "needed", "adaptive", "mesh")


def plan(
    mask: Mask,
    ranks: int,
    algorithm: str = "adaptive",
    *,
    layout: Layout | None = None,
    samples: int = 1,
    cache: str | None = None,
    queries: int = 2,
    **options: Any,
) -> Plan:
    """Plan the attention of a mask; ``plan(...).layout`` says who owns which tokens.

    All ranks make the same plan of the same arguments, without communication.

    Args:
        mask: What every query sees, of all samples.
        ranks: Size of the group.
        algorithm: ``ring``, ``all_gather``, ``needed`` (only rows that are seen travel),
            ``adaptive`` (the same, with the layout that moves the fewest rows at equal work), or
            ``mesh`` (queries travel, too).
        layout: Who owns which tokens; by default what suits the algorithm.
        samples: Samples of equal length that the mask has, one behind the other.
        cache: Keep ``full`` keys and values for the backward pass, or ``half`` of them.
        queries: Of ``mesh``: neighbouring ranks that share their queries.
        **options: Further fields of :class:`mindspeed.attention.strategy.Strategy`:
            ``ring_window``, ``granularity``, ``overlap``.

    Raises:
        ConfigError: Unknown algorithm, or it cannot be had with this number of ranks.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}; an exchange of rows "
            "for heads (Ulysses) needs a process group: see ulysses_attention"
        )
    strategy = Strategy("ring" if algorithm == "mesh" else algorithm, **options)  # type: ignore[arg-type]
    if layout is None:
        layout = strategy.layout(mask, ranks, samples)
    elif layout.ranks != ranks:
        raise ConfigError(f"the layout is for {layout.ranks} ranks, the plan for {ranks}")
    if algorithm == "mesh":
        return planners.with_cache(planners.mesh(mask, layout, queries), cache)
    return planners.with_cache(strategy.plan(mask, layout), cache)
