"""``mindspeed evaluate``: errors come first; one whole run from files to a table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.lazy import needs

needs("megatron.core")

from mindspeed.cli import evaluate
from mindspeed.cli.inference_flags import command_line
from mindspeed.errors import ConfigError, DataError
from tests.support import commands_job, lm_eval_ranks
from tests.support.fabricated import WRITERS

DATA = ("--task-data-path", "x")


def parsed(*words):
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    return parser.parse_args(["--load", "nowhere", *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("evaluate")
    lm_eval_ranks.make_model(root / "model")
    lm_eval_ranks.make_data(root / "harness")
    for name in ("boolq", "mmlu"):
        WRITERS[name](root / name)
    return root


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "boolq"), "--task-data-path is needed with --engine mindspeed"),
        (("--task", "boolq", *DATA, "--data-dir", "d"), "--data-dir belongs to --engine lm-eval"),
        (("--engine", "lm-eval", "--tasks", "x"), "--data-dir is needed with --engine lm-eval"),
        (("--task", "boolq", *DATA, "--greedy", "--temperature", "1"), "exclude each other"),
        (
            ("--task", "human_eval", *DATA, "--samples", "5"),
            "--samples 5: greedy answers are identical",
        ),
        (("--task", "boolq", *DATA, "--temperature", "0"), "--temperature 0.0: sampling needs"),
        (("--task", "human_eval", *DATA), "--allow-code-execution"),
        (("--task", "boolq", "boolq", "--task-data-path", "a", "b"), "name every task once"),
    ],
)
def test_contradictions_are_named(words, message):
    with pytest.raises(ConfigError) as error:
        evaluate.run(parsed(*words))
    assert message in str(error.value)


def test_data_is_read_before_the_model_is_looked_for(tmp_path):
    with pytest.raises(DataError, match="no files of boolq found"):
        evaluate.run(parsed("--task", "boolq", "--task-data-path", str(tmp_path)))


def test_every_rank_gets_the_same_command():
    words = ["--task", "mmlu", "boolq", "--task-data-path", "a b", "boolq=-c", "--tp", "2"]
    args = parsed(*words, "--dp", "3", "--output", "out", "--limit", "5", "--allow-code-execution")
    command = command_line("evaluate", args)
    assert command[1:4] == ["-m", "mindspeed", "evaluate"]
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    assert parser.parse_args(command[4:]) == args


def test_two_replicas_write_one_report(folder, ranks):
    flags = ["--load", f"hf:{folder / 'model'}", "--dp", "2", "--output", str(folder / "out")]
    flags += ["--task", "boolq", "mmlu", "--num-fewshot", "1", "--max-length", "200"]
    flags += ["--task-data-path", str(folder / "boolq"), str(folder / "mmlu")]
    setup = "tests.support.warm"
    done = ranks(2, lm_eval_ranks.command, flags, setup=setup, backend=None, timeout=200)
    assert done == [0, 0]
    results = json.loads((folder / "out" / "results.json").read_text())
    lines = (folder / "out" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 20 and results["tasks"]["mmlu"]["questions"] == 10
    right = sum(sample["correct"] for sample in samples if sample["task"] == "boolq")
    assert results["tasks"]["boolq"]["score"] == right / 10
    assert results["model"]["path"] == str(folder / "model")


def test_a_directory_of_another_run_is_refused_before_the_model_is_loaded(folder, ranks):
    (folder / "taken").mkdir()
    (folder / "taken" / "run.json").write_text('{"model": {}}')
    words = ["--load", f"hf:{folder / 'model'}", "--output", str(folder / "taken")]
    words += ["--task", "boolq", "--task-data-path", str(folder / "boolq")]
    setup = "tests.support.warm"
    [message] = ranks(1, lm_eval_ranks.refused, words, setup=setup, backend=None)
    assert "holds another run, which differs in model and settings and tasks" in message


def test_a_chat_template_goes_around_every_prompt(folder, ranks):
    """Compared choices and generated texts both, in one process."""
    flags = ["--load", f"hf:{folder / 'model'}", "--prompt-type", "alpaca", "--limit", "2"]
    flags += ["--task", "boolq", "--task-data-path", str(folder / "boolq"), "--max-length", "250"]
    setup = "tests.support.warm"
    for scoring in ("loglikelihood", "generate"):
        out = folder / f"chat-{scoring}"
        words = [*flags, "--scoring", scoring, "--output", str(out)]
        assert ranks(1, lm_eval_ranks.command, words, setup=setup, backend=None) == [0]
        assert json.loads((out / "results.json").read_text())["settings"]["prompt_type"] == "alpaca"
        assert len((out / "samples.jsonl").read_text().splitlines()) == 2


def test_from_files_to_a_table(folder, ranks):
    flags = ["--load", f"hf:{folder / 'model'}", "--tp", "2", "--task", "mmlu"]
    flags += ["--num-fewshot", "0", "--task-data-path", str(folder / "mmlu")]
    command, setup = ["evaluate", *flags], commands_job.SETUP
    answers = ranks(2, commands_job.run, command, setup=setup, backend=None, timeout=240)
    assert [status for status, *_ in answers] == [0, 0], answers
    names = [line.split()[0] for line in answers[0][1].splitlines()]
    assert names[0] == "task"
    assert names[2:] == ["mmlu", "STEM", "high_school_physics", "other", "anatomy"]


HARNESS = ["--load", "hf:nowhere", "--engine", "lm-eval", "--tasks", "boolq", "--data-dir", "none"]


def test_without_the_extra_the_way_to_install_it_is_said(ranks):
    setup = "tests.support.warm"
    [message] = ranks(1, lm_eval_ranks.without_the_harness, HARNESS, setup=setup, backend=None)
    assert message.endswith('(lm_eval): pip install "mindspeed[eval]"')


def harness(words: list[str]) -> int:
    """The command with two of the harness' folders: to read all 13,000 files takes long."""
    from lm_eval.tasks._index import TaskIndex

    build = TaskIndex.build

    def of_two_folders(paths: list[Path]) -> dict[str, Any]:
        return build([root / name for root in paths for name in ("super_glue", "humaneval")])

    TaskIndex.build = staticmethod(of_two_folders)  # of this process only
    return lm_eval_ranks.command(words)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_harness_on_local_files_from_the_command_line(folder, ranks):
    pytest.importorskip("lm_eval")
    WRITERS["human_eval"](folder / "harness" / "human_eval")
    out = folder / "harness-scores"
    words = ["--load", f"hf:{folder / 'model'}", "--engine", "lm-eval", "--limit", "3"]
    words += ["--tasks", "boolq,humaneval", "--data-dir", str(folder / "harness")]
    words += ["--allow-code-execution", "--max-length", "1100", "--output", str(out)]
    setup = "tests.support.warm"
    [status] = ranks(1, harness, words, setup=setup, backend=None, timeout=500)
    assert status == 0
    results = json.loads((out / "results.json").read_text())
    assert set(results["results"]) == {"boolq", "humaneval"}
    assert results["config"]["model_files"]["path"] == str(folder / "model")
    assert len((out / "samples.jsonl").read_text().splitlines()) == 6
