"""A Megatron-LM script is a job like one of the trainer: captured, counted, refused."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import types
from collections import Counter

import pytest

from mindspeed.adaptor.script_job import ScriptJob
from mindspeed.errors import ConfigError
from tests.megatron_lm.launch import megatron_checkout
from tests.megatron_lm.test_matrix import MODEL, TRAINING
from tests.support.lazy import Lazy

changed_words = Lazy("mindspeed.planner.job", "changed_words")
SCRIPT = """
import os, sys
from megatron.training import pretrain as call
from megatron.training.training import pretrain
assert call is pretrain and __name__ == "__main__"
assert sys.argv[1:] == ["--size", "3"] and os.environ["WORLD_SIZE"] == "1"
import beside
print("of the script")
pretrain("data", beside.provider, "kind", forward_step_func=len, args_defaults={"a": 1})
raise SystemExit("the script went on")
"""


@pytest.fixture
def megatron_training(monkeypatch):
    """Names of Megatron-LM that a script imports, without Megatron-LM."""
    import megatron

    def pretrain(
        train_valid_test_dataset_provider,
        model_provider=None,
        model_type=None,
        forward_step_func=None,
        args_defaults=None,
    ):
        raise AssertionError("not captured")

    package, module = (types.ModuleType(f"megatron.{n}") for n in ("training", "training.training"))
    package.training = module
    package.pretrain = module.pretrain = pretrain
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    monkeypatch.setitem(sys.modules, "megatron.training.training", module)
    monkeypatch.setattr(megatron, "training", package, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return module


def script(directory, text):
    (directory / "beside.py").write_text("def provider(): ...\n")
    path = directory / "script.py"
    path.write_text(text)
    return path


def test_a_script_runs_up_to_pretrain(tmp_path, megatron_training, capsys):
    original, command = megatron_training.pretrain, sys.argv
    path = script(tmp_path, SCRIPT)
    job = ScriptJob.of(path, ["--size", "3"])
    assert job.given["model_provider"].__name__ == "provider"
    assert (job.given["model_type"], job.given["forward_step_func"]) == ("kind", len)
    assert job.given["args_defaults"] == {"a": 1}
    assert megatron_training.pretrain is original and sys.argv is command
    assert capsys.readouterr() == ("", "of the script\n")
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "does not call megatron.training.pretrain"),
        ("raise SystemExit(2)", "ended with status 2"),
        ("from megatron.training import pretrain; pretrain(None)", "without a model_provider"),
    ],
)
def test_other_scripts_are_refused(tmp_path, megatron_training, text, message):
    with pytest.raises(ConfigError, match=message):
        ScriptJob.of(script(tmp_path, text), [])


def test_a_script_needs_megatron_lm(tmp_path, megatron_training, monkeypatch):
    with pytest.raises(ConfigError, match=r"absent\.py does not exist"):
        ScriptJob.of(tmp_path / "absent.py", [])
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    with pytest.raises(ConfigError, match="needs a checkout of Megatron-LM"):
        ScriptJob.of(script(tmp_path, SCRIPT), [])


def test_flags_of_a_script_are_changed_as_those_of_a_recipe():
    parser = argparse.ArgumentParser()
    for flag in ("--size", "--tensor-model-parallel-size"):
        parser.add_argument(flag, type=int, default=1)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--no-bias", action="store_false", dest="bias")
    parser.add_argument("--modules", nargs="*")
    words = ["--size", "3"]
    changed = {"size": 4, "swiglu": True, "bias": False, "modules": ["a", "b"]}
    assert changed_words(words, parser, changed) == (
        ["--size", "4", "--swiglu", "--no-bias", "--modules", "a", "b"]
    )
    assert changed_words(words, parser, {"size": None}) == []
    assert changed_words(words, parser, {"swiglu": False, "bias": True}) == words
    with pytest.raises(ConfigError, match="no flag of the script sets zero_stage to 2"):
        changed_words(words, parser, {"zero_stage": 2})


# Megatron-LM sends the batch to other tensor-parallel ranks and the results of the step around.
OF_THE_LOOP = {"broadcast", "all_reduce"}
BYTES_OF_LOSSES = 16
"""Our trainer keeps loss, count and report of each micro-batch until the step ends."""
BYTES_OF_IDS = 8 * 64
"""Megatron-LM's script keeps tokens and positions of a micro-batch while its loss is computed."""

DENSE = f"{MODEL} {TRAINING} --bf16 --no-create-attention-mask-in-dataloader"
LAYOUTS = {
    "tensor": (
        f"{DENSE} --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        1,
    ),
    "pipeline": (
        f"{DENSE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        2,
    ),
    "experts": (
        f"{DENSE} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
        "--expert-model-parallel-size 2 --moe-expert-capacity-factor 1.0 "
        "--moe-pad-expert-input-to-capacity",
        1,
    ),
}


