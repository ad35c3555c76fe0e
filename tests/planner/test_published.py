"""The blind test of predicted times: the committed figures are those of the published rows."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MEASURED = {
    "all": (0.25, 0.97),
    "llama3-70b h100": (0.01, None),
    "llama3.1-405b h100": (0.05, None),
    "llama3.1-405b": (0.16, 0.85),
    "llama3-70b": (0.22, 0.91),
    "deepseek-v3": (0.21, 0.85),
    "qwen3-235b-a22b": (0.17, 0.88),
    "qwen3-30b-a3b": (0.46, 0.82),
    "bf16": (0.10, None),
}
"""Bounds of the mean error and of the rank correlation."""


@pytest.fixture(scope="module")
def benchmark():
    """The script that plans the rows."""
    spec = importlib.util.spec_from_file_location("planner_rows", ROOT / "benchmarks/planner.py")
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


def test_rows_are_whole(benchmark):
    rows = benchmark.published()
    assert len(rows) == 268
    for row in rows:
        layout = [int(row[name]) for name in ("devices", "tp", "pp", "cp", "vpp", "ep")]
        assert min(layout) >= 1 and layout[0] % (layout[1] * layout[2] * layout[3]) == 0
        assert float(row["tokens_per_second_per_device"]) > 0


def test_every_row_is_predicted_refused_or_left_out(benchmark, result):
    rows = benchmark.published()
    planned = [row for row in rows if benchmark.left_out(row) is None]
    assert len(result["predictions"]) + len(result["refused"]) == len(planned)
    assert sum(result["left_out"].values()) == len(rows) - len(planned)


def test_predictions_are_of_published_rows(benchmark, result):
    known = {
        (r["release"], r["model"], r["system"], float(r["tokens_per_second_per_device"]))
        for r in benchmark.published()
    }
    for one in result["predictions"]:
        assert (one["release"], one["model"], one["system"], one["published"]) in known


def test_summary_follows_from_the_predictions(benchmark, result):
    rows = [benchmark.Row(**one) for one in result["predictions"]]
    assert benchmark.summary(rows) == result["summary"]


def test_error_is_what_was_measured(result):
    """Blind: nothing is fitted to these rows. The bounds are a little above what was measured."""
    for name, (mape, spearman) in MEASURED.items():
        assert result["summary"][name]["mape"] <= mape, name
        assert spearman is None or result["summary"][name]["spearman"] >= spearman, name


def test_planned_layouts_are_at_least_as_fast_as_published_ones(benchmark):
    """For three models on three sizes, under the same model of time and memory."""
    experts = importlib.import_module("planner_experts")
    rows = json.loads(experts.RESULTS.read_text(encoding="utf-8"))
    wanted = [(case.model, size) for case in experts.CASES for size in case.sizes]
    assert [(row["model"], row["devices"]) for row in rows] == wanted
    for row in rows:
        assert row["fastest_seconds"] <= row["expert_seconds"], row
        assert max(row["fastest_gib"], row["best_gib"]) <= row["memory_limit_gib"], row
        assert row["best_seconds"] <= 1.05 * row["fastest_seconds"], row


@pytest.mark.parametrize("model", ["llama3-70b", "llama3.1-405b"])
def test_published_layouts_are_candidates_of_a_search(benchmark, model):
    """Of 126 layers too, which 8 x 8 stages only divide with embedding and head."""
    from mindspeed.planner.search.space import Sizes, Space

    layers, heads = (80, 64) if model == "llama3-70b" else (126, 128)
    for row in benchmark.published():
        if row["model"] != model or row["system"] != "h100" or benchmark.left_out(row):
            continue
        one = benchmark.layout_of(row)
        sizes = Sizes(one.devices, one.global_batch_size, layers, heads, 8, 8192)
        space = Space.of(sizes).only(("tp", "cp", "pp", "vpp", "split", "mbs"), one)
        assert one in set(space.layouts(sizes, Counter()))


@pytest.fixture(scope="module")
def predicted(benchmark, tmp_path_factory) -> Any:
    """The rows of the smallest model, planned here."""
    import mindspeed.megatron_adaptor  # noqa: F401 - before megatron.core

    rows = [
        row
        for row in benchmark.published()
        if row["model"] == "llama3-8b" and benchmark.left_out(row) is None
    ]
    return list(benchmark.predict_all(rows, tmp_path_factory.mktemp("recordings")))


@pytest.mark.slow
def test_rows_of_the_smallest_model_have_the_committed_error(benchmark, predicted, result):
    assert len(predicted) == 5
    assert benchmark.summary(predicted)["all"]["mape"] < 0.25
    committed = [one for one in result["predictions"] if one["model"] == "llama3-8b"]
    for here, there in zip(predicted, committed, strict=True):
        assert here.published == there["published"]
        assert here.predicted == pytest.approx(there["predicted"], rel=0.02)


@pytest.mark.slow
def test_a_recorded_run_is_timed_as_an_executed_one(benchmark):
    """Operators, messages, waits and segments come back with the same times, on a pipeline."""
    import mindspeed.megatron_adaptor  # noqa: F401 - before megatron.core
    from mindspeed.planner import isolated
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.cluster.rates import DeviceRates
    from mindspeed.planner.composed.tiny_run import Point, run
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
    executed = isolated.call(run, Job(flags.split()), point, cluster)
    recorded = isolated.call(recordings.record, Job(flags.split()), point)
    assert recordings.replay(recorded, DeviceRates(cluster)) == executed


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
