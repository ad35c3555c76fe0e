"""``mindspeed quickstart``: the plan, what is skipped, and the whole way in small."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from mindspeed import recipes
from mindspeed.cli import quickstart, watch
from mindspeed.errors import ConfigError


def arguments(*words):
    parser = argparse.ArgumentParser()
    quickstart.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_the_default_is_four_processes_with_tensor_and_pipeline_parallelism():
    plan = quickstart._plan(arguments())
    assert (plan.ranks, plan.tp, plan.pp, plan.iterations) == (4, 2, 2, 600)


def test_ranks_must_be_a_multiple_of_the_layout():
    with pytest.raises(ConfigError, match="--nproc 3 is not divisible by --tp 2 x --pp 1 = 2"):
        quickstart._plan(arguments("--nproc", 3, "--pp", 1))
    assert quickstart._plan(arguments("--nproc", 4, "--pp", 1)).ranks == 4


def test_the_recipe_is_found_and_is_what_the_trainer_accepts(tmp_path):
    pytest.importorskip("megatron.core")
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.recipe import parse_with_recipe
    from mindspeed.training.resolve import resolve

    plan = quickstart._plan(arguments("--workdir", tmp_path))
    args = resolve(parse_with_recipe(plan.pretrain_command()[1:], build_parser()), 4).args
    assert (args.num_layers, args.hidden_size, args.seq_length) == (4, 128, 128)
    assert (args.data_parallel_size, args.global_batch_size) == (1, 16)
    assert args.load == args.save == str(plan.checkpoints)
    with pytest.raises(ConfigError, match="no recipe 'quick'; there are quickstart"):
        recipes.path("quick")


def test_finished_steps_are_skipped_until_their_input_changes(tmp_path):
    plan = quickstart._plan(arguments("--workdir", tmp_path, "--iters", 10))
    steps = {step.title.split()[0]: step for step in quickstart._steps(plan)}
    plan.corpus.write_text("{}\n")
    plan.tokenizer.mkdir()
    config = plan.tokenizer / "tokenizer_config.json"
    config.write_text("{}")
    os.utime(plan.corpus, (100, 100))
    os.utime(config, (200, 200))
    assert steps["collect"].done() and steps["train"].done()
    os.utime(plan.corpus, (300, 300))
    assert not steps["train"].done()
    assert not steps["pretrain"].done()
    plan.checkpoints.mkdir()
    (plan.checkpoints / "latest_checkpointed_iteration.txt").write_text("10")
    assert steps["pretrain"].done()


def test_metrics_are_followed_by_whole_lines_also_when_a_resume_cuts_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert watch.new_records(path, 0) == ([], 0)
    path.write_text('{"iteration": 1}\n{"iterat')
    records, position = watch.new_records(path, 0)
    assert records == [{"iteration": 1}]
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n')
    assert watch.new_records(path, position)[0] == [{"iteration": 2}]
    path.write_text("")
    assert watch.new_records(path, 500) == ([], 0)


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
    watch.follow(process, metrics, 0, 3, Console(file=output, width=100))
    text = output.getvalue()
    assert "    3  loss 4.500   9,000 tokens/s   1:15 to go" in text
    assert "    3  validation loss 4.750" in text


def test_the_tokenizer_of_the_second_step_reads_the_corpus(tmp_path):
    plan = quickstart._plan(arguments("--workdir", tmp_path))
    plan.corpus.write_text(json.dumps({"text": "the import statement " * 200}) + "\n")
    shown = quickstart._train_tokenizer(plan, Console(file=io.StringIO()))
    assert "_import" in shown
    assert (plan.tokenizer / "tokenizer_config.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_way_in_small_and_again(tmp_path, capsys):
    pytest.importorskip("megatron.core")
    pytest.importorskip("matplotlib")
    small = ("--workdir", tmp_path / "qs", "--iters", 20)
    assert quickstart.run(arguments(*small)) == 0
    text = capsys.readouterr().out
    first, last = map(float, re.search(r"loss (\d\.\d+) -> (\d\.\d+)", text).groups())
    assert 7.0 < first < 8.0
    assert last < first - 0.5
    for name in ("loss.png", "sample.txt", "checkpoints/iter_0000020", "tensorboard"):
        assert (tmp_path / "qs" / name).exists()
    assert quickstart.run(arguments(*small)) == 0
    assert capsys.readouterr().out.count("done before") == 6