def counted(jobs):
    """Figures of both doors for (script, flags, world size, rank), counted in one process."""
    checkout = megatron_checkout()
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MINDSPEED_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.planner.count_doors", json.dumps(jobs)],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.megatron_lm
def test_both_doors_count_the_same():
    script = str(megatron_checkout() / "pretrain_gpt.py")
    jobs = [
        (door, flags.split(), 4, rank)
        for flags, rank in LAYOUTS.values()
        for door in (script, None)
    ]
    answers = counted(jobs)
    for name, ours, trainers in zip(LAYOUTS, answers[::2], answers[1::2], strict=True):
        assert "error" not in ours and "error" not in trainers, (name, ours, trainers)
        for key in ("micro_batches", "parameters", "static", "flops"):
            assert ours[key] == trainers[key], (name, key)
        more = ours["peak"] - trainers["peak"]
        assert -BYTES_OF_LOSSES * ours["micro_batches"] <= more <= 2 * BYTES_OF_IDS, name
        ours, trainers = (Counter(map(tuple, a["communications"])) for a in (ours, trainers))
        assert not trainers - ours, name
        assert {op for op, *_ in ours - trainers} <= OF_THE_LOOP, name
        assert all(nbytes <= 512 for *_, nbytes in ours - trainers), name


OWN = """
import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args

class Wider(GPTModel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        size = get_args().extra_size
        self.extra = torch.nn.Linear(self.config.hidden_size, size, dtype=torch.bfloat16)
        self.back = torch.nn.Linear(size, self.config.hidden_size, dtype=torch.bfloat16)
    def forward(self, tokens, position_ids, attention_mask, labels=None):
        return super().forward(tokens, position_ids, attention_mask, labels=labels) + VALUE

def extra_args(parser):
    parser.add_argument("--extra-size", type=int, default=1)
    return parser

def provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    return Wider(
        core_transformer_config_from_args(args), get_gpt_layer_with_transformer_engine_spec(),
        args.padded_vocab_size, args.max_position_embeddings, pre_process, post_process,
        share_embeddings_and_output_weights=False,
    )

def forward_step(batches, model):
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    VALUE_READ
    return losses, lambda output: (output.mean(), {"loss": output.mean().detach()})

if __name__ == "__main__":
    pretrain(None, provider, ModelType.encoder_or_decoder, forward_step,
             extra_args_provider=extra_args)
"""


@pytest.mark.slow
@pytest.mark.megatron_lm
def test_a_users_own_model_and_forward_step_are_counted_or_refused(tmp_path):
    good, bad, deep, opaque = (tmp_path / f"{x}.py" for x in ("good", "bad", "deep", "opaque"))
    good.write_text(OWN.replace("VALUE_READ", "pass").replace("VALUE", "0"))
    reads = "stop = float(losses[0, 0]) > 3"
    bad.write_text(OWN.replace("VALUE_READ", reads).replace("VALUE", "0"))
    inside = "self.extra.weight.sum().item()"
    deep.write_text(OWN.replace("VALUE_READ", "pass").replace("VALUE", inside))
    define = "torch.library.define('own::opaque', '(Tensor x) -> Tensor')"
    calls = "torch.ops.own.opaque(losses)"
    opaque.write_text(
        OWN.replace("VALUE_READ", calls)
        .replace("VALUE", "0")
        .replace("class W", define + "\nclass W")
    )
    small, large, read, deeper, unseen, unknown = counted(
        [
            (str(good), [*DENSE.split(), "--extra-size", "4"], 1, 0),
            (str(good), [*DENSE.split(), "--extra-size", "8"], 1, 0),
            (str(bad), DENSE.split(), 1, 0),
            (str(deep), DENSE.split(), 1, 0),
            (str(opaque), DENSE.split(), 1, 0),
            (str(good), [*DENSE.split(), "--num-layer", "8"], 1, 0),
        ]
    )
    assert large["parameters"] - small["parameters"] == 4 * (64 + 1 + 64)
    line = bad.read_text().splitlines().index(f"    {reads}") + 1
    assert f"{bad}:{line} (forward_step) reads the value" in read["error"]
    (line,) = (n for n, text in enumerate(deep.read_text().splitlines(), 1) if inside in text)
    assert f"{deep}:{line} (forward) reads the value" in deeper["error"]
    assert "compute it from shapes or arguments instead" in deeper["error"]
    line = opaque.read_text().splitlines().index(f"    {calls}") + 1
    assert f"{opaque}:{line} (forward_step) calls own.opaque" in unseen["error"]
    assert "register_fake" in unseen["error"]
    assert "unrecognized arguments: --num-layer" in unknown["error"]
