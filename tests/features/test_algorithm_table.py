"""The table of bytes in docs/context-parallel.md equals the bytes of the plans."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed.attention import Mask, cost_metrics
from mindspeed.attention.strategy import Strategy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "context-parallel.md"
RANKS, SIZE = 8, 1 << 12
MASK = Mask.causal(SIZE)


def received(strategy: Strategy, share: int, mask: Mask = MASK) -> float:
    """Bytes that the worst rank receives, both passes, in keys and values of S / P tokens.

    Args:
        strategy: Its plan and its exchange of heads.
        share: Query heads to a key head.
        mask: What is attended to.
    """
    inner = strategy.ulysses_ranks(RANKS)
    plan = strategy.plan(mask, strategy.sharding(mask, RANKS))
    cost = cost_metrics(plan)
    worst = max(
        map(sum, zip(cost.kv_received, cost.kv_received_backward, cost.dkv_sent, strict=True))
    )
    # A row behind the exchange has 1 / inner of the heads; before it, queries are share / 2 of KV.
    exchange = 2 * (inner - 1) / inner * (share + 1)
    return exchange + worst / (SIZE // RANKS) / inner


ROWS = {
    "`ulysses_cp_algo`": Strategy("ulysses"),
    "`hybrid_cp_algo`, U = 2": Strategy("hybrid", ulysses_degree=2),
    "`hybrid_cp_algo`, U = 4": Strategy("hybrid", ulysses_degree=4),
    "`megatron_cp_algo`": Strategy("ring"),
    "the same, `--context-parallel-kv-cache-policy full`": Strategy("ring", cache="full"),
    "`kvallgather_cp_algo`": Strategy("all_gather"),
    "`adaptive_cp_algo`": Strategy("adaptive"),
}


PACKED = Mask.documents((0, 200, 900, 1500, 1700, 2600, 3000, 3900, SIZE))


@pytest.mark.parametrize("name", ROWS)
def test_bytes_of_the_page(name):
    row = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", PAGE.read_text(), re.M)[-1]
    strategy = ROWS[name]
    balance = cost_metrics(strategy.plan(PACKED, strategy.sharding(PACKED, RANKS))).balance
    found = [received(strategy, share) for share in (1, 4, 8)]
    found += [received(strategy, 4, PACKED), balance]
    for cell, number in zip(row.split(" | "), found, strict=True):
        digits = len(cell.partition(".")[2])
        assert float(cell) == pytest.approx(number, abs=0.51 * 10**-digits)
