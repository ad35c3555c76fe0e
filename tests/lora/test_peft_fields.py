"""Every key of peft's configuration is used, without effect or refused; used ones equal peft."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.support.lazy import Lazy, needs

needs("megatron.core", "peft", "transformers")

from mindspeed.errors import CheckpointError
from mindspeed.lora import export, peft
from mindspeed.lora.peft_fields import FIELDS
from mindspeed.models.families import FAMILIES
from mindspeed.models.weight_shards import split
from tests.lora import lora_ranks, oracle

real_peft = Lazy("peft")
hf = Lazy("transformers")
formats = Lazy("mindspeed.checkpoint.weights.convert")
merge = Lazy("mindspeed.lora.merge")
SETUP = "tests.support.warm"
QKV = ["q_proj", "k_proj", "v_proj"]

# Name -> changes of the model, options of the adapter.
PATTERNS = {
    "ranks": (
        {},
        {"rank_pattern": {"q_proj": 8, r"model\.layers\.1\.mlp.*": 2, "o_proj": 3}},
    ),
    "scales": (
        {},
        {"alpha_pattern": {"^model.layers.0.self_attn.k_proj": 3.0, "down_proj": 64}},
    ),
    "ranks-rslora": (
        {},
        {"rank_pattern": {"v_proj": 9}, "alpha_pattern": {"up_proj": 5}, "use_rslora": True},
    ),
    "layers": ({}, {"layers_to_transform": [1], "target_modules": QKV}),
    "layer-pattern": (
        {},
        {"layers_to_transform": 0, "layers_pattern": "layers", "target_modules": QKV},
    ),
    "names": ({}, {"target_modules": r".*\.1\.(self_attn|mlp)\.\w+_proj", "r": 2}),
    "excluded": ({}, {"exclude_modules": ["o_proj"]}),
    "drawn": ({}, {"init_lora_weights": "orthogonal"}),
    "gaussian-rslora": ({}, {"init_lora_weights": "gaussian", "use_rslora": True, "r": 5}),
    "all-linear": ({}, {"target_modules": "all-linear"}),
    "output-layer": ({}, {"target_modules": ["q_proj", "lm_head"]}),
    "embedding": ({}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding-ranks": (
        {},
        {
            "target_modules": ["embed_tokens", "lm_head", "v_proj"],
            "rank_pattern": {"embed_tokens": 7},
            "alpha_pattern": {"lm_head": 3},
            "use_rslora": True,
        },
    ),
    "biases": (
        {"attention_bias": True},
        {"lora_bias": True, "alpha_pattern": {"k_proj": 3}, "target_modules": [*QKV, "o_proj"]},
    ),
    "biases-of-some": (
        {"attention_bias": True},
        {"lora_bias": True, "target_modules": ["k_proj", "o_proj"], "layers_to_transform": [1]},
    ),
    "whole-layers": (
        {"attention_bias": True},
        {"modules_to_save": ["o_proj", "input_layernorm"], "target_modules": QKV},
    ),
    "whole-norms": (
        {},
        {"modules_to_save": ["norm", "down_proj"], "target_modules": [*QKV, "up_proj"]},
    ),
    "whole-qkv": ({}, {"modules_to_save": QKV, "target_modules": ["o_proj"]}),
    "whole-ends": ({}, {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": QKV}),
}
MERGED = {
    "dora": ({}, {"use_dora": True, "target_modules": [*QKV, "down_proj"]}),
    "dora-ranks": (
        {},
        {"use_dora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"k_proj": 7}},
    ),
    "dora-output-layer": ({}, {"use_dora": True, "target_modules": ["q_proj", "lm_head"]}),
}
ONE, Q = {"tie_word_embeddings": True}, {"target_modules": ["q_proj"]}
TIED = {
    "embedding-alone": (ONE, {**Q, "modules_to_save": ["embed_tokens"]}),
    "output-layer-alone": (ONE, {**Q, "modules_to_save": ["lm_head"]}),
    "both-apart": (ONE, {**Q, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "both-as-one": (
        ONE,
        {**Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
}
TIED_ADAPTERS = {
    "embedding-adapted": (ONE, {"target_modules": ["embed_tokens", "q_proj"]}),
    "output-layer-adapted": (ONE, {"target_modules": ["lm_head", "q_proj"]}),
    "both-adapted-apart": (ONE, {"target_modules": ["embed_tokens", "lm_head"], "r": 3}),
    "both-adapted-as-one": (
        ONE,
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    ),
}


def made(tmp_path, sizes, options):
    """Directories of a base model and of a random adapter, and peft's model."""
    base = oracle.save_base(tmp_path / "base", num_hidden_layers=2, **sizes)
    model = oracle.adapted(base, **options)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad or "magnitude" in n}
    with torch.no_grad():
        for number, (name, parameter) in enumerate(named.items()):
            if "lora_" not in name or "magnitude" in name:
                noise = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(number)
                )
                parameter.add_(0.1 * noise)
    model.save_pretrained(tmp_path / "adapter")
    return base, tmp_path / "adapter", model


