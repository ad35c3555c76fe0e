"""Costs of exchanges whose sizes stay on the device, in buffers of a bound.

                    sent                            besides
blocks              the bound, to every rank        stages in the order of a buffer move all of it
symmetric-memory    the rows and no others          they are copied into symmetric memory and out
hybridep            a token once to each rank       one kernel permutes and sends: nothing hides it

:mod:`mindspeed.moe.row_exchange` and :mod:`mindspeed.moe.dispatch.megatron_hybrid_ep` run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mindspeed.moe.costs import (
    COUNT_BYTES,
    PROB_BYTES,
    Message,
    StageCosts,
    both_ways,
    exchange,
    moving,
    packed_row,
    slice_gather,
)
from mindspeed.moe.sizes import Load, Sizes


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
) -> tuple[Message, Message]:
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
