"""The planned best beside published expert layouts, under the same model of memory and time.

    python benchmarks/planner_experts.py [--recordings DIR] [--only-recorded] [--json FILE]

For three models of Megatron-Bridge's tables with an H100 layout, at the published number of devices
and at two others (global batch scaled along), the layout of the table is priced, and the search
looks for the fastest one: with all pipeline sizes and chunks, and with the tensor, context and
expert sizes and micro-batches of the model's rows on any device, whose recordings are shared with
planner.py. The rest is that of the expert. Both are bf16 with the preset ``h100``. The published
runs are in fp8, which keeps fewer bytes: where the expert's layout needs more than the device has
in bf16, the search may use as much as the expert. Beside the fastest layout stands the best one,
which the plan prefers among those that tie within the error of the model.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "planner-experts.json"
DIMENSIONS = ("tp", "cp", "ep", "pp", "vpp", "split", "mbs")


@dataclass(frozen=True)
class Case:
    """A published layout.

    Attributes:
        model: of the rows.
        devices: published.
        row: where it is in the tables.
        sizes: numbers of devices that are planned.
    """

    model: str
    devices: int
    release: str
    sizes: tuple[int, ...]


CASES = (
    Case("llama3-70b", 64, "26.04.01", (64, 128, 256)),
    Case("llama3.1-405b", 1024, "26.06", (512, 1024, 2048)),
    Case("qwen3-30b-a3b", 16, "26.06", (16, 32, 64)),
)


def compare(case: Case, devices: int, recordings: Path, only_recorded: bool) -> dict[str, Any]:
    """Plan a case on some devices.

    Args:
        case: the published layout.
        devices: ranks; the batch grows with them.
        recordings: directory of recordings.
        only_recorded: layouts whose recordings are not there are no candidates.
    """
    from planner import planned_rows
    from planner_recordings import RecordedRuns, ReplayedRuns

    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.cluster.rates import DeviceRates
    from mindspeed.planner.job import Job
    from mindspeed.planner.search.bounded_search import search
    from mindspeed.planner.search.evaluator import JobEvaluator
    from mindspeed.planner.search.space import Sizes, Space

    of_model = [row for row in planned_rows() if row.bridge and row.model == case.model]
    [row] = [row for row in of_model if (row.device, row.release) == ("h100", case.release)]
    job, cluster, expert = Job(row.words), load_cluster("h100"), row.layout
    batch = expert.global_batch_size * devices // expert.devices
    expert = replace(expert, devices=devices, global_batch_size=batch)
    args = job.settings(expert.overrides(), devices).args
    recorded = RecordedRuns(recordings, job, only_recorded)
    runs = ReplayedRuns(recorded, lambda: DeviceRates(cluster))
    evaluator = JobEvaluator(job, args, cluster, runs)  # type: ignore[arg-type]
    evaluator.measure(expert)
    theirs = evaluator.price(expert)
    limit = max(cluster.memory_limit, theirs.peak_bytes)
    sizes = Sizes.of(args, devices)
    space = Space.of(sizes, 8).only(DIMENSIONS, expert)
    tried = {
        (one.signature(), one.pp > 1, several)
        for one in (row.layout for row in of_model)
        for several in {False, one.vpp > 1}
    }
    candidates = (replace(one, etp=expert.etp) for one in space.layouts(sizes, Counter()))
    layouts = [one for one in candidates if (one.signature(), one.pp > 1, one.vpp > 1) in tried]
    outcome = search(layouts, evaluator, limit, top=1)
    if not outcome.best:
        raise SystemExit(f"{case.model} on {devices}: none of {len(layouts)}: {outcome.removed}")
    preferred, ours = outcome.best[0]
    fastest, least = min(outcome.priced, key=lambda found: found[1].seconds)
    return {
        "model": case.model,
        "devices": devices,
        "global_batch_size": batch,
        "expert": str(replace(expert, stage_layers=None)),
        "expert_seconds": theirs.seconds,
        "expert_gib": theirs.peak_bytes / 2**30,
        "best": str(replace(preferred, stage_layers=None)),
        "best_seconds": ours.seconds,
        "best_gib": ours.peak_bytes / 2**30,
        "fastest": str(replace(fastest, stage_layers=None)),
        "fastest_seconds": least.seconds,
        "fastest_gib": least.peak_bytes / 2**30,
        "speedup": theirs.seconds / least.seconds,
        "memory_limit_gib": limit / 2**30,
        "candidates": len(layouts),
        "priced": len(outcome.priced),
        "removed": dict(outcome.removed),
    }


def run(
    cases: Sequence[Case], recordings: Path, only_recorded: bool, path: Path
) -> list[dict[str, Any]]:
    """All sizes of the cases, written to a file one by one."""
    found = []
    for case in cases:
        for devices in case.sizes:
            one = compare(case, devices, recordings, only_recorded)
            found.append(one)
            print(
                f"{one['model']:16} {devices:5} expert {one['expert']:40} "
                f"{one['expert_seconds']:8.3f} s  fastest {one['fastest']:40} "
                f"{one['fastest_seconds']:8.3f} s  x{one['speedup']:.3f}",
                flush=True,
            )
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[case.model for case in CASES])
    parser.add_argument("--recordings", type=Path, default=Path("run/planner-recordings"))
    parser.add_argument("--only-recorded", action="store_true", help="make no new recordings")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    import mindspeed.megatron_adaptor  # noqa: F401
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    cases = [case for case in CASES if case.model in options.models]
    run(cases, options.recordings, options.only_recorded, options.json)


if __name__ == "__main__":
    main()
