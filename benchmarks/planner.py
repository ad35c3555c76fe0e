"""The planner's times against published ones: Megatron-Bridge's performance tables, blind.

    python benchmarks/planner.py [--systems h100 b200] [--models llama3-70b] [--recordings DIR]

Every pre-training row of tests/planner/data/megatron_bridge_performance.csv has a layout and its
measured throughput. The row's flags are planned with the preset of its system; nothing is fitted to
the rows. Reported are the mean absolute percentage error of tokens per second and device, its mean
(positive: predicted too fast, the step takes longer than planned), and the rank correlation of
prediction and measurement (Spearman): for all rows, each model, device and precision, and each
model on each device.

Tiny runs are executed once and timed for every device and precision (planner_recordings.py); what
the published programs do and the planned job does not is priced as planner_published_rates.py says.
What a row does not say is taken from Megatron-Bridge's recipes as far as they are the same for all
systems: fused kernels, gradients reduced in bf16, distributed optimizer with overlap, DeepSeek's
up-projections recomputed. Layers are spread evenly with embedding and head counted as a layer each.
Rows with FSDP or dropped tokens, and models that the trainer does not have, are left out and
counted.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

ROWS = Path(__file__).parent.parent / "tests/planner/data/megatron_bridge_performance.csv"
RESULTS = Path(__file__).parent / "results" / "planner-published.json"

COMMON = (
    "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --grad-reduce-in-bf16"
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
    "deepseek-v3": (
        "--model deepseek-v3 --recompute-granularity selective --recompute-modules mla_up_proj"
        + EXPERTS,
        61,
    ),
    "kimi-k2": (
        "--model deepseek-v3 --num-attention-heads 64 --num-experts 384 --moe-layer-freq "
        "[0]*1+[1]*60 --vocab-size 163840 --moe-router-num-groups 1 --moe-router-group-topk 1 "
        "--recompute-granularity selective --recompute-modules mla_up_proj" + EXPERTS,
        61,
    ),
}
"""Flags and number of layers of the models that the trainer has."""
LATENT_ATTENTION = ("deepseek-v3", "kimi-k2")
"""Models whose rotary embedding is their own."""
EXPERTS_OF = {
    "qwen3-30b-a3b": (128, 8),
    "qwen3-235b-a22b": (128, 8),
    "deepseek-v3": (256, 8),
    "kimi-k2": (384, 8),
}
"""Number of experts, and how many a token takes."""
CLUSTERS = {name: name for name in ("h100", "b200", "b300", "gb200", "gb300")}
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
        """Relative, of tokens per second: positive if the prediction is too fast."""
        return self.predicted / self.published - 1


def published() -> list[dict[str, str]]:
    """The rows of the file."""
    with ROWS.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def left_out(row: dict[str, str]) -> str | None:
    """Why a row is not planned."""
    if row["model"] not in MODELS:
        return "a model that the trainer does not have"
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


def job_of(row: dict[str, str]) -> Any:
    """The job of a row."""
    from mindspeed.planner.job import Job

    words = f"{MODELS[row['model']][0]} {COMMON} --seq-length {row['seq_length']}".split()
    if row["model"] in LATENT_ATTENTION:
        words.remove("--use-fused-rotary-pos-emb")
    return Job(words)


def predict_all(
    rows: Iterable[dict[str, str]], recordings: Path, only_recorded: bool = False
) -> Iterator[Row | str]:
    """Plan the rows. Yields why a row could not be planned."""
    known: dict[Any, Any] = {}
    for row in rows:
        layout = layout_of(row)
        key = row["model"], row["seq_length"], layout, row["system"], row["precision"]
        if key not in known:
            try:
                known[key] = price_of(row, recordings, only_recorded)
            except Exception as error:
                known[key] = f"{row['model']} {layout}: {error}".splitlines()[0]
        found = known[key]
        if isinstance(found, str):
            yield found
            continue
        yield Row(
            row["release"],
            row["model"],
            row["system"],
            row["precision"],
            layout.devices,
            str(replace(layout, stage_layers=None)),
            float(row["tokens_per_second_per_device"]),
            found.tokens_per_second_per_device,
            found.seconds,
            found.bubble,
            found.peak_bytes / 2**30,
            found.limit,
        )


def price_of(row: dict[str, str], recordings: Path, only_recorded: bool = False) -> Any:
    """What the planner says about a row.

    Args:
        row: of :func:`published`.
        recordings: directory of tiny runs.
        only_recorded: a tiny run that is not there is an error.
    """
    from planner_published_rates import Experts, PublishedRates, with_grouped_products
    from planner_recordings import RecordedRuns

    from mindspeed.planner import isolated
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.composed.measurement import measure
    from mindspeed.planner.composed.price import predict

    job, layout = job_of(row), layout_of(row)
    cluster = load_cluster(CLUSTERS[row["system"]])
    experts = Experts(*EXPERTS_OF[row["model"]]) if row["model"] in EXPERTS_OF else None
    shape, vocabulary = isolated.call(_shape, job, layout)
    kept = {vocabulary, *([experts.number] if experts else [])}

    def rates() -> PublishedRates:
        return PublishedRates(cluster, row["precision"], kept, experts)

    runs = RecordedRuns(recordings, job, rates, with_grouped_products, only_recorded)
    signature = measure(job, layout, cluster, runs=runs)
    return predict(signature, shape, cluster, layout)


def _shape(job: Any, layout: Any) -> Any:
    """The shape, and rows of the output layer on a rank."""
    from mindspeed.planner.shape import shape_of

    args = job.settings(layout.overrides(), layout.devices).args
    return shape_of(args), args.padded_vocab_size // layout.tp


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float | int | None]]:
    """Errors of all rows, of each model, system and precision, and of models on systems."""
    groups: dict[str, list[Row]] = {"all": list(rows)}
    for name in ("model", "system", "precision"):
        for row in sorted(rows, key=lambda row: getattr(row, name)):
            groups.setdefault(getattr(row, name), []).append(row)
    for row in sorted(rows, key=lambda row: (row.model, row.system)):
        groups.setdefault(f"{row.model} {row.system}", []).append(row)
    return {
        name: {
            "rows": len(group),
            "mape": round(mean(abs(row.error) for row in group), 4),
            "tokens_per_second_bias": round(mean(row.error for row in group), 4),
            "step_time_bias": round(mean(1 / (1 + row.error) - 1 for row in group), 4),
            "predicted_too_fast": sum(row.error > 0 for row in group),
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


def write(rows: Sequence[Row], refused: Sequence[str], path: Path) -> None:
    """The figures as JSON, and the rows as CSV beside it."""
    reasons = Counter(reason for row in published() if (reason := left_out(row)) is not None)
    result = {
        "rows": len(published()),
        "left_out": dict(reasons),
        "refused": list(refused),
        "summary": summary(rows),
        "predictions": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    with path.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [*(item.name for item in fields(Row)), "error"])
        table.writeheader()
        for row in rows:
            shown = {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in asdict(row).items()
            }
            table.writerow({**shown, "error": round(row.error, 4)})
    if path == RESULTS:  # of all rows
        write_ratios(rows)


def write_ratios(rows: Sequence[Row]) -> None:
    """Measured over predicted seconds, from which the planner's intervals follow."""
    from mindspeed.planner.interval import RATIOS

    with RATIOS.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["model", "device", "experts", "precision", "layout", "ratio"])
        for row in rows:
            experts, layout = int(row.model in EXPERTS_OF), f"{row.devices}: {row.layout}"
            ratio = round(1 + row.error, 4)
            table.writerow([row.model, row.system, experts, row.precision, layout, ratio])


