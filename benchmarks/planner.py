"""The planner's times against published ones: Megatron-Bridge's performance tables, blind.

    python benchmarks/planner.py [--systems h100] [--models llama3-70b] [--jobs 2] [--json out.json]

Every pre-training row of tests/planner/data/megatron_bridge_performance.csv has a layout and its
measured throughput. The row's flags are planned with the preset of its system; nothing is fitted to
the rows. Reported are the mean absolute percentage error of tokens per second and device, and the
rank correlation of prediction and measurement (Spearman), for each model and for all rows.

What a row does not say is taken as: no recomputation, distributed optimizer with overlap, layers
spread evenly with embedding and head counted as a layer each. Products of fp8 rows are
priced with the fp8 peak, attention with that of bf16; quantisation itself is not priced. Rows with
FSDP, and models that the trainer does not have, are left out and counted.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

ROWS = Path(__file__).parent.parent / "tests/planner/data/megatron_bridge_performance.csv"
RESULTS = Path(__file__).parent / "results" / "planner-published.json"

COMMON = (
    "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--use-flash-attn"
)
EXPERTS = (
    " --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-force-load-balancing "
    "--moe-permute-fusion"
)
MODELS = {
    "llama3-8b": ("--model llama3-8b", 32),
    "llama3-70b": ("--model llama3-70b", 80),
    "llama3.1-405b": (
        "--model llama3.1-70b --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 "
        "--num-attention-heads 128",
        126,
    ),
    "qwen3-30b-a3b": ("--model qwen3-30b-a3b" + EXPERTS, 48),
    "qwen3-235b-a22b": ("--model qwen3-235b-a22b" + EXPERTS, 94),
    "deepseek-v3": ("--model deepseek-v3" + EXPERTS, 61),
}
"""Flags and number of layers of the models that the trainer has."""
CLUSTERS = {"h100": "h100"}
"""Presets of the systems."""


@dataclass(frozen=True)
class Row:
    """A published row with what is predicted.

    Attributes:
        published: tokens per second and device.
        predicted: the same.
        seconds: predicted, of a step.
        bubble: predicted.
        memory_gib: predicted, of tensors on the fullest rank.
        limit: predicted.
    """

    release: str
    model: str
    system: str
    precision: str
    devices: int
    layout: str
    published: float
    predicted: float
    seconds: float
    bubble: float
    memory_gib: float
    limit: str

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.published - 1


def published() -> list[dict[str, str]]:
    """The rows of the file."""
    with ROWS.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


CHOSEN = ("llama3-8b", "llama3-70b", "llama3.1-405b")
"""Models whose rows the committed figures have; those with experts take longer."""


def left_out(row: dict[str, str], models: Sequence[str] = CHOSEN) -> str | None:
    """Why a row is not planned."""
    if row["model"] not in MODELS:
        return "a model that the trainer does not have"
    if row["model"] not in models:
        return "a model with experts, not run"
    if row["system"] not in CLUSTERS:
        return "a system without a preset"
    if row["fsdp"] != "0":
        return "FSDP"
    if row["variant"] == "tokendrop":
        return "tokens are dropped"
    return None


def layout_of(row: dict[str, str]) -> Any:
    """The layout of a row."""
    from mindspeed.planner.layout import Layout

    number = {name: int(value) for name, value in row.items() if value.isdigit()}
    stages = number["pp"] * number["vpp"]
    layers = MODELS[row["model"]][1]
    spread = None
    if layers % stages:
        slots = layers + 2
        counts = [slots // stages + (i < slots % stages) for i in range(stages)]
        counts[0] -= 1
        counts[-1] -= 1
        spread = tuple(counts)
    return Layout(
        devices=number["devices"],
        global_batch_size=number["global_batch_size"],
        tp=number["tp"],
        cp=number["cp"],
        ep=number["ep"],
        etp=1 if number["ep"] > 1 else None,
        pp=number["pp"],
        vpp=number["vpp"],
        stage_layers=spread,
        mbs=number["micro_batch_size"],
    )


def cluster_of(row: dict[str, str]) -> Any:
    """The preset, whose products run in the row's precision."""
    from mindspeed.planner.cluster import load_cluster

    cluster = load_cluster(CLUSTERS[row["system"]])
    device = cluster.device
    name = "fp8" if row["precision"] in ("fp8", "mxfp8") else row["precision"]
    ratio = device.peak_tflops[name] / device.peak_tflops["bf16"]
    peaks = {**device.peak_tflops, "bf16": device.peak_tflops[name]}
    efficiency = device.attention_efficiency / ratio
    return replace(
        cluster, device=replace(device, peak_tflops=peaks, attention_efficiency=efficiency)
    )


