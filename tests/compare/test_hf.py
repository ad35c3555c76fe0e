"""Our training against transformers' model of the same weights, family by family."""

from __future__ import annotations

import json
import os
import shlex

import pytest

from tests.support.lazy import needs

needs("megatron.core", "transformers")

from mindspeed.cli.main import main
from tests.compare.layouts import SP2
from tests.support.tiny import CASES, LENGTH
from tests.support.trainer_job import SETUP

JOB = f"""
    --seq-length {LENGTH} --micro-batch-size 2 --global-batch-size 4 --lr 1 --train-iters 1
    --mock-data --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 64
    --transformer-impl local --no-gradient-accumulation-fusion
    --finetune --no-load-optim --no-load-rng --hidden-dropout 0 --attention-dropout 0
    --moe-aux-loss-coeff 0
"""
OWN_CODE = ("aquila", "internlm", "baichuan", "kimi")
"""Families whose classes are not in transformers."""
NOISY = ("mixtral", "glm4-moe", "glm4", "phi4-mini", "gemma3", "olmo2", "qwen3-next", "qwen3.5")
"""The formula of noise is too strict for them."""
QUICK = ("llama2-gqa", "qwen3-moe")
DAILY = ("bloom", "deepseek-v2", "gpt-oss", "qwen3-next", "gemma2")
NAMES = [*QUICK, *DAILY]
NAMES += [one for one in CASES if not one.startswith(OWN_CODE) and one not in NAMES]


def train(flags: str) -> None:
    """Train on this rank."""
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training.pretrain import pretrain

    pretrain(_prepare(shlex.split(flags), int(os.environ["WORLD_SIZE"])))


def recorded(rank_pool, tmp_path, name, flags="", world=1):
    """Directories of a recording and of transformers' files."""
    case, folder, a = CASES[name], tmp_path / "files", tmp_path / "a"
    case.save(case.model(), folder)
    job = f"--model {folder} --load hf:{folder} {JOB} {' '.join(case.flags)} {flags}"
    given = dict(setup=SETUP, backend=None, timeout=120)
    for n in (1, 2, 3) if name.startswith(NOISY) else ():
        more = f"--record {a}/noise-{n} --record-noise {n}"
        rank_pool.run(world, train, f"{job} {more}", **given)
    rank_pool.run(world, train, f"{job} --record {a}", **given)
    return a, folder


def compared(a, folder, tmp_path):
    """Exit status and the comparison as data."""
    written = tmp_path / "out.json"
    status = main(["compare", str(a), "--against", f"hf:{folder}", "--json", str(written)])
    return status, json.loads(written.read_text())


@pytest.mark.weekly_cases(*(one for one in NAMES if one not in (*QUICK, *DAILY)))
@pytest.mark.quick_cases(len(QUICK))
@pytest.mark.parametrize("name", NAMES)
def test_transformers_is_equal(rank_pool, tmp_path, name):
    status, found = compared(*recorded(rank_pool, tmp_path, name), tmp_path)
    assert status == 0, found["first"]
    assert not found["before"] and "B" not in found["only"]
    kinds = {(one["when"], one["module"].split(".")[-1], one["what"]) for one in found["tensors"]}
    assert kinds >= {
        ("begin", "word_embeddings", "weight"), ("end", "word_embeddings", "main_grad"),
        ("forward", "embedding", "output"), ("backward", "embedding", "grad_output"),
        ("forward", "0", "output"), ("backward", "1", "grad_output"),
        ("forward", "linear_proj", "output"), ("backward", "linear_proj", "grad_output"),
        ("forward", "loss", "per_token"), ("end", "final_layernorm", "main_grad"),
    }  # fmt: skip
    if name != "bloom":  # whose attention is no function of its own
        assert ("forward", "core_attention", "output") in kinds
    if CASES[name].config.get("num_experts"):
        assert ("forward", "router", "logits") in kinds and ("forward", "mlp", "output") in kinds
    assert len(found["tensors"]) >= 140


@pytest.mark.slow
def test_transformers_is_equal_in_another_layout(rank_pool, tmp_path):
    a, folder = recorded(rank_pool, tmp_path, "llama2-gqa", SP2, 2)
    status, found = compared(a, folder, tmp_path)
    assert status == 0 and len(found["tensors"]) >= 150, found["first"]


def test_what_differs_is_named(rank_pool, tmp_path, capsys):
    a, folder = recorded(rank_pool, tmp_path, "llama2-gqa")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    status, found = compared(a, folder, tmp_path)
    assert status == 1 and found["first"]["module"] == "decoder.layers.0.input_layernorm"

    run = json.loads((a / "run.json").read_text())
    (a / "run.json").write_text(json.dumps({**run, "moe_aux_loss_coeff": 0.1}))
    assert main(["compare", str(a), "--against", f"hf:{folder}"]) == 1
    assert "record A without --moe-aux-loss-coeff" in capsys.readouterr().err
    assert main(["compare", str(a), "--against", "hf:nowhere"]) == 1
    assert "give hf:DIR, a directory with config.json" in capsys.readouterr().err