def plot(rows: Sequence[Row], path: Path) -> None:
    """Predicted over published throughput, a colour for each model and a marker for each system."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 6), layout="constrained")
    markers = dict(zip(CLUSTERS, "osD^v", strict=True))
    colours = {name: f"C{index}" for index, name in enumerate(MODELS)}
    for row in rows:
        axes.plot(
            row.published, row.predicted, markers[row.system], color=colours[row.model], alpha=0.6
        )
    for name in sorted({row.model for row in rows}):
        axes.plot([], [], "o", color=colours[name], label=name)
    for name in sorted({row.system for row in rows}):
        axes.plot([], [], markers[name], color="grey", label=name)
    ends = [min(row.published for row in rows) / 1.3, max(row.published for row in rows) * 1.3]
    axes.plot(ends, ends, "-", color="black", linewidth=1)
    for part in (0.85, 1.15):
        axes.plot(ends, [part * end for end in ends], ":", color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="published tokens/s/device", ylabel="predicted tokens/s/device")
    all_rows = summary(rows)["all"]
    axes.set_title(
        f"{len(rows)} rows, MAPE {all_rows['mape']:.1%}, {all_rows['predicted_too_fast']} too fast "
        "(above the line), dotted: 15 %"
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="*", default=list(CLUSTERS))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--recordings", type=Path, default=Path("run/planner-recordings"))
    parser.add_argument("--only-recorded", action="store_true", help="make no new tiny runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    import mindspeed.megatron_adaptor  # noqa: F401
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    chosen = [
        row
        for row in published()
        if left_out(row) is None
        and row["system"] in options.systems
        and row["model"] in options.models
    ]
    found: list[Row] = []
    refused: list[str] = []
    for one in predict_all(chosen, options.recordings, options.only_recorded):
        if isinstance(one, str):
            refused.append(one)
            print(one, file=sys.stderr, flush=True)
            continue
        found.append(one)
        print(
            f"{one.model:16} {one.system:6} {one.precision:6} {one.layout:44} {one.published:8.0f} "
            f"{one.predicted:8.0f} {100 * one.error:+6.1f} % {one.limit}",
            flush=True,
        )
    write(found, refused, options.json)
    plot(found, options.json.with_suffix(".png"))
    print(json.dumps(summary(found), indent=1))


if __name__ == "__main__":
    main()
