"""``mindspeed quickstart``: its steps, which are skipped, how commands run, and a whole run."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from mindspeed.cli import quickstart
from mindspeed.cli.main import COMMANDS
from mindspeed.cli.quickstart_plan import QUESTIONS, TRACKER, QuickstartStep, typed, words
from mindspeed.data import quickstart_corpus
from mindspeed.errors import ConfigError, MindSpeedError, TrainingError
from tests.support import commands_job
from tests.support.lazy import needs


def arguments(*words):
    parser = argparse.ArgumentParser()
    quickstart.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def make_plan(*words):
    return quickstart.make_plan(arguments(*words))


def quiet():
    return Console(file=io.StringIO(), width=100)


class TestPlan:
    def test_the_default_is_four_processes_with_tensor_and_pipeline_parallelism(self):
        plan = make_plan()
        assert (plan.ranks, plan.tp, plan.pp) == (4, 2, 2)
        assert (plan.iterations, plan.tuning_iterations) == (400, 120)

    def test_ranks_must_be_a_multiple_of_the_layout(self):
        with pytest.raises(ConfigError, match="--nproc 3 is not divisible by --tp 2 x --pp 1 = 2"):
            make_plan("--nproc", 3, "--pp", 1)
        assert make_plan("--nproc", 4, "--pp", 1).ranks == 4

    def test_every_step_is_a_command_and_reads_what_an_earlier_one_writes(self, tmp_path):
        written = set()
        for step in make_plan("--workdir", tmp_path).steps():
            assert step.command[0] in COMMANDS
            assert set(step.inputs) <= written
            written |= {step.output, step.metrics}

    def test_the_trainer_accepts_the_recipe_with_the_flags_of_the_step(self, tmp_path):
        needs("megatron.core")
        from mindspeed.training.arguments import build_parser
        from mindspeed.training.recipe import parse_with_recipe
        from mindspeed.training.resolve import resolve

        plan = make_plan("--workdir", tmp_path)
        step = next(step for step in plan.steps() if step.command[0] == "pretrain")
        args = resolve(parse_with_recipe(list(step.command[1:]), build_parser()), 4).args
        assert (args.num_layers, args.hidden_size, args.seq_length) == (4, 128, 128)
        assert (args.data_parallel_size, args.global_batch_size) == (1, 16)
        assert args.load == args.save == str(plan.checkpoints)

    @pytest.mark.parametrize(
        ("name", "count", "given", "used"),
        [("cuda", 1, None, "cpu"), ("cuda", 4, None, None), ("cuda", 1, "cuda", "cuda")],
    )
    def test_the_cpu_is_used_where_there_are_fewer_devices_than_processes(
        self, monkeypatch, name, count, given, used
    ):
        monkeypatch.setenv("MINDSPEED_DEVICE", "")  # restored afterwards, whatever is set meanwhile
        monkeypatch.delenv("MINDSPEED_DEVICE")
        if given:
            monkeypatch.setenv("MINDSPEED_DEVICE", given)
        here = SimpleNamespace(name=name, on_host=name == "cpu", count=lambda: count)
        monkeypatch.setattr("mindspeed.device.current", lambda: here)
        console = quiet()
        quickstart._one_device_per_rank(make_plan(), console)
        assert os.environ.get("MINDSPEED_DEVICE") == used
        assert ("using the CPU" in console.file.getvalue()) == (used == "cpu")


class TestStep:
    def test_a_step_is_done_until_an_input_is_newer_than_its_output(self, tmp_path):
        source, output = tmp_path / "source", tmp_path / "output"
        step = QuickstartStep("x", ("corpus",), output, (source,))
        source.write_text("")
        assert not step.done()
        output.write_text("")
        os.utime(source, (100, 100))
        os.utime(output, (200, 200))
        assert step.done()
        os.utime(source, (300, 300))
        assert not step.done()
        source.unlink()
        assert not step.done()

    def test_a_training_is_done_when_its_checkpoint_has_all_iterations(self, tmp_path):
        tracker = tmp_path / TRACKER
        step = QuickstartStep("x", ("pretrain",), tracker, how="training", iterations=10)
        assert (step.done(), step.trained) == (False, 0)
        tracker.write_text("8\n")
        assert (step.done(), step.trained) == (False, 8)
        tracker.write_text("10")
        assert step.done()

    def test_a_command_is_printed_as_one_would_type_it(self):
        command = words("generate", "greedy", load=Path("a b"), prompt=("x", "y"), max_new_tokens=3)
        assert command[-1] == "--greedy"
        shown = typed(command, width=50)
        assert shown == (
            "mindspeed generate --load 'a b' --prompt x \\\n"
            "    --prompt y --max-new-tokens 3 --greedy"
        )
        assert typed(("generate", "--prompt=it's\na")) == r"mindspeed generate --prompt $'it\'s\na'"
        assert words("plot", runs=("r",), output="o") == ("plot", "r", "--output=o")


class TestRunning:
    def test_printed_output_is_shown_and_saved_if_it_is_the_result(self, tmp_path):
        console = Console(file=io.StringIO(), width=100)
        output = tmp_path / "models.txt"
        step = QuickstartStep("x", ("models", "llama2-7b"), output, keeps_text=True)
        quickstart.run_step(step, tmp_path / "log", console)
        assert "num_layers" in output.read_text().replace("-", "_")
        assert "more lines" in console.file.getvalue()

    @pytest.mark.slow
    def test_a_command_in_a_subprocess_logs_its_errors(self, tmp_path):
        log = tmp_path / "log"
        assert "llama2-7b" in quickstart._run_subprocess(["models"], log, quiet())
        with pytest.raises(MindSpeedError, match=rf"(?s)closest.*mindspeed plt failed; see {log}"):
            quickstart._run_subprocess(["plt"], log, quiet())

    def test_an_outdated_directory_is_removed_before_its_command_makes_it_anew(self, tmp_path):
        source, made = tmp_path / "source", tmp_path / "made"
        made.mkdir()
        (made / "old").write_text("")
        (made / "out").write_text("")
        source.write_text("")
        os.utime(made / "out", (100, 100))
        step = QuickstartStep(
            "x", ("models",), made / "out", (source,), replaces=made, keeps_text=True
        )
        quickstart.run_step(step, tmp_path / "log", quiet())
        assert [path.name for path in made.iterdir()] == ["out"]

    def test_a_plot_without_its_package_is_skipped(self, tmp_path, monkeypatch):
        (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n')
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        step = QuickstartStep("x", ("plot", str(tmp_path)), tmp_path / "loss.png")
        with pytest.raises(ConfigError, match="drawing needs matplotlib"):
            quickstart.run_step(step, tmp_path / "log", quiet())
        console = quiet()
        optional = QuickstartStep("x", step.command, step.output, optional=True)
        quickstart.run_step(optional, tmp_path / "log", console)
        assert "skipped: drawing needs matplotlib" in console.file.getvalue()

    def test_a_training_that_fails_shows_the_end_of_its_log(self, tmp_path):
        step = QuickstartStep(
            "x",
            ("pretrian",),
            tmp_path / TRACKER,
            how="training",
            iterations=3,
            metrics=tmp_path / "metrics.jsonl",
        )
        with pytest.raises(TrainingError, match=r"(?s)closest: pretrain.*the training failed; see"):
            quickstart.run_step(step, tmp_path / "log", quiet())


def test_metrics_are_followed_by_whole_lines_also_when_a_resume_cuts_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert quickstart.new_records(path, 0) == ([], 0)
    path.write_text('{"iteration": 1}\n{"iterat')
    records, position = quickstart.new_records(path, 0)
    assert records == [{"iteration": 1}]
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n')
    assert quickstart.new_records(path, position)[0] == [{"iteration": 2}]
    path.write_text("")
    assert quickstart.new_records(path, 500) == ([], 0)


def test_a_training_is_shown_with_losses_and_speed(tmp_path):
    script = (
        "import json, sys, time\n"
        "with open(sys.argv[1], 'w') as file:\n"
        "    for i in range(1, 4):\n"
        "        row = dict(iteration=i, lm_loss=7.5 - i, tokens_per_second=9e3, eta_seconds=75)\n"
        "        print(json.dumps(row), file=file, flush=True)\n"
        "    print(json.dumps(dict(iteration=3, validation_loss=4.75)), file=file)\n"
    )
    metrics = tmp_path / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-c", script, str(metrics)])
    output = io.StringIO()
    quickstart.follow(process, metrics, 0, 3, Console(file=output, width=100))
    text = output.getvalue()
    assert "    3  loss 4.500   9,000 tokens/s   1:15 left" in text
    assert "    3  validation loss 4.750" in text


def test_answers_are_shown_after_their_questions(tmp_path):
    path = tmp_path / "answers.txt"
    path.write_text(f"{QUESTIONS[0]} Yes\n----\n{QUESTIONS[1]} No\n----\n")
    assert quickstart.answers(path) == "is KeyError an exception? Yes\nis len an exception? No"


# Less to compute, beside fewer iterations. The whole corpus is what tests/data is about.
MODULES = 50
SHORT = {
    "pretrain": (
        *("--eval-iters=1", "--micro-batch-size=4", "--global-batch-size=8"),
        *("--save-interval=8", "--split=90,9,1"),  # each part gets one of few documents
    )
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_quickstart_and_its_repetition(ranks, tmp_path, capsys, monkeypatch):
    """Every command really runs, on forked ranks instead of new processes."""
    for module in ("megatron.core", "matplotlib", "transformers"):
        pytest.importorskip(module)

    def forked(command):
        given = dict(word.split("=", 1) for word in command[1:] if "=" in word)
        size = int(given.get("--nproc", 1))
        options = {"setup": commands_job.SETUP, "backend": None, "timeout": 240}
        results = ranks(size, commands_job.run, list(command), **options)
        assert [status for status, _, _ in results] == [0] * size, results[0][2]
        return results[0][1]

    monkeypatch.setattr(
        quickstart, "_run_subprocess", lambda command, log, console: forked(command)
    )
    monkeypatch.setattr(
        quickstart,
        "_train",
        lambda step, log, console: forked(step.command + SHORT.get(step.command[0], ())),
    )
    documented = quickstart_corpus._modules
    monkeypatch.setattr(
        quickstart_corpus, "_modules", lambda stdlib: itertools.islice(documented(stdlib), MODULES)
    )
    plan = make_plan("--workdir", tmp_path / "qs", "--iters", 16)
    small = arguments("--workdir", plan.workdir, "--iters", 16)
    assert quickstart.run(small) == 0
    text = capsys.readouterr().out
    first, last = map(float, re.search(r"pretraining +loss (\d\.\d+) -> (\d\.\d+)", text).groups())
    assert 7.0 < first < 8.0
    assert last < first - 0.3
    assert "(within 0.001)" in (plan.workdir / "verify.txt").read_text()
    for name in ("loss.png", "tuning.png", "sample.txt", "checkpoints/iter_0000016", "tensorboard"):
        assert (plan.workdir / name).exists()
    for name in ("pretrained", "tuned"):
        report = json.loads(plan.results(name).read_text())["tasks"]["boolq"]
        assert report["asked"] == report["questions"] > 40
    assert quickstart.run(small) == 0
    words_printed = " ".join(capsys.readouterr().out.split())
    assert words_printed.count("done before") == len(plan.steps())
