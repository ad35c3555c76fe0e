"""Metrics in JSON lines, TensorBoard and W&B: the same values, each iteration once."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.lazy import Lazy, needs

needs("megatron.core")

from mindspeed.errors import ConfigError
from mindspeed.training import sinks
from mindspeed.training.arguments import build_parser
from mindspeed.training.options import LoggingOptions
from mindspeed.training.recipe import parse_with_recipe
from tests.support.trainer_job import SETUP, train

resolve = Lazy("mindspeed.training.resolve", "resolve")


def opened(**given):
    """The sinks of a run of ten iterations."""
    return sinks.open_sinks(Namespace(**{"save": None, "train_iters": 10, **given}), 0)


def tensorboard(directory, done=0, **given):
    return sinks.TensorBoard(str(directory), LoggingOptions(**given), done)


def wandb_run(directory, done, **given):
    options = LoggingOptions(wandb_project="llama", **given)
    return sinks.WeightsAndBiases(options, directory, done, vars(options))


def points(directory):
    """What TensorBoard shows: name of the curve -> [(step, value)]."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory), {"scalars": 0})
    events.Reload()
    return {
        name: [(point.step, point.value) for point in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def record_run(sink, iterations, offset=0.0):
    for i in iterations:
        sink.record(i, {"iteration": i, "lm_loss": 10.0 - i + offset, "eta_seconds": 1.0}, "")


class TestJsonLines:
    def test_a_resumed_run_drops_what_the_lost_iterations_wrote(self, tmp_path):
        path = tmp_path / "run" / "metrics.jsonl"
        record_run(sinks.JsonLines(path, 0), range(1, 6))
        with open(path, "a") as file:
            file.write('{"iteration": 6, "lm_lo')  # killed while writing
        record_run(sinks.JsonLines(path, 3), range(4, 7), offset=0.5)
        found = [(r["iteration"], r["lm_loss"]) for r in records(path)]
        assert found == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.5), (5, 5.5), (6, 4.5)]

    def test_a_record_without_newline_does_not_swallow_the_next(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"iteration": 1}\n{"iteration": 2}')
        record_run(sinks.JsonLines(path, 2), [3])
        assert [r["iteration"] for r in records(path)] == [1, 3]

    def test_a_nan_loss_is_written_as_null(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        sinks.JsonLines(path, 0).record(1, {"iteration": 1, "lm_loss": float("nan")}, "")
        assert records(path)[0]["lm_loss"] is None

    def test_a_new_run_begins_a_new_file(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        record_run(sinks.JsonLines(path, 0), [1, 2])
        record_run(sinks.JsonLines(path, 0), [1])
        assert [r["iteration"] for r in records(path)] == [1]


class TestTensorBoard:
    def test_metrics_have_the_names_of_megatron_lm(self, tmp_path):
        sink = tensorboard(tmp_path)
        sink.record(1, {"lm_loss": 2.0, "learning_rate": 0.1, "memory_gb": 1.0}, "")
        sink.record(1, {"validation_loss": 3.0, "validation_perplexity": 20.0}, "")
        assert sink.close() == f"tensorboard --logdir {tmp_path}"
        assert set(points(tmp_path)) == {"lm loss", "learning-rate", "lm loss validation"}

    def test_megatron_lm_flags_select_metrics_and_intervals(self, tmp_path):
        sink = tensorboard(
            tmp_path,
            tensorboard_log_interval=2,
            log_memory_to_tensorboard=True,
            log_loss_scale_to_tensorboard=False,
            log_validation_ppl_to_tensorboard=True,
        )
        for i in range(1, 5):
            metrics = {"memory_gb": 1.0, "loss_scale": 2.0, "validation_perplexity": 20.0}
            sink.record(i, metrics, "")
        sink.close()
        found = points(tmp_path)
        assert set(found) == {"memory-gb", "lm loss validation ppl"}
        assert [step for step, _ in found["memory-gb"]] == [2, 4]

    def test_a_resumed_run_hides_the_points_of_the_lost_iterations(self, tmp_path):
        for done, iterations, offset in ((0, range(1, 6), 0.0), (3, range(4, 7), 0.5)):
            sink = tensorboard(tmp_path, done)
            record_run(sink, iterations, offset)
            sink.close()
        expected = [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.5), (5, 5.5), (6, 4.5)]
        assert points(tmp_path)["lm loss"] == expected


class FakeWandb:
    """Keeps what is recorded, step by step."""

    def __init__(self):
        self.runs = []

    def Settings(self, **given):
        return SimpleNamespace(base_url="https://127.0.0.1:9", **given)

    def init(self, **given):
        run = SimpleNamespace(given=given, logged=[], offline=True, dir=f"{given['dir']}/x/files")
        run.log = lambda values, step: run.logged.append((step, values))
        run.finish = lambda: None
        self.runs.append(run)
        return run


@pytest.fixture
def fake_wandb(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")  # no .netrc
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


class TestWeightsAndBiases:
    def test_the_run_is_named_by_megatron_lms_flags_and_has_its_configuration(
        self, fake_wandb, tmp_path
    ):
        sink = wandb_run(tmp_path / "night", 0, wandb_entity="lab")
        record_run(sink, [5])
        given = fake_wandb.runs[0].given
        assert (given["project"], given["name"], given["entity"]) == ("llama", "night", "lab")
        assert given["mode"] == "offline"  # there is no key
        assert given["config"]["wandb_project"] == "llama"
        assert fake_wandb.runs[0].logged == [(5, {"lm loss": 5.0})]
        assert sink.close() == f"wandb sync {tmp_path / 'night' / 'x'}"

    def test_a_resumed_run_keeps_its_identity_and_a_new_one_gets_its_own(
        self, fake_wandb, tmp_path
    ):
        for done in (0, 20, 40, 0):
            wandb_run(tmp_path, done, wandb_exp_name="x")
        first, second, third, fresh = (run.given["id"] for run in fake_wandb.runs)
        assert first == second == third != fresh
        assert {run.given["resume"] for run in fake_wandb.runs} == {"allow"}
        assert {run.given["name"] for run in fake_wandb.runs} == {"x"}

    def test_no_step_is_recorded_twice(self, fake_wandb, tmp_path):
        record_run(wandb_run(tmp_path, 0), [1, 2, 3, 4, 5])  # killed, saved at 3
        with open(tmp_path / "wandb" / "recorded_steps.txt", "a") as file:
            file.write("6")  # and in the middle of a line
        sink = wandb_run(tmp_path, 3)
        record_run(sink, [4, 5, 6, 6, 7])  # 6 twice: training and validation
        record_run(wandb_run(tmp_path, 6), [7, 8])
        record_run(wandb_run(tmp_path, 0), [1])  # anew
        steps = [[step for step, _ in run.logged] for run in fake_wandb.runs]
        assert steps == [[1, 2, 3, 4, 5], [6, 6, 7], [8], [1]]

    def test_wandb_is_offline_without_network_despite_an_api_key(self, monkeypatch, fake_wandb):
        monkeypatch.setenv("WANDB_API_KEY", "k")
        assert sinks._wandb_mode("https://127.0.0.1:9", 0.5) == "offline"
        monkeypatch.setattr(
            sinks.socket, "create_connection", lambda *_: SimpleNamespace(close=lambda: None)
        )
        assert sinks._wandb_mode("https://127.0.0.1:9") == "online"
        monkeypatch.setenv("WANDB_MODE", "disabled")
        assert sinks._wandb_mode("https://127.0.0.1:9") is None

    @pytest.mark.slow
    def test_the_real_package_writes_a_run_without_a_network(self, monkeypatch, tmp_path):
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        sink = wandb_run(tmp_path, 0)
        record_run(sink, range(1, 4))
        command = sink.close()
        assert command.startswith(f"wandb sync {tmp_path}")
        (file,) = Path(command.removeprefix("wandb sync ")).glob("run-*.wandb")
        assert file.stat().st_size > 0
        identity = (tmp_path / "wandb" / "run_id.txt").read_text().strip()
        assert file.stem == f"run-{identity}"


def test_missing_packages_are_named_before_anything_starts(monkeypatch):
    flags = ["--num-layers=2", "--hidden-size=8", "--num-attention-heads=2", "--seq-length=8"]
    flags += ["--lr=1", "--train-iters=1", "--mock-data", "--tokenizer-type=NullTokenizer"]
    flags += ["--vocab-size=16", "--tensorboard-dir=tb", "--wandb-project=llama"]
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        resolve(parse_with_recipe(flags, build_parser()), 1)
    assert str(error.value).splitlines() == [
        "--tensorboard-dir tb needs the package tensorboard: pip install 'mindspeed[suite]'",
        "--wandb-project llama needs the package wandb: pip install wandb",
    ]


@pytest.mark.slow
def test_one_rank_writes_and_a_resumed_training_repeats_no_iteration(ranks, tmp_path, monkeypatch):
    save, board = tmp_path / "run", tmp_path / "board"
    flags = ["--pipeline-model-parallel-size", "2", "--save", str(save), "--save-interval", "2"]
    flags += ["--tensorboard-dir", str(board), "--eval-interval", "2", "--eval-iters", "1"]
    options = {"setup": SETUP, "backend": None, "timeout": 240}
    first = ranks(2, train, [*flags, "--train-iters", "4", "--lr-decay-iters", "6"], **options)
    assert [result["error"] for result in first] == [None, None]
    assert len(list(board.iterdir())) == 1
    before = points(board)["lm loss"]
    again = [*flags, "--load", str(save), "--ckpt-step", "2", "--train-iters", "6"]
    again += ["--override-opt-param-scheduler"]
    second = ranks(2, train, [*again, "--lr-decay-iters", "6"], **options)
    assert [(result["error"], result.get("iteration")) for result in second] == [(None, 6)] * 2
    assert len(list(board.iterdir())) == 2
    shown = points(board)
    assert [step for step, _ in shown["lm loss"]] == [1, 2, 3, 4, 5, 6]
    assert shown["lm loss"][:4] == before  # the same run, bit for bit
    assert [step for step, _ in shown["lm loss validation"]] == [2, 4, 6]
    written = [r for r in records(save / "metrics.jsonl") if "lm_loss" in r]
    assert [r["iteration"] for r in written] == [1, 2, 3, 4, 5, 6]
    assert [r["lm_loss"] for r in written] == pytest.approx(
        [value for _, value in shown["lm loss"]], rel=1e-6
    )


class Full:
    """A file on a disk that fills up."""

    def write(self, text):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    def flush(self): ...

    def close(self):
        self.write("")


def test_training_continues_when_the_metrics_disk_is_full(tmp_path, capsys):
    _, kept = opened(metrics_file=str(tmp_path / "m.jsonl"))
    kept.record(1, {"iteration": 1}, "one")
    kept._sink._file.close()
    kept._sink._file = Full()
    for iteration in (2, 3):
        kept.record(iteration, {"iteration": iteration}, "line")
    assert kept.close() is None
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(" WARNING metrics file") and "No space left on device" in line
    assert [r["iteration"] for r in records(tmp_path / "m.jsonl")] == [1]


def test_training_begins_without_a_metrics_file_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("a")
    _, kept = opened(metrics_file=str(tmp_path / "file" / "m.jsonl"))
    kept.record(1, {"iteration": 1}, "one")
    assert kept.close() is None
    (line,) = capsys.readouterr().out.splitlines()
    assert "WARNING metrics file" in line and "continues without it" in line
