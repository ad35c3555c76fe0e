"""The planner's times against published ones: all rows, one command.

    python benchmarks/planner.py [--systems megatron-bridge-h100] [--recordings DIR]

Every row of tests/planner/data/published_rows.csv that has enough fields is planned with the preset
of its device (:mod:`planner_rows`, :mod:`planner_stacks`). Errors are of tokens per second and
device: **positive means predicted too fast**, the step takes longer than planned. Reported are the
mean absolute error, its mean (bias), the rank correlation (Spearman), and how many rows are inside
the interval that a plan prints, for which the row's own layout does not count. With ``--systems``
the rows of other systems stay as they are in the file.

Rates may be chosen on the rows whose ``half`` is ``tune``; :func:`tuning_rows` is the only door to
them for whoever chooses. The level of a stack is what its tuning rows took beside their
predictions on a kind of device, the median; it is reported beside the figures without it, and never
applied in a plan.

Small runs are executed once and timed for every device and precision (planner_recordings.py), so
that all rows are priced again in a minute after a change of rates.
"""

from __future__ import annotations

import argparse
import csv
import json
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from planner_rows import PublishedRow, published_rows

RESULTS = Path(__file__).parent / "results" / "planner-published.json"


@dataclass(frozen=True)
class Row:
    """A published row with what is predicted.

    Attributes:
        number: of the row in the file.
        kind: ``dense`` or ``experts``.
        half: ``tune`` or ``test``.
        check: whether the row wants a look at its source.
        published: tokens per second and device.
        predicted: the same.
        seconds: predicted, of a step.
        bubble: predicted.
        memory_gib: predicted, of tensors on the fullest rank.
        limit: predicted.
    """

    number: int
    system: str
    stack: str
    half: str
    check: bool
    model: str
    device: str
    precision: str
    kind: str
    layout: str
    published: float
    predicted: float
    seconds: float
    bubble: float
    memory_gib: float
    limit: str

    @property
    def place(self) -> str:
        """Stack, kind of device and of model, which share a level."""
        from planner_stacks import family

        return f"{self.stack} {family(self.device)} {self.kind}"

    @property
    def error(self) -> float:
        """Relative, of tokens per second: positive if the prediction is too fast."""
        return self.predicted / self.published - 1


def planned_rows() -> list[PublishedRow]:
    """The rows that are planned."""
    return [row for row in published_rows() if not row.left_out]


def tuning_rows() -> list[PublishedRow]:
    """The rows on which rates may be chosen."""
    return [row for row in planned_rows() if row.half == "tune"]