def compare(merged, truth):
    """All Hugging Face tensors of our merge and of peft's."""
    expected, found = dict(truth.state_dict()), {}
    for parameter in merged.table:
        found |= split(merged.read(parameter), parameter.segments)
    if "lm_head.weight" not in found:
        assert torch.equal(expected["lm_head.weight"], expected["model.embed_tokens.weight"])
        del expected["lm_head.weight"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


ELSEWHERE = {
    "lora_alpha": "oracle.adapted",
    "lora_dropout": "tests/lora/test_options.py",
    "target_parameters": "tests/lora/test_peft_blocks.py",
}


def test_every_field_of_the_class_is_used_or_refused(tmp_path):
    known = {field.name: field for field in dataclasses.fields(real_peft.LoraConfig)}
    assert FIELDS.keys() == known.keys()
    assert len({*PATTERNS, *MERGED, *TIED, *TIED_ADAPTERS}) >= 20
    plain = json.loads(json.dumps(real_peft.LoraConfig().to_dict(), default=list))
    kinds = (PATTERNS | MERGED | TIED | TIED_ADAPTERS).values()
    compared = {option for _, options in kinds for option in options} | ELSEWHERE.keys()
    described = written(tmp_path / "plain")
    for name, field in FIELDS.items():
        if field.role == "used":
            assert name in compared, f"no kind of adapter is compared that has {name}"
        elif field.role == "fixed":
            assert name == "peft_type" or field.allowed.problem(plain[name]) is None, name
            with pytest.raises(CheckpointError, match=rf"{name} = .* is not supported"):
                written(tmp_path / name, **{name: OTHER_VALUES.get(name, True)})
        else:
            other = written(tmp_path / name, **{name: OTHER_VALUES.get(name, {"a": 1})})
            assert other.config == described.config and other.pairs.keys() == described.pairs.keys()


def written(folder, **values):
    """What is read of an adapter of one layer, by these keys of its configuration."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "old_key": None, **values}
    (folder / peft.CONFIG).write_text(json.dumps(config))
    name = peft.PREFIX + "model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(4, 8), name.format("B"): torch.zeros(8, 4)}
    save_file(tensors, folder / peft.WEIGHTS)
    return peft.read(folder)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("case", [*PATTERNS, *MERGED])
def test_merges_equal_pefts(case, tmp_path):
    base, adapter, model = made(tmp_path, *(PATTERNS | MERGED)[case])
    merged = merge.Merged(formats.open_weights(base), adapter)
    before = {parameter.name: merged._source.read(parameter) for parameter in merged.table}
    assert any(not torch.equal(merged.read(p), before[p.name]) for p in merged.table)
    compare(merged, model.merge_and_unload())


@pytest.mark.parametrize("case", [*TIED, *TIED_ADAPTERS])
def test_a_tied_model_is_tied_no_more_where_peft_unties_it(case, tmp_path):
    base, adapter, model = made(tmp_path, *(TIED | TIED_ADAPTERS)[case])
    merged = merge.Merged(formats.open_weights(base), adapter)
    out = tmp_path / "merged"
    formats.convert(merged, out, formats.Target("hf", like=str(base)))
    tokens = lora_ranks.batch()[0]
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        found = hf.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
        torch.testing.assert_close(found(tokens).logits, expected, rtol=0, atol=2e-5)
    assert found.config.tie_word_embeddings == case.endswith("as-one")


@pytest.mark.slow
def test_adapters_on_the_fly_equal_pefts_or_are_merged_first(tmp_path, ranks):
    """generate, chat, serve and evaluate; training: test_others_adapters."""
    cases = ("ranks", "layers", "dora", "embedding", "biases", "whole-layers")
    for case in (*cases, "both-adapted-as-one", "embedding-adapted"):
        base, adapter, model = made(tmp_path / case, *(PATTERNS | MERGED | TIED_ADAPTERS)[case])
        for merge_it in (False, True):
            run = lora_ranks.merged_logits if merge_it else lora_ranks.logits
            if merge_it and case == "embedding-adapted":
                with pytest.raises(Exception, match="as mindspeed merge-lora writes them"):
                    ranks(1, run, str(base), str(adapter), setup=SETUP)
                continue
            found = ranks(1, run, str(base), str(adapter), setup=SETUP)[0]
            with torch.no_grad():
                expected = model.eval()(lora_ranks.batch()[0]).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)
    base, adapter, _ = made(tmp_path / "tied", *TIED["embedding-alone"])
    with pytest.raises(Exception, match=r"unties the embedding.*mindspeed merge-lora"):
        ranks(1, lora_ranks.logits, str(base), str(adapter), setup=SETUP)


OTHER_VALUES = {
    "peft_type": "LOHA",
    "init_lora_weights": "pissa",
    "bias": "all",
    "layer_replication": [[0, 1]],
    "trainable_token_indices": [3],
    "megatron_config": {"a": 1},
    "alora_invocation_tokens": [1],
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({"init_lora_weights": how}, how) for how in ("olora", "pissa_niter_4", "loftq")),
        ({"a_new_kind": {"x": 1}}, "a_new_kind = .* is not known"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj|rank_pattern"),
        ({"rank_pattern": {"q_proj": 8}}, "q_proj has no A and B of rank 8"),
        ({"rank_pattern": {"q_(": 8}}, "rank_pattern has the key"),
        ({"r": "4"}, "r is"),
        ({"use_dora": True}, "lora_magnitude_vector and use_dora belong together"),
        ({"layers_to_transform": [1]}, "layers_to_transform .* does not name"),
        ({"target_modules": ["v_proj"]}, "target_modules .* does not name"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules .* names"),
        ({"lora_bias": True}, "lora_B.bias and lora_bias belong together"),
    ],
)
def test_what_changes_an_adapter_and_is_not_read_is_refused(values, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        written(tmp_path, **values)


def test_pissa_written_as_a_plain_adapter_merges_like_pefts(tmp_path):
    """The way that the refusal names."""
    base = oracle.save_base(tmp_path / "base", num_hidden_layers=2)
    model = oracle.adapted(base, target_modules=QKV)
    kept = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    options = {"r": 4, "lora_alpha": 8, "target_modules": QKV, "init_lora_weights": "pissa"}
    model = real_peft.get_peft_model(kept, real_peft.LoraConfig(**options))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1)
    model.save_pretrained(tmp_path / "pissa")
    with pytest.raises(CheckpointError, match="path_initial_model_for_weight_conversion"):
        peft.read(tmp_path / "pissa")
    model.save_pretrained(
        tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    compare(merge.Merged(formats.open_weights(base), tmp_path / "plain"), model.merge_and_unload())


def test_a_tied_embedding_that_is_trained_whole_is_written_tied(tmp_path):
    """Ours is one parameter at both ends; peft's would be trained apart without the key."""
    base, adapter, _ = made(tmp_path, *TIED["both-as-one"])
    files, shape = peft.read(adapter), formats.open_weights(base).shape
    family = FAMILIES["llama"]
    tensors = peft.whole_tensors(files, shape)
    export.write(tmp_path / "written", files.config, tensors, family, shape, str(base))
    logits = []
    for folder in (adapter, tmp_path / "written"):
        model = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        with torch.no_grad():
            model = real_peft.PeftModel.from_pretrained(model, folder).eval()
            logits.append(model(lora_ranks.batch()[0]).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-6)


def test_a_merge_in_bf16_is_the_sum_rounded_once(tmp_path):
    """Against peft's merge in fp64; only what is within fp32's error of a tie may differ."""
    base, adapter, _ = made(tmp_path, {}, {"target_modules": QKV})
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(base)
    exact = real_peft.PeftModel.from_pretrained(model.double(), adapter).merge_and_unload()
    merged = merge.Merged(formats.open_weights(base), adapter)
    different = count = 0
    for parameter in merged.table:
        for name, tensor in split(merged.read(parameter), parameter.segments).items():
            expected = exact.state_dict()[name].bfloat16()
            assert tensor.dtype == torch.bfloat16
            torch.testing.assert_close(tensor, expected, rtol=2**-7, atol=0)
            different += int((tensor != expected).sum())
            count += tensor.numel()
    assert different < count / 1000