def predict_all(rows: Iterable[dict[str, str]], jobs: int) -> Iterator[Row | str]:
    """Plan the rows; those of one signature share it. Yields why a row could not be planned."""
    from mindspeed.planner import isolated
    from mindspeed.planner.job import Job
    from mindspeed.planner.price import predict
    from mindspeed.planner.signature import measure

    signatures: dict[Any, Any] = {}
    for row in rows:
        job = Job(f"{MODELS[row['model']][0]} {COMMON} --seq-length {row['seq_length']}".split())
        layout, cluster = layout_of(row), cluster_of(row)
        several = layout.vpp > 1
        key = (job.argv, layout.signature(), layout.pp > 1, several, row["precision"])
        try:
            if key not in signatures:
                signatures[key] = measure(job, layout, cluster, jobs)
            if isinstance(signatures[key], Exception):
                raise signatures[key]
            shape = isolated.call(_shape, job, layout)
            price = predict(signatures[key], shape, cluster, layout)
        except Exception as error:
            signatures.setdefault(key, error)
            yield f"{row['model']} {layout}: {error}".splitlines()[0]
            continue
        yield Row(
            row["release"],
            row["model"],
            row["system"],
            row["precision"],
            layout.devices,
            str(replace(layout, stage_layers=None)),
            float(row["tokens_per_second_per_device"]),
            price.tokens_per_second_per_device,
            price.seconds,
            price.bubble,
            price.peak_bytes / 2**30,
            price.limit,
        )


def _shape(job: Any, layout: Any) -> Any:
    from mindspeed.planner.shape import shape_of

    return shape_of(job.settings(layout.overrides(), layout.devices).args)


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float | int | None]]:
    """Errors for each model and for all."""
    groups: dict[str, list[Row]] = {"all": list(rows)}
    for row in rows:
        groups.setdefault(row.model, []).append(row)
    return {
        name: {
            "rows": len(group),
            "mape": round(mean(abs(row.error) for row in group), 4),
            "bias": round(mean(row.error for row in group), 4),
            "spearman": spearman([r.published for r in group], [r.predicted for r in group]),
        }
        for name, group in groups.items()
        if group
    }


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Rank correlation; None of fewer than three different values."""
    if min(len(set(one)), len(set(other))) < 3:
        return None
    a, b = _ranks(one), _ranks(other)
    ma, mb = mean(a), mean(b)
    both = sum((x - ma) * (y - mb) for x, y in zip(a, b, strict=True))
    spread = sum((x - ma) ** 2 for x in a) * sum((y - mb) ** 2 for y in b)
    return round(both / spread**0.5, 4)


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="*", default=list(CLUSTERS))
    parser.add_argument("--models", nargs="*", default=list(CHOSEN))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    import mindspeed.megatron_adaptor  # noqa: F401
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    rows = published()
    reasons = Counter(
        reason for row in rows if (reason := left_out(row, options.models)) is not None
    )
    chosen = [
        row
        for row in rows
        if left_out(row, options.models) is None and row["system"] in options.systems
    ]
    found: list[Row] = []
    refused: list[str] = []
    for one in predict_all(chosen, options.jobs):
        if isinstance(one, str):
            refused.append(one)
            print(one, file=sys.stderr, flush=True)
            continue
        found.append(one)
        print(
            f"{one.model:16} {one.layout:44} {one.published:8.0f} {one.predicted:8.0f} "
            f"{100 * one.error:+6.1f} % {one.limit}",
            flush=True,
        )
        result = {
            "rows": len(rows),
            "left_out": dict(reasons),
            "refused": refused,
            "summary": summary(found),
            "predictions": [asdict(row) for row in found],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary(found), indent=1))


if __name__ == "__main__":
    main()