def levels(rows: Iterable[Row]) -> dict[str, float]:
    """Published over predicted tokens of each stack on each kind of device, by its tuning rows."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.half == "tune":
            found.setdefault(row.place, []).append(1 / (1 + row.error))
    return {place: median(values) for place, values in found.items()}


def predict_all(
    rows: Iterable[PublishedRow],
    recordings: Path,
    only_recorded: bool = False,
    change: Callable[[PublishedRow, Any], Any] = lambda row, cluster: cluster,
) -> Iterator[Row | str]:
    """Plan the rows. Yields why a row could not be planned.

    Args:
        rows: the rows.
        recordings: directory of recordings.
        only_recorded: a recording that is not there is an error.
        change: of the cluster of a row.
    """
    for row in rows:
        try:
            found = price_of(row, recordings, only_recorded, change)
        except Exception as error:
            yield f"row {row.number}: {row.system} {row.model}: {error}".splitlines()[0]
            continue
        yield Row(
            row.number,
            row.system,
            row.stack,
            row.half,
            row.check == "1",
            row.model,
            row.device,
            row.precision,
            "experts" if row.routed else "dense",
            f"{row.layout.devices}: {row.layout} seq={row.seq}",
            row.tokens_per_second,
            found.tokens_per_second_per_device,
            found.seconds,
            found.bubble,
            found.peak_bytes / 2**30,
            found.limit,
        )


def price_of(
    row: PublishedRow,
    recordings: Path,
    only_recorded: bool = False,
    change: Callable[[PublishedRow, Any], Any] = lambda row, cluster: cluster,
) -> Any:
    """What the planner says about a row; arguments as of :func:`predict_all`."""
    from planner_recordings import RecordedRuns, ReplayedRuns
    from planner_stacks import cluster_of, rates_of

    from mindspeed.planner.compose.job import Tracer
    from mindspeed.planner.job import Job
    from mindspeed.planner.time.price import predict

    job, cluster = Job(row.words), change(row, cluster_of(row))
    shape, vocabulary = _shape(job, row, recordings)
    kept = frozenset({vocabulary, *([row.routed[0]] if row.routed else [])})
    runs = RecordedRuns(recordings, job, only_recorded)
    replayed = ReplayedRuns(runs, lambda: rates_of(row, kept, cluster))
    traces = Tracer(job, cluster, cache=replayed).alike(row.layout, shape)
    return predict(traces, shape, cluster, row.layout)


def _shape(job: Any, row: PublishedRow, recordings: Path) -> tuple[Any, int]:
    """The shape, and rows of the output layer on a rank; kept beside the recordings."""
    from planner_recordings import digest

    from mindspeed.files import atomic_write_bytes
    from mindspeed.planner import isolated
    from mindspeed.planner.shape import Shape

    recordings.mkdir(parents=True, exist_ok=True)
    known = [item.name for item in fields(Shape)]  # a file of other code has others
    path = recordings / f"{digest(repr((row.words, row.layout, known)))}.shape"
    if not path.exists():
        atomic_write_bytes(path, pickle.dumps(isolated.call(_shape_here, job, row.layout)))
    found: tuple[Any, int] = pickle.loads(path.read_bytes())
    return found


def _shape_here(job: Any, layout: Any) -> tuple[Any, int]:
    from mindspeed.planner.shape import shape_of

    args = job.settings(layout.overrides(), layout.devices).args
    return shape_of(args), args.padded_vocab_size // layout.tp


FOREIGN = ("fsdp",)
"""Stacks that are planned as Megatron jobs although they are none."""


def ratio(row: Row, level: Mapping[str, float]) -> float:
    """Measured over predicted seconds of a row, with the level of its stack if that is foreign."""
    return (1 + row.error) * (level.get(row.place, 1.0) if row.stack in FOREIGN else 1.0)


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float | int | None]]:
    """Errors of all rows, of both halves, of each system, stack, device, precision and kind."""
    from mindspeed.planner.interval import JobKind, interval_of

    level = levels(rows)
    inside = {}
    for row in rows:
        kind = JobKind(row.kind == "experts", row.precision)
        found = interval_of(kind, row.device, partial(_same_layout, row))
        inside[row.number] = found.low <= ratio(row, level) <= found.high
    groups: dict[str, list[Row]] = {"all": list(rows)}
    for name in ("half", "system", "stack", "device", "precision", "kind"):
        for row in sorted(rows, key=lambda row: str(getattr(row, name))):
            groups.setdefault(f"{name} {getattr(row, name)}", []).append(row)
    for row in sorted(rows, key=lambda row: (row.stack, row.kind, row.half)):
        groups.setdefault(f"{row.stack} {row.kind} {row.half}", []).append(row)
    return {
        name: {
            "rows": len(group),
            "mape": round(mean(abs(row.error) for row in group), 4),
            "bias": round(mean(row.error for row in group), 4),
            "mape_with_level": round(
                mean(abs((1 + row.error) * level.get(row.place, 1.0) - 1) for row in group), 4
            ),
            "bias_with_level": round(
                mean((1 + row.error) * level.get(row.place, 1.0) - 1 for row in group), 4
            ),
            "predicted_too_fast": sum(row.error > 0 for row in group),
            "inside_the_interval": round(mean(inside[row.number] for row in group), 4),
            "spearman": spearman([r.published for r in group], [r.predicted for r in group]),
        }
        for name, group in groups.items()
    }


def _same_layout(row: Row, run: Any) -> bool:
    return bool(run.layout == row.layout)


DOCS = Path(__file__).parent.parent / "docs" / "planner.md"
BEGIN, END = "<!-- figures of benchmarks/planner.py -->\n", "<!-- end of figures -->\n"
SHOWN = (
    *("all", "half tune", "half test"),
    *("nemo dense tune", "nemo dense test", "nemo experts tune", "nemo experts test"),
    *("megatron-2022 dense tune", "megatron-2022 dense test", "mindspeed dense test"),
    *("fsdp dense tune", "fsdp dense test"),
    *("device a100", "device h100", "device b200", "device b300", "device gb200"),
    *("device gb300", "device ascend-910b"),
    *("precision bf16", "precision fp16", "precision fp8", "precision mxfp8", "precision nvfp4"),
    *("kind dense", "kind experts"),
)
"""Groups of :func:`summary` that the page shows."""


def page(result: Mapping[str, Any]) -> str:
    """The table of the documentation."""
    lines = [
        "| rows | number | mean error | bias | with the stack's level | bias | inside | rank |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in SHOWN:
        if (one := result["summary"].get(name)) is None:
            continue
        rank = "" if one["spearman"] is None else f"{one['spearman']:.2f}"
        lines.append(
            f"| {name} | {one['rows']} | {one['mape']:.1%} | {one['bias']:+.1%} | "
            f"{one['mape_with_level']:.1%} | {one['bias_with_level']:+.1%} | "
            f"{one['inside_the_interval']:.0%} | {rank} |"
        )
    return "\n".join(lines) + "\n"


def write_page(result: Mapping[str, Any]) -> None:
    """Put the table into the documentation."""
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n{page(result)}\n{END}{after}", encoding="utf-8")


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
    if path == RESULTS:  # of all rows
        write_ratios(rows)
    reasons = Counter(row.left_out for row in published_rows() if row.left_out)
    result = {
        "rows": len(list(published_rows())),
        "left_out": dict(sorted(reasons.items())),
        "refused": list(refused),
        "levels": {place: round(level, 4) for place, level in levels(rows).items()},
        "summary": summary(rows),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if path == RESULTS:
        write_page(result)
    with path.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [*(item.name for item in fields(Row)), "error"])
        table.writeheader()
        for row in rows:
            values = {name: _stable(value) for name, value in asdict(row).items()}
            table.writerow({**values, "error": round(row.error, 4)})


def _stable(value: Any) -> Any:
    """Numbers without the digits that differ from one processor to another."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


