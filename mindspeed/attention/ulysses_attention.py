"""``ulysses_attention``: all-to-all from sequence to heads, attention, all-to-all back.

    exchange = HeadAllToAll(sharding, rank, group)
    local = plan(mask, 1)                       # after the all-to-all a rank has all rows
    out = ulysses_attention(q, k, v, exchange, local)

The number of heads need not be a multiple of the ranks. Of 28 heads, 4 of 8 ranks would get 4 heads
and 4 ranks 3: a balance of .875. With ``rest``, a plan of the same ranks, 24 heads take part in the
all-to-all and the other 4 are computed by that plan, so all ranks have the same work.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention.context_parallel import context_parallel_attention
from mindspeed.attention.plan import Plan
from mindspeed.attention.ulysses_all_to_all import HeadAllToAll
from mindspeed.errors import ConfigError


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exchange: HeadAllToAll,
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    *,
    rest: Plan | None = None,
    cache: str | None = None,
    slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend with heads sharded over the ranks of an all-to-all. Collective.

    Args:
        q: This rank's queries ``[t, n, d]``, in the order of the sharding; fp32, bf16 or fp16.
        k: This rank's keys ``[t, g, d]``.
        v: This rank's values ``[t, g, d_v]``.
        plan: Of the outer ranks: one rank, or the Ulysses groups of a hybrid as one rank each.
        group: The outer ranks.
        rest: For the heads left over: a plan of the ranks of the all-to-all with its sharding.
        cache: Save ``full`` keys and values, or ``half`` of them (the keys), as they are before the
            all-to-all, see :meth:`HeadAllToAll.kv_cache`.
        slopes: ALiBi slopes of all heads ``[n]``, fp32.
        sink: Scores of all heads ``[n]``.
        **options: Of :func:`context_parallel_attention`.

    Returns:
        ``[t, n, d_v]`` in the dtype of q.

    Raises:
        ConfigError: The shardings differ, or the cache would save no memory.
    """
    heads, share = q.shape[1], q.shape[1] // k.shape[1]
    even = heads if rest is None else heads - heads % exchange.size
    outs = []
    if even:
        used = slice(0, (even - 1) // share + 1)
        mine = exchange.heads(exchange.rank, even)
        of_mine = [None if x is None else x[mine.start : mine.stop] for x in (slopes, sink)]
        q_even, k_even, v_even = q[:, :even], k[:, used], v[:, used]
        kv_cache = None if cache is None else exchange.kv_cache(even, k_even, v_even, cache, share)
        out = context_parallel_attention(
            *exchange.to_heads(q_even, k_even, v_even, share), plan, group,
            slopes=of_mine[0], sink=of_mine[1], kv_cache=kv_cache, **options,
        )  # fmt: skip
        outs.append(exchange.to_sequence(out, even))
    if rest is not None and even < heads:
        if rest.sharding.segments != exchange.sharding.segments:
            raise ConfigError("the plan for the heads that do not divide has another sharding")
        left = [head // share for head in range(even, heads)]
        index = torch.tensor(left if _unequal(left) else sorted(set(left)), device=k.device)
        of_rest = [None if x is None else x[even:] for x in (slopes, sink)]
        k, v = k.index_select(1, index), v.index_select(1, index)
        out = context_parallel_attention(
            q[:, even:], k, v, rest, exchange.group, slopes=of_rest[0], sink=of_rest[1], **options
        )
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _unequal(used: list[int]) -> bool:
    """Whether key heads are used by different numbers of query heads."""
    return len({used.count(group) for group in used}) > 1
