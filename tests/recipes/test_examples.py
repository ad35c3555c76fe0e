"""The example scripts: up to date, clear about what they need, and every command of theirs valid.

Each script is run by bash with a ``torchrun`` and a ``mindspeed`` that only write down how they
were called; the commands are then checked in one process, as far as they go without a model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.models.presets import presets
from tests.recipes.example_jobs import SETUP, check, train_two_steps

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/*.sh"))
WRITE_DOWN = '#!/bin/sh\nprintf "%s\\n" "$(basename "$0")" "$@" > "$RECORD"\n'


def run_script(name: str, folder: Path, *flags: str, **variables: str) -> tuple[list[str], str]:
    """How a script calls its program, word by word, and what it prints to standard error."""
    programs, record = folder / "bin", folder / "record"
    programs.mkdir(exist_ok=True)
    record.unlink(missing_ok=True)
    for program in ("torchrun", "mindspeed"):
        (programs / program).write_text(WRITE_DOWN)
        (programs / program).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(record)}
    done = subprocess.run(
        ["bash", str(ROOT / name), *flags],
        env=environment | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    words = record.read_text().splitlines() if record.exists() else []
    return words, done.stderr


def preset_of(name: str) -> str:
    """The preset a script is about: that of its recipe or, where it names none, its model."""
    text = (ROOT / name).read_text()
    return max((p for p in presets() if f"/{p}}}" in text or f" {p} " in text), default="llama-13b")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Stand-ins for what the scripts want: token files, a tokenizer, models without weights."""
    folder = tmp_path_factory.mktemp("examples")
    from mindspeed.data.tokenizer import save_tokenizer, train_bpe

    save_tokenizer(train_bpe(["to be or not to be"] * 9, 300), folder / "tokenizer")
    for suffix in ("", "_packed_input_ids", "_packed_attention_mask", "_packed_labels"):
        for ending in ("bin", "idx"):
            (folder / f"corpus{suffix}_document.{ending}").touch()
    for name, preset in presets().items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(dict(preset.config)))
    return folder


def variables(name: str, folder: Path) -> dict[str, str]:
    tunes = Path(name).name.startswith("tune")
    return {
        "DATA_PATH": str(folder / ("corpus" if tunes else "corpus_document")),
        "TOKENIZER": str(folder / "tokenizer"),
        "LOAD": f"hf:{folder / preset_of(name)}",
        "LORA_LOAD": str(folder),
    }


@pytest.fixture(scope="module")
def commands(data):
    return {name: run_script(name, data, **variables(name, data))[0] for name in SCRIPTS}


@pytest.fixture(scope="module")
def problems(commands, rank_pool):
    (found,) = rank_pool.run(1, check, commands, setup=SETUP, backend=None, timeout=240)
    return found


def test_the_scripts_match_their_table():
    tool = [sys.executable, str(ROOT / "tools" / "example_scripts.py"), "--check"]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_a_valid_command(name, problems):
    assert problems[name] is None


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_paths_names_the_missing_variable(name, tmp_path):
    words, errors = run_script(name, tmp_path)
    assert words == []
    assert ": LOAD: is not set: " in errors or ": DATA_PATH: is not set: " in errors


def test_additional_arguments_reach_the_command_and_weighted_prefixes_stay_separate(data):
    name = "examples/llama/pretrain_llama_7B_zero_8p.sh"
    given = variables(name, data) | {"DATA_PATH": "0.3 a 0.7 b", "NNODES": "4", "NODE_RANK": "2"}
    words, _ = run_script(name, data, "--train-iters", "7", **given)
    assert words[:7] == ["torchrun", "--nnodes", "4", "--nproc-per-node", "8", "--node-rank", "2"]
    at = words.index("--data-path")
    assert words[at + 1 : at + 5] == ["0.3", "a", "0.7", "b"]
    assert words[-2:] == ["--train-iters", "7"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, parallel",
    [
        ("examples/llama/pretrain_llama_7B_zero_8p.sh", ["--no-fp16"]),
        (
            "examples/llama2/pretrain_llama2_70B_ptd_64p.sh",
            ["--tensor-model-parallel-size", "2", "--num-query-groups", "2"],
        ),
    ],
)
def test_a_script_trains_a_small_model_for_two_steps(name, parallel, data, commands, ranks):
    steps = ranks(2, train_two_steps, commands[name], parallel, setup=SETUP, timeout=240)
    assert [step["iteration"] for step in steps] == [2, 2]
    (losses,) = [step["losses"] for step in steps if step["losses"]]  # of the rank that records
    assert len(losses) == 2
    assert all(5 < loss < 7 for loss in losses)  # ln 501 = 6.2
