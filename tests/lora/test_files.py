"""Adapter files: PEFT's and ours, read, written, merged and resumed; errors name the problem."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from mindspeed.errors import CheckpointError, ConfigError
from mindspeed.lora import LoraConfig, is_adapter
from mindspeed.lora.load import config_of
from tests.lora import lora_ranks, oracle
from tests.support.lazy import Lazy

peft = Lazy("peft")
hf = Lazy("transformers")


SETUP = "tests.support.warm"
SEED_NAMES = ("query_key_value", "dense", "gate_proj", "dense_h_to_4h", "dense_4h_to_h")
TRAIN = (
    "--train-iters=4",
    "--save-interval=2",
    "--eval-iters=0",
    "--lr=0.05",
    "--lr-decay-style=constant",
    "--no-mask-padded-vocab",
    "--lora-export=peft",
    "--no-progress-bar",
    "--log-interval=1",
)


def peft_logits(base, adapter):
    model = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(lora_ranks.batch()[0]).logits


@pytest.fixture(scope="module")
def trained(tmp_path_factory, rank_pool):
    """A base model, an adapter trained on two ranks with seed names, and its losses."""
    root = tmp_path_factory.mktemp("files")
    base = oracle.save_base(root / "base")
    flags = ["--lora-target-modules", *SEED_NAMES, "--lora-r=4", "--lora-alpha=8", *TRAIN]
    flags += [f"--save={root / 'adapter'}", "--tensor-model-parallel-size=2"]
    rank_pool.run(2, lora_ranks.train, str(base), flags, setup=SETUP, timeout=120)
    return base, root / "adapter", flags


def command(ranks, *words):
    """A command's status and messages, in a process where nothing imported Megatron before."""
    return ranks(1, lora_ranks.command, words, setup=SETUP, timeout=120)[0]


def losses(folder):
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}


@pytest.mark.slow
def test_adapter_alone_is_saved_and_written_for_peft(trained, ranks):
    base, adapter, _ = trained
    assert is_adapter(adapter) and is_adapter(adapter / "peft") and not is_adapter(base)
    assert config_of(adapter).target_modules == SEED_NAMES
    expected = peft_logits(base, adapter / "peft")
    # A plain model is far away, so the adapter has learned something.
    assert (expected - peft_base_logits(base)).abs().max() > 0.1
    for source in (adapter, adapter / "peft"):
        found = ranks(1, lora_ranks.logits, str(base), str(source), setup=SETUP)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def peft_base_logits(base):
    model = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with torch.no_grad():
        return model(lora_ranks.batch()[0]).logits