def read(path: Path) -> list[Row]:
    """The rows of a CSV that :func:`write` wrote."""
    kinds: dict[str, Callable[[str], Any]]
    kinds = {"int": int, "float": float, "bool": lambda text: text == "True", "str": str}
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(**{one.name: kinds[str(one.type)](values[one.name]) for one in fields(Row)})
            for values in csv.DictReader(file)
        ]


def write_ratios(rows: Sequence[Row]) -> None:
    """Measured over predicted seconds of Megatron's jobs, from which intervals follow."""
    from mindspeed.planner import interval

    with interval.RATIOS.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["stack", "model", "device", "experts", "precision", "layout", "ratio"])
        for row in rows:
            if row.stack not in FOREIGN:
                kind = [int(row.kind == "experts"), row.precision]
                values = [row.stack, row.model, row.device, *kind, row.layout]
                table.writerow([*values, round(1 + row.error, 4)])
    interval.published_runs.cache_clear()


def plot(rows: Sequence[Row], path: Path) -> None:
    """Predicted over published throughput, a colour for each stack and a marker for each half."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 6), layout="constrained")
    colours = {name: f"C{i}" for i, name in enumerate(sorted({row.stack for row in rows}))}
    for row in rows:
        marker = "o" if row.half == "tune" else "^"
        axes.plot(row.published, row.predicted, marker, color=colours[row.stack], alpha=0.5)
    for name, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=name)
    for half, marker in (("tune", "o"), ("test", "^")):
        axes.plot([], [], marker, color="grey", label=half)
    ends = [min(row.published for row in rows) / 1.3, max(row.published for row in rows) * 1.3]
    axes.plot(ends, ends, "-", color="black", linewidth=1)
    for part in (0.85, 1.15):
        axes.plot(ends, [part * end for end in ends], ":", color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="published tokens/s/device", ylabel="predicted tokens/s/device")
    axes.set_title(f"{len(rows)} rows; above the line: predicted too fast; dotted: 15 %")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="*")
    parser.add_argument("--recordings", type=Path, default=Path("run/planner-recordings"))
    parser.add_argument("--only-recorded", action="store_true", help="make no new recordings")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    import mindspeed.megatron_adaptor  # noqa: F401
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    from mindspeed.planner.isolated import import_ahead

    import_ahead()
    chosen = [row for row in planned_rows() if row.system in (options.systems or [row.system])]
    found: list[Row] = []
    table = options.json.with_suffix(".csv")
    if options.systems and table.exists():
        found = [row for row in read(table) if row.system not in options.systems]
    refused: list[str] = []
    for one in predict_all(chosen, options.recordings, options.only_recorded):
        if isinstance(one, str):
            refused.append(one)
            print(one, file=sys.stderr, flush=True)
            continue
        found.append(one)
        print(
            f"{one.system:22} {one.model:16} {one.precision:6} {one.layout:50} "
            f"{one.published:8.0f} {one.predicted:8.0f} {100 * one.error:+6.1f} % {one.limit}",
            flush=True,
        )
    found.sort(key=lambda row: row.number)
    write(found, refused, options.json)
    plot(found, options.json.with_suffix(".png"))
    print(json.dumps(summary(found), indent=1))


if __name__ == "__main__":
    main()
