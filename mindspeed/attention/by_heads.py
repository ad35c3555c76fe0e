"""``ulysses_attention``: exchange rows for heads, attend, exchange back.

    split = HeadSplit(layout, rank, group)
    local = plan(mask, 1)                                 # all rows are here behind the exchange
    out = ulysses_attention(q, k, v, split, local)

Heads need not divide. Of 28 heads, 4 of 8 ranks would have 4 and 4 ranks 3: a balance of .875.
With ``rest``, a plan of the same ranks, the 24 heads that divide are exchanged and the other 4 are
attended to as that plan says, with rows staying where they are: every rank has the same work.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention.parallel import context_parallel_attention
from mindspeed.attention.plan import Plan
from mindspeed.attention.ulysses import HeadSplit
from mindspeed.errors import ConfigError


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    split: HeadSplit,
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    *,
    rest: Plan | None = None,
    cache: str | None = None,
    slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend with heads shared among the ranks of a split. Collective.

    Args:
        q: This rank's queries ``[t, n, d]``, in the order of the split's layout.
        k: This rank's keys ``[t, g, d]``.
        v: This rank's values ``[t, g, d_v]``.
        split: The exchange.
        plan: Of the ranks that are left behind it: of one rank, or of a ring of groups.
        group: These ranks.
        rest: For the heads that do not divide: a plan of the split's ranks with its layout.
        cache: Keep ``full`` keys and values, or ``half`` of them, as they are before the exchange,
            see :meth:`HeadSplit.again`.
        slopes: ALiBi, ``[n]`` of all heads.
        sink: ``[n]`` of all heads.
        **options: Of :func:`context_parallel_attention`.

    Returns:
        ``[t, n, d_v]``.

    Raises:
        ConfigError: Layouts do not fit, or the cache would save nothing.
    """
    heads, share = q.shape[1], q.shape[1] // k.shape[1]
    even = heads if rest is None else heads - heads % split.size
    outs = []
    if even:
        used = slice(0, (even - 1) // share + 1)
        mine = split.heads(split.rank, even)
        of_mine = [None if x is None else x[mine.start : mine.stop] for x in (slopes, sink)]
        q_even, k_even, v_even = q[:, :even], k[:, used], v[:, used]
        again = None if cache is None else split.again(even, k_even, v_even, cache, share)
        out = context_parallel_attention(
            *split.split(q_even, k_even, v_even, share), plan, group,
            slopes=of_mine[0], sink=of_mine[1], again=again, **options,
        )  # fmt: skip
        outs.append(split.join(out, even))
    if rest is not None and even < heads:
        if rest.layout.segments != split.layout.segments:
            raise ConfigError("the plan for the heads that do not divide has another layout")
        left = [head // share for head in range(even, heads)]
        index = torch.tensor(left if _unequal(left) else sorted(set(left)), device=k.device)
        of_rest = [None if x is None else x[even:] for x in (slopes, sink)]
        k, v = k.index_select(1, index), v.index_select(1, index)
        out = context_parallel_attention(
            q[:, even:], k, v, rest, split.group, slopes=of_rest[0], sink=of_rest[1], **options
        )
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _unequal(used: list[int]) -> bool:
    """Do some heads share keys with more others than some?"""
    return len({used.count(group) for group in used}) > 1
