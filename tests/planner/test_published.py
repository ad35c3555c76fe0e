"""The blind test of predicted times: the committed figures are those of the published rows."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MEASURED = {
    "all": 0.10,
    "half test": 0.15,
    "nemo dense test": 0.12,
    "megatron-2022 dense test": 0.14,
    "mindspeed dense test": 0.14,
    "fsdp dense test": 0.14,
    "nemo experts test": 0.22,
    "precision nvfp4": 0.10,
}
"""Bounds of the mean error, with the level of the stack where it has one."""


@pytest.fixture(scope="module")
def benchmark():
    """The script that plans the rows."""
    spec = importlib.util.spec_from_file_location(
        "planner_rows_all", ROOT / "benchmarks/planner.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def result(benchmark) -> Any:
    """What it wrote."""
    return json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def predictions(benchmark) -> Any:
    """The predictions that it wrote."""
    return benchmark.read(benchmark.RESULTS.with_suffix(".csv"))


def test_rows_are_whole(benchmark):
    rows = benchmark.planned_rows()
    for row in rows:
        sizes = [row.size(name) for name in ("tp", "cp", "pp", "dp", "seq", "micro_batch")]
        assert min(sizes) >= 1 and row.tokens_per_second > 0, row.number
        assert row.size("global_batch") % (row.size("micro_batch") * row.size("dp")) == 0
        assert row.source and row.release and row.half in ("tune", "test")


def test_a_layout_of_a_stack_has_one_row(benchmark):
    """The newest release, the median of its repeats."""
    known = Counter(
        (row.system, row.device, row.precision, row.compiled, row.notes, *row.words, row.layout)
        for row in benchmark.planned_rows()
        if row.bridge
    )
    assert set(known.values()) == {1}


def test_whoever_chooses_rates_sees_the_tuning_half_alone(benchmark, predictions):
    halves: dict[str, set[str]] = {}
    for row in benchmark.published_rows():
        halves.setdefault(row.system, set()).add(row.half)
    assert all(len(found) == 1 for found in halves.values())  # a system is not divided
    assert {row.half for row in benchmark.tuning_rows()} == {"tune"}
    count = Counter(row.half for row in benchmark.planned_rows())
    assert min(count.values()) > 80
    wrong = [
        dataclasses.replace(one, published=1e9 * one.published) if one.half == "test" else one
        for one in predictions
    ]
    assert benchmark.levels(wrong) == benchmark.levels(predictions)


def test_every_row_is_predicted_refused_or_left_out(benchmark, result, predictions):
    planned = benchmark.planned_rows()
    assert len(predictions) + len(result["refused"]) == len(planned)
    assert sum(result["left_out"].values()) == result["rows"] - len(planned)


def test_predictions_are_of_published_rows(benchmark, predictions):
    known = {row.number: row for row in benchmark.planned_rows()}
    for one in predictions:
        row = known[one.number]
        assert (row.system, row.half, row.model) == (one.system, one.half, one.model)
        assert row.tokens_per_second == one.published


def test_summary_follows_from_the_predictions(benchmark, result, predictions):
    assert benchmark.summary(predictions) == result["summary"]


def test_error_is_what_was_measured(result):
    """The bounds are a little above what was measured."""
    for name, mape in MEASURED.items():
        assert result["summary"][name]["mape_with_level"] <= mape, name
    for name in ("all", "half test"):
        assert abs(result["summary"][name]["bias_with_level"]) <= 0.03, name
        assert result["summary"][name]["inside_the_interval"] >= 0.9, name


def test_the_page_has_the_committed_figures(benchmark, result):
    assert benchmark.page(result) in benchmark.DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("model", ["llama3-70b", "llama3.1-405b"])
def test_published_layouts_are_candidates_of_a_search(benchmark, model):
    """Of 126 layers too, which 8 x 8 stages only divide with embedding and head."""
    from mindspeed.planner.search.space import JobSizes, Space

    layers, heads = (80, 64) if model == "llama3-70b" else (126, 128)
    for row in benchmark.planned_rows():
        if row.model != model or row.system != "megatron-bridge-h100":
            continue
        one = row.layout
        sizes = JobSizes(one.devices, one.global_batch_size, layers, heads, 8, 8192)
        space = Space.of(sizes).only(("tp", "cp", "pp", "vpp", "split", "mbs"), one)
        assert one in set(space.layouts(sizes, Counter()))


SAMPLE = (
    ("megatron-2022", "gpt-22B", "selective"),
    ("megatron-bridge-gb200", "llama3-8b", ""),
    ("mindspeed-llm", "qwen15_0point5b_ptd", "none"),
)
"""System, model and recomputation of rows that are planned here."""


@pytest.mark.slow
def test_a_sample_of_rows_has_the_committed_figures(benchmark, predictions, tmp_path):
    import mindspeed.megatron_adaptor  # noqa: F401 - before megatron.core
    from mindspeed.planner.isolated import import_ahead

    import_ahead()
    rows = benchmark.planned_rows()
    chosen = [
        next(row for row in rows if (row.system, row.model, row.recompute) == one) for one in SAMPLE
    ]
    committed = {one.number: one for one in predictions}
    for here in benchmark.predict_all(chosen, tmp_path / "recordings"):
        assert not isinstance(here, str), here
        there = committed[here.number]
        assert here.predicted == pytest.approx(there.predicted, rel=0.01)
        assert here.memory_gib == pytest.approx(there.memory_gib, rel=0.01)


@pytest.mark.slow
def test_a_recorded_run_is_timed_as_an_executed_one(benchmark):
    """Operators, messages, waits and blocks come back with the same times, on a pipeline."""
    import mindspeed.megatron_adaptor  # noqa: F401 - before megatron.core
    from mindspeed.planner import isolated
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.cluster.rates import DeviceRates
    from mindspeed.planner.count.recorder import record
    from mindspeed.planner.count.recording import Point
    from mindspeed.planner.job import Job
    from mindspeed.planner.layout import Layout

    recordings = importlib.import_module("planner_recordings")
    flags = (
        "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 "
        "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--vocab-size 1024 --seq-length 256 --max-position-embeddings 256 --bf16 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    )
    layout = Layout(devices=8, global_batch_size=6, tp=2, pp=2, mbs=1)
    point, cluster = Point(layout.overrides(), 8, 1), load_cluster("a100")
    executed = isolated.call(record, Job(flags.split()), point, cluster)
    recorded = isolated.call(recordings.record, Job(flags.split()), point)
    assert recordings.replay(recorded, DeviceRates(cluster)) == executed


def seconds_of_actions(recording: Any) -> list[float]:
    """Seconds of each action, without what lies between actions."""
    from mindspeed.planner.count.recording import PER_STEP, Part

    found = [0.0] * len(recording.row)
    for block in recording.blocks:
        if block.part not in (*PER_STEP, Part.GAP):
            found[block.action] += block.seconds
    return found


@pytest.mark.slow
def test_a_job_in_fp8_is_timed_as_rows_in_fp8_are_priced(benchmark):
    """A plan executes emulated casts and products; a row is executed in bf16."""
    import mindspeed.megatron_adaptor  # noqa: F401 - before megatron.core
    from mindspeed.planner import isolated
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.cluster.rates import DeviceRates, RatedJob
    from mindspeed.planner.count.recorder import record
    from mindspeed.planner.count.recording import Point
    from mindspeed.planner.job import Job
    from mindspeed.planner.layout import Layout

    recordings = importlib.import_module("planner_recordings")
    flags = (
        "--num-layers 1 --hidden-size 4096 --ffn-hidden-size 8192 --num-attention-heads 32 "
        "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--vocab-size 32000 --seq-length 4096 --max-position-embeddings 4096 --bf16 "
        "--make-vocab-size-divisible-by 1 --use-flash-attn --attention-dropout 0 "
        "--hidden-dropout 0"
    )
    layout = Layout(devices=1, global_batch_size=2, tp=1, pp=1, mbs=1)
    point, cluster = Point(layout.overrides(), 1, 0), load_cluster("h100")
    device = dataclasses.replace(cluster.device, host_us=0.0)  # of a host that emulates
    cluster = dataclasses.replace(cluster, device=device)
    recorded = isolated.call(recordings.record, Job(flags.split()), point)
    plain = recordings.replay(recorded, DeviceRates(cluster))
    program = RatedJob("bf16", "fp8", frozenset({32001}))
    priced = recordings.replay(recorded, DeviceRates(cluster, program))
    words = [*flags.split(), "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
    planned = isolated.call(record, Job(words), point, cluster)
    for one, other, bf16 in zip(*map(seconds_of_actions, (planned, priced, plain)), strict=True):
        assert one == pytest.approx(other, rel=0.02)
        assert one < 0.95 * bf16


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [40, 30, 20, 10], -1.0),
        ([1, 2, 2, 3], [1, 3, 2, 4], 0.9487),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_rank_correlation(benchmark, one, other, expected):
    """The third value is that of scipy.stats.spearmanr."""
    assert benchmark.spearman(one, other) == expected
