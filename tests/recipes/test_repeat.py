"""The ``config.yaml`` of a checkpoint repeats its run; an example script runs under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.processes import free_port
from tests.recipes.example_jobs import SETUP, SMALL, train_and_digest
from tests.support.trainer_job import metrics

ROOT = Path(__file__).resolve().parents[2]
NULL = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "500"]
HEADS = ["--num-query-groups", "2", "--tensor-model-parallel-size", "2"]


@pytest.mark.slow
def test_the_recipe_beside_a_checkpoint_repeats_the_run(ranks, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    given = ["--config", "llama2-70b", *SMALL, *HEADS, *NULL]
    given += ["--no-bf16", "--lr", "1e-3", "--save", str(first)]
    before = ranks(2, train_and_digest, given, setup=SETUP, timeout=240)
    config = first / "iter_0000002" / "config.yaml"
    again = ["--config", str(config), "--save", str(second)]
    assert ranks(2, train_and_digest, again, setup=SETUP, timeout=240) == before
    losses = [[r["lm_loss"] for r in metrics(d / "metrics.jsonl")] for d in (first, second)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


@pytest.mark.weekly
@pytest.mark.slow
def test_an_example_script_trains_under_torchrun(tmp_path):
    from mindspeed.data.preprocess import PreprocessOptions, preprocess
    from mindspeed.data.tokenizer import save_tokenizer, train_bpe
    from mindspeed.data.tokenizer_types import TokenizerOptions

    lines = ['{"text": "to be or not to be, that is the question"}'] * 300
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    tokenizer = tmp_path / "tokenizer"
    save_tokenizer(train_bpe(lines, 300), tokenizer)
    options = TokenizerOptions(tokenizer_model=str(tokenizer))
    preprocess(PreprocessOptions((tmp_path / "corpus.jsonl",), tmp_path / "corpus", options))
    unset = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {
        "DATA_PATH": str(tmp_path / "corpus_text_document"),
        "TOKENIZER": str(tokenizer),
        "SAVE": str(tmp_path / "save"),
        "NPROC_PER_NODE": "2",
        "MASTER_PORT": str(free_port()),
        "MINDSPEED_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    script = "examples/llama/pretrain_llama_7B_zero_8p.sh"
    done = subprocess.run(
        ["bash", str(ROOT / script), *SMALL, "--no-fp16", "--vocab-size", "300"],
        env={k: v for k, v in os.environ.items() if k not in unset} | variables,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(metrics(tmp_path / "save" / "metrics.jsonl")) == 2
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "2"
