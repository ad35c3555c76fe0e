"""``plan``: from a mask and a number of ranks to a plan, with the sharding of the algorithm."""

from __future__ import annotations

from typing import Any

from mindspeed.attention import planners
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan
from mindspeed.attention.sequence_sharding import SequenceSharding
from mindspeed.attention.strategy import Strategy
from mindspeed.errors import ConfigError

ALGORITHMS = ("ring", "all_gather", "needed", "adaptive", "mesh")


def plan(
    mask: Mask,
    ranks: int,
    algorithm: str = "adaptive",
    *,
    sharding: SequenceSharding | None = None,
    samples: int = 1,
    cache: str | None = None,
    queries: int = 2,
    **options: Any,
) -> Plan:
    """Plan attention; ``plan(...).sharding`` gives the tokens of every rank.

    Deterministic: all ranks make the same plan from the same arguments, without communication.

    Args:
        mask: Of all samples.
        ranks: Size of the group.
        algorithm: ``ring``, ``all_gather``, ``needed`` (only keys that are attended to
            are sent), ``adaptive`` (the same, with the sharding that sends the fewest rows at equal
            work), or ``mesh`` (queries are sent, too).
        sharding: The tokens of every rank; by default that of the algorithm.
        samples: Number of concatenated samples of equal length.
        cache: Save ``full`` keys and values for the backward pass, or ``half`` (the keys).
        queries: Of ``mesh``: number of neighbouring ranks that share their queries.
        **options: Other fields of :class:`mindspeed.attention.strategy.Strategy`:
            ``ring_window``, ``granularity``, ``overlap``.

    Raises:
        ConfigError: Unknown algorithm, or one that does not work with this number of ranks.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}; Ulysses "
            "(all-to-all from sequence to heads) needs a process group: see ulysses_attention"
        )
    strategy = Strategy("ring" if algorithm == "mesh" else algorithm, **options)  # type: ignore[arg-type]
    if sharding is None:
        sharding = strategy.sharding(mask, ranks, samples)
    elif sharding.ranks != ranks:
        raise ConfigError(f"the sharding is for {sharding.ranks} ranks, the plan for {ranks}")
    if algorithm == "mesh":
        return planners.with_cache(planners.mesh(mask, sharding, queries), cache)
    return planners.with_cache(strategy.plan(mask, sharding), cache)
