"""The original suite's names, scripts and command lines keep working."""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed.data.tokenizer import save_tokenizer, train_bpe
from tests.original_suite.seed_jobs import SETUP, initialize, refused, run_script, train

ROOT = Path(__file__).resolve().parents[2]
MODEL = shlex.split("""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --fp16 --seed 42
    --tokenizer-type PretrainedFromHF --tokenizer-not-use-fast
""")  # as in the documentation, but for sizes
TRAINING = shlex.split("""
    --global-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data --no-fp16 --no-add-gate
    --use-rotary-position-embeddings --DDP-impl local --data-impl mmap
    --no-contiguous-buffers-in-local-ddp --no-untie-embeddings-and-output-weights
""")
PARALLEL = ["--tensor-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seed") / "llama-7b-hf"
    words = ["Give three tips for staying healthy. How are you? Yes No Question: Answer:"]
    save_tokenizer(train_bpe(words * 9, 320), folder)
    return folder


@pytest.fixture(scope="module")
def trained(tokenizer, tmp_path_factory, rank_pool):
    checkpoint = tmp_path_factory.mktemp("seed_ckpt")
    flags = [*MODEL, *TRAINING, *PARALLEL, "--tokenizer-name-or-path", str(tokenizer)]
    flags += ["--save", str(checkpoint)]
    return rank_pool.run(2, train, flags, setup=SETUP, timeout=240), checkpoint


def test_ascendspeed_only_points_at_mindspeed():
    for path in (ROOT / "ascendspeed").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        assert set(imported(tree)) <= {"mindspeed", "importlib", "sys", "typing", "warnings"}, path
        defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert set(defined) <= {"__getattr__"}, path


def imported(tree: ast.AST) -> Iterator[str]:
    """Packages that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def test_the_data_handlers_are_found_by_their_names():
    from ascendspeed.data import data_handler
    from ascendspeed.data.data_handler import (
        BelleMultiTurnInstructionHandler,
        GeneralInstructionHandler,
        LeetcodePythonInstructionHandler,
        MOSSInstructionHandler,
    )
    from mindspeed.data.handlers import find

    assert GeneralInstructionHandler is find("GeneralInstructionHandler")
    assert BelleMultiTurnInstructionHandler is find("BelleMultiTurnInstructionHandler")
    assert MOSSInstructionHandler is find("MOSSInstructionHandler")
    assert LeetcodePythonInstructionHandler is find("LeetcodePythonInstructionHandler")
    with pytest.raises(AttributeError, match="NoSuchHandler"):
        data_handler.NoSuchHandler  # noqa: B018


@pytest.mark.slow
def test_a_script_trains_the_model_of_its_provider_with_its_forward_step(trained):
    results, checkpoint = trained
    assert {result["passes"] > 0 for result in results} == {True}
    assert [result["iteration"] for result in results] == [2, 2]
    assert results[0]["built"] == [(True, True)]
    assert results[0]["hidden_size"] == 64
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_initialize_megatron_needs_no_training_flags(tokenizer, ranks):
    flags = [*MODEL, *PARALLEL, "--tokenizer-name-or-path", str(tokenizer)]
    results = ranks(2, initialize, flags, setup=SETUP, timeout=120)
    assert results[0] == results[1]
    assert results[0]["no_load_rng"] and results[0]["no_load_optim"] and results[0]["callable"]
    assert results[0]["tensor"] == 2


def test_unsupported_options_are_refused_immediately(ranks):
    (said,) = ranks(1, refused, MODEL, setup=SETUP, backend=None)
    assert said[0] == "call initialize_megatron() first"
    assert "pretrain(train_valid_test_datasets_provider=...) is not supported" in said[1]
    assert said[2] == "args_defaults: no flag sets no_such_flag"


@pytest.mark.slow
def test_the_inference_script_does_all_six_tasks(trained, tokenizer, ranks):
    flags = [*MODEL, *PARALLEL, "--load", str(trained[1]), "--tokenizer-name-or-path"]
    flags += [str(tokenizer), "--max-new-tokens", "4", "--prompt-type", "alpaca", "--task"]
    results = ranks(
        2,
        run_script,
        "tasks/inference/inference_llama.py",
        [*flags, *"123456"],
        "How are you?\nq\n",
        setup=SETUP,
        timeout=240,
    )
    assert [code for code, *_ in results] == [0, 0], results
    text, other = results[0][1], results[1][1]
    assert [text.count(f"[task {number}]") for number in range(1, 6)] == [1, 1, 1, 1, 3]
    assert other == ""


@pytest.mark.slow
def test_the_evaluation_script_takes_the_documented_command_line(
    trained, tokenizer, ranks, tmp_path
):
    record = {"question": "is it so", "passage": "It is so.", "title": "So", "answer": True}
    (tmp_path / "boolq").mkdir()
    (tmp_path / "boolq" / "dev.jsonl").write_text(json.dumps(record) + "\n")
    flags = ["--task-data-path", str(tmp_path / "boolq"), "--task", "boolq", *MODEL, *PARALLEL]
    flags += ["--max-new-tokens", "1", "--load", str(trained[1])]
    flags += ["--tokenizer-name-or-path", str(tokenizer)]
    script = "tasks/evaluation/evaluation_llama.py"
    results = ranks(2, run_script, script, flags, setup=SETUP, timeout=240)
    assert [code for code, *_ in results] == [0, 0], results
    assert "boolq" in results[0][1]


def test_a_wrong_flag_of_a_task_script_is_named(ranks):
    flags = ["--load", "x", "--tensor-model-parallel", "2"]
    ((code, _, errors),) = ranks(
        1, run_script, "tasks/inference/inference_gpt.py", flags, setup=SETUP, backend=None
    )
    assert code == 1
    assert (
        "unknown flag --tensor-model-parallel; did you mean --tensor-model-parallel-size" in errors
    )


@pytest.mark.slow
def test_the_training_scripts_of_the_root_run(ranks):
    text = {path.read_text().split(chr(10), 2)[2] for path in ROOT.glob("pretrain_*.py")}
    assert len(text) == 1  # one of them is all of them, but for the first line
    flags = ["--config", "llama-7b", "--num-layers", "2", "--dry-run"]
    results = ranks(
        2, run_script, "pretrain_llama.py", flags, setup=SETUP, backend=None, timeout=300
    )
    assert [code for code, *_ in results] == [0, 0]
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert f"parameters       {2 * layer + 2 * 32000 * 4096 + 4096:,}" in results[0][1]
    assert results[1][1] == ""
