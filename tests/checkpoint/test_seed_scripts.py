"""The original suite's conversion scripts: their flags, on directories they were made for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.lazy import Lazy, needs

needs("megatron.core", "transformers")

from safetensors.torch import load_file

from tests.checkpoint import hf_ranks
from tests.support import forked
from tests.support.tiny import CASES

Target = Lazy("mindspeed.checkpoint.weights.convert", "Target")
convert = Lazy("mindspeed.checkpoint.weights.convert", "convert")
open_weights = Lazy("mindspeed.checkpoint.weights.convert", "open_weights")


SETUP = "tests.support.warm"
SCRIPTS = Path(__file__).parents[2] / "tools" / "ckpt_convert"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    CASES["llama2-gqa"].save(CASES["llama2-gqa"].model(), folder)
    return str(folder)


def words(source, output, *more):
    return ["--input-model-dir", str(source), "--output-model-dir", str(output), *more]


def same_model(checkpoint, source, folder):
    convert(open_weights(checkpoint), folder, Target("hf"))
    ours, theirs = (load_file(f"{f}/model.safetensors") for f in (folder, source))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def names(folder):
    found = {path.name for path in (folder / "release").iterdir()}
    return sorted(found - {"digests.jsonl"})


def test_the_readmes_commands(llama, ranks, tmp_path):
    """--tensor/pipeline-model-parallel-size, then another layout, then --deepspeed."""
    parallel = ["--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2"]
    sizes = ["--num_layers=2", "--num_heads=4", "--num_kv_heads=2", "--hidden_size=32"]
    source = ["--src-tensor-model-parallel-size=2", "--src-pipeline-model-parallel-size=2"]
    target = ["--tgt-tensor-model-parallel-size=4", "--orig-vocab-size=99"]
    first, second, third = (tmp_path / str(number) for number in range(3))
    calls = [
        ("from_hugging_face", [*words(llama, first), *parallel, *sizes, "--merge-mlp"]),
        ("change_layout", [*words(first, second), *source, *target]),
        ("from_hugging_face", [*words(llama, third), "--deepspeed"]),
    ]
    (results,) = ranks(1, hf_ranks.seed_scripts, calls, setup=SETUP)
    assert [code for code, _ in results] == [0, 0, 0], results
    assert names(first) == [f"mp_rank_{tp:02d}_{pp:03d}" for tp in (0, 1) for pp in (0, 1)]
    assert names(second) == [f"mp_rank_{tp:02d}" for tp in range(4)]
    same_model(second, llama, tmp_path / "hf")
    assert names(third) == ["mp_rank_00_model_states.pt"]
    assert (third / "latest").read_text() == "release"
    same_model(third, llama, tmp_path / "hf2")


def test_flags_that_contradict_config_json(llama, ranks, tmp_path):
    wrong = {
        "--type 7B": "or 32 layers of 4096, but the model has 2 layers of 32",
        "--type 8X": "--type 8X is not one of",
        "--num_layers 3": "--num_layers 3, but the model has 2",
        "--num_kv_heads 4": "--num_kv_heads 4, but the model has 2",
        "--bias": "--bias: the model's attention has no bias",
        "--pse": "--pse: the model has no linear biases",
        "--use_wpack_rotray": "--use_wpack_rotray: the model has no W_pack",
    }
    output = tmp_path / "out"
    calls = [("from_hugging_face", [*words(llama, output), *flags.split()]) for flags in wrong]
    (results,) = ranks(1, hf_ranks.seed_scripts, calls, setup=SETUP)
    for (code, errors), message in zip(results, wrong.values(), strict=True):
        assert code == 1 and message in errors
    assert not output.exists()


@pytest.mark.slow
def test_the_script_of_bloom_runs(ranks, tmp_path):
    config = {**CASES["bloom"].config, "n_layer": 4, "num_hidden_layers": 4}
    case = type(CASES["bloom"])("Bloom", config)
    case.save(case.model(), tmp_path / "hf")
    script = SCRIPTS / "bloom" / "convert_weights_from_huggingface.py"
    layers = ["--pipeline-model-parallel-size=2", "--partition-layers=3,1"]
    given = [*words(tmp_path / "hf", tmp_path / "out"), *layers, "--pse"]
    run = forked.run_scripts
    (results,) = ranks(1, run, [str(script)], *given, setup=SETUP, backend=None, timeout=200)
    status, text = results[str(script)]
    assert status == 0, text
    same_model(tmp_path / "out", tmp_path / "hf", tmp_path / "again")
    for script in ("convert_weights_from_huggingface", "convert_weights_when_tp_pp_change"):
        assert "ckpt_convert" in (SCRIPTS / "llama" / f"{script}.py").read_text()
