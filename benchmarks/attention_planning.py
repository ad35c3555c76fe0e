"""How long an adaptive plan takes: the layout, and the plan with all its moves and parts.

    python benchmarks/attention_planning.py [--repeats 5] [--json out.json]
    python benchmarks/attention_planning.py --planners

The second prints balance (mean and worst), rows received (worst and mean rank) and parts of the
mask (the rank with most) of this and other planners, without times: the table of
docs/attention-plans.md.

Masks are packed documents with the lengths of a pretraining corpus (published by MagiAttention), 20
samples. Times are processor time of one thread, the best of some repeats, because planning competes
with the training step for cores; caches are emptied before each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mindspeed.attention import Mask, SequenceSharding, cost_metrics, planners, zigzag
from mindspeed.attention.plan import work_on
from mindspeed.attention.planners.adaptive import adaptive_sharding

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.attention import reference_planners as reference
from tests.attention.reference_planners import mask_of, measures, pretraining

K = 1024
CASES = ((128 * K, 8, None), (256 * K, 16, 64 * K), (256 * K, 16, None))
SAMPLES = 20


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeats", type=int, default=5, help="number of runs, of which the fastest counts"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--planners", action="store_true", help="compare planners, without times")
    args = parser.parse_args()
    if args.planners:
        for case in CASES:
            compare(*case)
        return
    results = [measure(*case, args.repeats) for case in CASES]
    found = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_average": os.getloadavg()[0],
        "processors": os.cpu_count(),
        "cases": results,
    }
    for one in results:
        print(
            f"{one['tokens']} tokens, {one['ranks']} ranks, {one['documents']:.0f} documents: "
            f"layout {one['layout_ms']['median']:.1f} ms (worst {one['layout_ms']['worst']:.1f}), "
            f"moves and parts {one['moves_ms']['median']:.1f} ms; balance {one['balance']:.4f}, "
            f"rows received {one['worst_rows']:.3f} / {one['mean_rows']:.3f} of a ring's"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


def measure(size: int, ranks: int, cap: int | None, repeats: int) -> dict[str, object]:
    """One kind of mask."""
    masks = [mask_of(pretraining(size, seed, cap)) for seed in range(SAMPLES)]
    shardings, moves, prices = [], [], []
    for mask in masks:
        shardings.append(best(repeats, lambda mask=mask: layout(mask, ranks)))
        found = layout(mask, ranks)
        moves.append(best(repeats, lambda mask=mask, at=found: planners.needed_only(mask, at)))
        prices.append(cost_metrics(planners.needed_only(mask, found)))
    ring = size - size // ranks
    return {
        "tokens": size,
        "ranks": ranks,
        "documents": statistics.mean(len(mask.regions) for mask in masks),
        "layout_ms": summary(shardings),
        "moves_ms": summary(moves),
        "balance": statistics.mean(price.balance for price in prices),
        "worst_rows": statistics.mean(max(price.kv_received) / ring for price in prices),
        "mean_rows": statistics.mean(sum(price.kv_received) / ranks / ring for price in prices),
    }


PLANNERS: dict[str, Callable[[list[int], Mask, int], SequenceSharding]] = {
    "zigzag over everything": lambda lengths, mask, ranks: zigzag(mask.size, ranks),
    "zigzag in each document": lambda lengths, mask, ranks: reference.per_document(lengths, ranks),
    "torch, round robin of blocks": lambda lengths, mask, ranks: reference.ptrr(mask, ranks),
    "min-heap of chunks of 2048": lambda lengths, mask, ranks: reference.min_heap(
        mask, ranks, 2048
    ),
    "min-heap of chunks of 512": lambda lengths, mask, ranks: reference.min_heap(mask, ranks, 512),
    "adaptive": lambda lengths, mask, ranks: adaptive_sharding(mask, ranks),
}


def compare(size: int, ranks: int, cap: int | None) -> None:
    """One kind of mask, by each planner."""
    longest = "as they come" if cap is None else f"at most {cap}"
    print(f"{size} tokens, {ranks} ranks, documents {longest}")
    samples = [pretraining(size, seed, cap) for seed in range(SAMPLES)]
    for name, planner in PLANNERS.items():
        found, parts = [], []
        for lengths in samples:
            mask = mask_of(lengths)
            layout = planner(lengths, mask, ranks)
            found.append(measures(mask, layout))
            most = [len(work_on(mask, own, ((0, mask.size),))) for own in layout.segments]
            parts.append(max(most))
        balance, worst, mean = map(statistics.mean, zip(*found, strict=True))
        print(
            f"  {name:<30}{balance:.3f} ({min(one[0] for one in found):.3f})  "
            f"rows {worst:.3f} / {mean:.3f}  parts {statistics.mean(parts):.0f}",
            flush=True,
        )


def layout(mask: Mask, ranks: int) -> SequenceSharding:
    """Plan anew."""
    adaptive_sharding.cache_clear()
    return adaptive_sharding(mask, ranks)


def best(repeats: int, work: Callable[[], object]) -> float:
    """Milliseconds of processor time."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(1000 * (time.process_time() - start))
    return min(times)


def summary(times: list[float]) -> dict[str, float]:
    """Of all masks."""
    return {"median": statistics.median(times), "worst": max(times)}


if __name__ == "__main__":
    main()
