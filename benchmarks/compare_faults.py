"""Planted faults: how many ``mindspeed compare`` names, in random layouts.

    python benchmarks/compare_faults.py [--seed 0] [--mode fp32 bf16 forced] [--only NAME ...]
    python benchmarks/compare_faults.py --mode equal        pairs of equal runs: false alarms

Each fault of ``tests/compare/faults.py`` is planted into a small job whose layout, weights and data
are chosen at random by the seed, and compared with the run of one rank: free running, and in bf16
forced to the values of that run, too. Prints each outcome and the number of right, missed and wrong
ones; a fault that bf16 rounds away is planted in fp32 only. ``--out FILE`` keeps them as JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from mindspeed.testing import RankPool
from tests.compare.campaign import Campaign, Outcome
from tests.compare.faults import FAULTS
from tests.compare.pairs import PAIRS

MODES = {"fp32": ("fp32", False), "bf16": ("bf16", False), "forced": ("bf16", True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    modes = [*MODES, "equal"]
    parser.add_argument("--mode", nargs="+", choices=modes, default=modes)
    parser.add_argument("--only", nargs="+", default=list(FAULTS), help="faults")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), help="equal runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        for mode in args.mode:
            if mode == "equal":
                found[mode] = pairs(Campaign(pool.run, Path(folder, mode)), args.pairs)
                print(json.dumps({k: v for k, v in found[mode].items() if k != "pairs"}))
                continue
            dtype, forced = MODES[mode]
            campaign = Campaign(pool.run, Path(folder, mode), args.seed, dtype)
            outcomes = []
            for fault in args.only:
                if dtype == "bf16" and not FAULTS[fault].narrow:
                    continue
                start = time.perf_counter()
                outcome = campaign.outcome(fault, forced)
                outcomes.append(outcome)
                line(mode, outcome, time.perf_counter() - start)
            shutil.rmtree(Path(folder, mode))
            found[mode] = summary(outcomes)
            print(json.dumps({k: v for k, v in found[mode].items() if k != "faults"}), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"seed": args.seed, **found}, indent=1) + "\n")


def pairs(campaign: Campaign, names: list[str]) -> dict[str, object]:
    """Compare pairs of equal runs; print each."""
    rows = []
    for name in names:
        result = campaign.equal(PAIRS[name])
        worst = max(row.difference.worst for row in result.rows)
        bits = all(row.difference.error == 0 for row in result.rows)
        rows.append(
            {
                "pair": name,
                "equal": result.equal,
                "in bits": bits,
                "tensors": len(result.rows),
                "largest ratio to a limit": round(worst, 3),
            }
        )
        print(
            f"equal  {'equal' if result.equal else 'ALARM'} {name} {len(result.rows)}", flush=True
        )
    return {
        "compared": len(rows),
        "equal": sum(bool(row["equal"]) for row in rows),
        "in bits": sum(bool(row["in bits"]) for row in rows),
        "tensors": sum(int(str(row["tensors"])) for row in rows),
        "pairs": rows,
    }


def line(mode: str, outcome: Outcome, seconds: float) -> None:
    """Print an outcome."""
    print(
        f"{mode:6} {outcome.kind:6} {outcome.fault:36} {outcome.found or '-'}"
        f"  [{outcome.layout.ranks} {outcome.layout.flags}; seed {outcome.seed}; {seconds:.1f} s]",
        flush=True,
    )


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    """Counts, and each outcome."""
    counts = Counter(outcome.kind for outcome in outcomes)
    return {
        "planted": len(outcomes),
        **{kind: counts[kind] for kind in ("right", "missed", "wrong")},
        "faults": [
            {
                "fault": one.fault,
                "outcome": one.kind,
                "layout": f"{one.layout.ranks} ranks {one.layout.flags}".strip(),
                "seed": one.seed,
                "found": one.found,
            }
            for one in outcomes
        ],
    }


if __name__ == "__main__":
    main()