def test_merged_model_computes_the_same(trained, tmp_path, ranks):
    base, adapter, _ = trained
    expected = peft_logits(base, adapter / "peft")
    found = ranks(1, lora_ranks.merged_logits, str(base), str(adapter), setup=SETUP)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    out = tmp_path / "merged"
    words = ["merge-lora", "--load", f"hf:{base}", "--lora-load", str(adapter)]
    assert command(ranks, *words, "--save", str(out), "--format", "hf")[0] == 0
    torch.testing.assert_close(peft_base_logits(out), expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_resumed_adapter_training_is_exact(trained, tmp_path, ranks):
    base, adapter, flags = trained
    again = [*flags, f"--save={tmp_path / 'again'}", f"--lora-load={adapter / 'iter_0000002'}"]
    ranks(2, lora_ranks.train, str(base), again, setup=SETUP, timeout=120)
    known, found = losses(adapter), losses(tmp_path / "again")
    assert found == {iteration: known[iteration] for iteration in found} and set(found) == {3, 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, sizes",
    [
        pytest.param(
            ("embed_tokens", "q_proj", "--lora-modules-to-save", "norm", "input_layernorm"),
            {},
            id="embedding-norms",
        ),
        pytest.param(
            ("q_proj", "o_proj", "--lora-use-bias"), {"attention_bias": True}, id="biases"
        ),
        pytest.param(
            ("embed_tokens", "q_proj", "--lora-ensure-weight-tying"),
            {"tie_word_embeddings": True},
            id="tied",
        ),
    ],
)
def test_what_flags_train_is_stored_written_merged_and_resumed(
    flags, sizes, tmp_path, ranks, rank_pool
):
    base, saved = oracle.save_base(tmp_path / "base", num_hidden_layers=2, **sizes), tmp_path / "a"
    flags = [
        "--lora-target-modules",
        *flags,
        "--lora-r=4",
        *TRAIN,
        "--tensor-model-parallel-size=2",
    ]
    run = [*flags, f"--save={saved}"]
    rank_pool.run(2, lora_ranks.train, str(base), run, setup=SETUP, timeout=120)
    expected = peft_logits(base, saved / "peft")
    assert (expected - peft_base_logits(base)).abs().max() > 0.1
    for source in (saved, saved / "peft"):
        found = ranks(1, lora_ranks.logits, str(base), str(source), setup=SETUP)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
        out = tmp_path / f"merged-{source.name}"
        words = ["merge-lora", "--load", f"hf:{base}", "--lora-load", str(source)]
        assert command(ranks, *words, "--save", str(out), "--format", "hf")[0] == 0
        torch.testing.assert_close(peft_base_logits(out), expected, rtol=0, atol=5e-5)
    again = [*flags, f"--save={tmp_path / 'again'}", f"--lora-load={saved / 'iter_0000002'}"]
    rank_pool.run(2, lora_ranks.train, str(base), again, setup=SETUP, timeout=120)
    known, found = losses(saved), losses(tmp_path / "again")
    assert found == {iteration: known[iteration] for iteration in (3, 4)}


@pytest.mark.slow
def test_an_adapter_loads_into_a_differently_padded_vocabulary(tmp_path, ranks):
    """99 rows of an output layer's adapter and one of padding, then 29."""
    base, saved = oracle.save_base(tmp_path / "base"), tmp_path / "saved"
    oracle.adapted(base, target_modules=["lm_head"]).save_pretrained(tmp_path / "adapter")
    run, padding = lora_ranks.adapter_tensors, "--make-vocab-size-divisible-by"
    words = (str(base), str(tmp_path / "adapter"), [f"{padding}=50"], str(saved))
    (first,) = ranks(1, run, *words, setup=SETUP, timeout=120)
    flags = ["--tensor-model-parallel-size=2", f"{padding}=64"]
    second = ranks(2, run, str(base), str(saved), flags, setup=SETUP, timeout=120)
    one, two = (
        lora_ranks.assembled(found) for found in ([(None, first)], [(None, s) for s in second])
    )
    b, a = "output_layer.lora_B.all", "output_layer.lora_A.all"
    assert one[b].shape[0] == 100 and two[b].shape[0] == 128
    assert torch.equal(one[b][:99], two[b][:99]) and torch.equal(one[a], two[a])
    assert one[b][:99].abs().max() > 0 and not two[b][100:].any()
    out = tmp_path / "merged"
    words = ["merge-lora", "--load", f"hf:{base}", "--lora-load", str(saved), "--save", str(out)]
    assert command(ranks, *words, "--format", "hf")[0] == 0
    expected = peft_logits(base, tmp_path / "adapter")
    torch.testing.assert_close(peft_base_logits(out), expected, rtol=0, atol=2e-5)


def test_adapter_of_another_base_is_refused_with_the_tensors_name(trained, tmp_path, ranks):
    base, adapter, _ = trained
    other = tmp_path / "other"
    shutil.copytree(base, other)
    model = hf.AutoModelForCausalLM.from_pretrained(other)
    oracle.random_([model.model.layers[1].self_attn.o_proj.weight], 5, 0.15)
    model.save_pretrained(other)
    out = tmp_path / "merged"
    words = ["merge-lora", "--load", f"hf:{other}", "--lora-load", str(adapter)]
    status, message = command(ranks, *words, "--save", str(out))
    assert status == 1 and "decoder.layers.1.self_attention.linear_proj.weight" in message
    assert not out.exists()
    small = oracle.save_base(tmp_path / "small", hidden_size=16)
    status, message = command(ranks, *words[:2], f"hf:{small}", *words[3:], "--save", str(out))
    assert status == 1 and "decoder.layers.0." in message and not out.exists()


def test_unknown_names_list_the_known_ones(trained, ranks):
    flags = ["--lora-target-modules", "query_key", "--lora-r=4"]
    with pytest.raises(Exception, match="query_key matches no linear layer") as error:
        ranks(1, lora_ranks.built, str(trained[0]), flags, setup=SETUP)
    for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer"):
        assert name in str(error.value)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"r": 0}, "--lora-r 0"),
        ({"alpha": -1}, "--lora-alpha -1"),
        ({"dropout": 1.0}, "--lora-dropout 1.0"),
        ({"init": "zeros"}, "--lora-init zeros"),
        ({"target_modules": ()}, "--lora-target-modules is empty"),
    ],
)
def test_invalid_options_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**{"target_modules": ("dense",), **values})


def test_a_peft_directory_of_unsupported_type_is_refused(trained, tmp_path):
    folder = tmp_path / "peft"
    shutil.copytree(trained[1] / "peft", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "all"}))
    with pytest.raises(CheckpointError, match="bias = 'all'"):
        config_of(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is no valid JSON"):
        config_of(folder)
