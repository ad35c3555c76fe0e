"""``config.json`` as others write it: logits equal transformers', or the file is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.lazy import Lazy, needs

needs("megatron.core", "transformers")

from safetensors.torch import load, save_file

from mindspeed.errors import CheckpointError, ConfigError
from mindspeed.models import transformers_versions
from mindspeed.models.presets import model_flags
from tests.models import model_ranks
from tests.support.tiny import _LLAMA3, _YARN, CASES, SIZES, Case, batch

HFWeights = Lazy("mindspeed.checkpoint.weights.hugging_face", "HFWeights")
transformers = Lazy("transformers")


SETUP = "tests.support.warm"
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
MISSING = object()


@dataclass(frozen=True)
class File:
    """A model of transformers, and what is changed in its ``config.json`` afterwards."""

    case: Case
    changes: dict[str, Any] = field(default_factory=dict)


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in names}


def _deepseek(**rope: Any) -> File:
    """DeepSeek with YaRN that differs from the published one."""
    plain = _without(_YARN, "mscale", "mscale_all_dim")
    return File(CASES["deepseek-v3"], {"rope_scaling": {**plain, **rope}})


_SIXTEEN = {"hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 2}
_BLOOM_SIZES = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), MISSING)

_SOME_LAYERS = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 1,
    "layer_types": MISSING,
}

FILES = {
    # Scaled rotary embeddings that Megatron does not have.
    "llama-yarn": File(CASES["llama"], {"rope_parameters": _YARN}),
    "llama-yarn-without-truncation": File(
        CASES["llama"], {"rope_parameters": {**_YARN, "truncate": False, "mscale": 0.7}}
    ),
    "llama-linear-with-a-fraction": File(
        CASES["llama"], {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}
    ),
    "llama-llama3-of-other-numbers": File(
        CASES["llama"], {"rope_parameters": {**_LLAMA3, "low_freq_factor": 2.0, "factor": 3.0}}
    ),
    "llama-dynamic-beyond-its-length": File(
        CASES["llama"],
        {
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
        },
    ),
    "phi-longrope-within-the-original-length": File(
        CASES["phi4-mini"], {"original_max_position_embeddings": 32}
    ),
    "qwen2-window-in-some-layers": File(CASES["qwen2.5"], _SOME_LAYERS),
    "phi3-window": File(CASES["phi3"], {"sliding_window": 5}),
    # Sliding windows: the class says which layers have one.
    "qwen2-window-without-max_window_layers": File(
        CASES["qwen2.5"],
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": MISSING,
            "layer_types": MISSING,
        },
    ),
    "qwen2-window-in-all-layers": File(
        CASES["qwen2.5"],
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 0,
            "layer_types": MISSING,
        },
    ),
    "qwen3-window-by-layer_types": File(
        CASES["qwen3"],
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention"] * 2,
        },
    ),
    # YaRN: two factors, which Hugging Face and Megatron write down in different ways.
    "yarn-without-mscale": _deepseek(),
    "yarn-attention_factor": _deepseek(attention_factor=1.3),
    "yarn-attention_factor-one": _deepseek(attention_factor=1.0),
    "yarn-attention_factor-and-mscale": _deepseek(
        attention_factor=1.3, mscale=0.7, mscale_all_dim=0.5
    ),
    "yarn-mscale_all_dim-only": _deepseek(mscale_all_dim=0.8),
    "yarn-mscale-only": _deepseek(mscale=0.8),
    "yarn-two-mscales": _deepseek(mscale=0.7, mscale_all_dim=1.2),
    "yarn-betas-zero-and-null": _deepseek(beta_fast=0, beta_slow=None),
    "yarn-old-spelling": File(
        CASES["deepseek-v3"],
        {
            "rope_parameters": MISSING,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    # What the class assumes.
    "mixtral-without-rms_norm_eps": File(
        Case("Mixtral", {**CASES["mixtral"].config, "rms_norm_eps": 1e-5}),
        {"rms_norm_eps": MISSING},
    ),
    "mixtral-without-rope": File(CASES["mixtral"], {"rope_parameters": MISSING}),
    "llama-without-rope": File(CASES["llama"], {"rope_parameters": MISSING}),
    "llama-rope-in-two-spellings": File(
        CASES["llama"],
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_theta": 1000.0,
        },
    ),
    "qwen3-without-head_dim": File(
        Case("Qwen3", {"num_key_value_heads": 2, "head_dim": 128}), {"head_dim": MISSING}
    ),
    "qwen2-without-num_key_value_heads": File(
        Case("Qwen2", _SIXTEEN), {"num_key_value_heads": MISSING}
    ),
    "qwen2-with-head_dim": File(Case("Qwen2", {"head_dim": 16, "num_key_value_heads": 2})),
    "deepseek-class-defaults": File(
        CASES["deepseek-v3-direct-queries"],
        dict.fromkeys(("routed_scaling_factor", "norm_topk_prob", "rope_interleave"), MISSING),
    ),
    # Other spellings.
    "swish": File(CASES["llama"], {"hidden_act": "swish"}),
    "bloom-published-names": File(
        CASES["bloom"], {**_BLOOM_SIZES, "n_embed": 32, "n_layer": 2, "n_head": 4}
    ),
    "bloom-attribute-names": File(
        CASES["bloom"],
        {"n_layer": MISSING, "n_head": MISSING, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "bloom-untied": File(Case("Bloom", {"n_head": 4, "n_layer": 2, "tie_word_embeddings": False})),
}
if transformers_versions.at_least("5"):  # older classes know one name
    FILES["mixtral-num_experts"] = File(
        CASES["mixtral"], {"num_local_experts": MISSING, "num_experts": 4}
    )


def written(file, folder):
    """The directory with its changed ``config.json``."""
    file.case.save(file.case.model(), folder)
    change(folder, file.changes)
    return folder


def change(folder, changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    config = {key: value for key, value in config.items() if value is not MISSING}
    path.write_text(json.dumps(config))


def truth(folder):
    """What transformers computes from a directory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(batch()[0]).logits


@pytest.fixture(scope="module")
def computed(rank_pool, tmp_path_factory):
    """Logits of every file, ours (one process) and those of transformers."""
    root = tmp_path_factory.mktemp("configurations")
    folders = {}
    for name, file in FILES.items():
        (root / name).mkdir()
        folders[name] = written(file, root / name)
    run = model_ranks.logits_of_each
    (ours,) = rank_pool.run(1, run, [str(f) for f in folders.values()], setup=SETUP, timeout=300)
    return {name: (mine, truth(folders[name])) for name, mine in zip(folders, ours, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_logits_equal_those_of_transformers(computed, name):
    ours, expected = computed[name]
    assert isinstance(ours, torch.Tensor), ours
    torch.testing.assert_close(ours, expected, **TOLERANCE)


_ONE_TYPE = {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}
REFUSED = {
    "fraction-mla": (
        "deepseek-v3",
        {"rope_parameters": {**_YARN, "rope_theta": 10000.5}},
        "rope_theta is 10000.5; allowed is a whole number",
    ),
    "fraction": ("llama", {"rope_parameters": {"rope_theta": 1e4 + 0.5}}, "rope_theta is 10000.5"),
    "truncate": (
        "deepseek-v3",
        {"rope_parameters": {**_YARN, "truncate": False}},
        "rope_scaling.truncate is false; allowed is true",
    ),
    "small-attention_factor": (
        "deepseek-v3",
        {"rope_parameters": {**_YARN, "mscale_all_dim": 0.5, "attention_factor": 0.8}},
        "would need a negative --mscale",
    ),
    "unknown-scaling": ("llama", {"rope_parameters": {"rope_type": "ntk"}}, "ntk"),
    "longrope-without-divisors": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4}},
        "long_factor",
    ),
    "partial": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
    "window-moe": ("qwen3-moe", _SOME_LAYERS, "in some layers only"),
    "rope-per-layer-type": ("qwen2.5", _ONE_TYPE, "rope"),
    "per-layer": ("llama", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is"),
    "epsilon": ("deepseek-v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; allowed is 1e-06"),
    "scoring": ("deepseek-v3", {"scoring_func": "softmax"}, 'scoring_func is "softmax"; allowed'),
    "latent-groups": ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    "gelu": ("llama", {"hidden_act": "gelu"}, 'hidden_act is "gelu"; allowed is "silu" or "swish"'),
    "groups": ("llama2-gqa", {"num_key_value_heads": 3}, "not divisible by num_key_value_heads 3"),
    "experts": ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_megatron_computes_differently_are_refused(tmp_path, name):
    case, changes, message = REFUSED[name]
    config = transformers_config(case, changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        model_flags(str(tmp_path))
    assert message in str(error.value) and str(tmp_path / "config.json") in str(error.value)


def transformers_config(case, changes):
    case = CASES[case]
    made = getattr(transformers, case.config_name or f"{case.kind}Config")(
        **{**SIZES, **case.config}
    )
    config = {**made.to_dict(), **changes}
    if "rope_parameters" in changes:  # those of older files would win
        config.pop("rope_scaling", None)
    return {key: value for key, value in config.items() if value is not MISSING}


def test_tied_embeddings_with_an_output_layer_in_the_file(rank_pool, tmp_path):
    """Equal: the model is loaded. Not equal: transformers 5 unties them, we say how."""
    plain = File(CASES["llama3.2-tied"])
    folders = [tmp_path / name for name in ("equal", "other", "untied")]
    for folder in folders:
        folder.mkdir()
        path = written(plain, folder) / "model.safetensors"
        tensors = load(path.read_bytes())  # not mapped: written anew
        words = tensors["model.embed_tokens.weight"]
        head = words if folder.name == "equal" else words.flip(0)
        save_file({**tensors, "lm_head.weight": head.clone()}, path, {"format": "pt"})
    change(folders[2], {"tie_word_embeddings": False})
    (ours,) = rank_pool.run(1, model_ranks.logits_of_each, list(map(str, folders)), setup=SETUP)
    torch.testing.assert_close(ours[0], truth(folders[0]), **TOLERANCE)
    assert "tie_word_embeddings, but lm_head.weight is not equal" in ours[1]
    torch.testing.assert_close(ours[2], truth(folders[2]), **TOLERANCE)
    if transformers_versions.at_least("5"):
        torch.testing.assert_close(ours[2], truth(folders[1]), **TOLERANCE)


def test_every_tensor_of_a_file_is_mapped(tmp_path):
    """What the described model has no place for is refused, foreign modules are named."""
    folder = written(File(CASES["llama2-gqa"]), tmp_path)
    path = folder / "model.safetensors"
    tensors = load(path.read_bytes())  # not mapped: written anew

    def told(name, **changes):
        save_file({**tensors, name: torch.ones(2)}, path, {"format": "pt"})
        change(folder, changes)
        return HFWeights(folder).unused

    assert told("v_head.summary.weight") == ["v_head.summary.weight"]
    assert told("model.layers.0.self_attn.rotary_emb.inv_freq") == []
    for name in (
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.input_layernorm.weight",
        "lm_head.bias",
    ):
        with pytest.raises(CheckpointError, match=f"no place for the tensor {name}"):
            told(name)
    with pytest.raises(CheckpointError, match=r"no place for the tensor model\.layers\.1\."):
        told("v_head.summary.weight", num_hidden_layers=1)


def test_weights_are_finite_numbers(tmp_path):
    folder = written(File(CASES["llama2-gqa"]), tmp_path)
    path = folder / "model.safetensors"
    tensors = load(path.read_bytes())  # not mapped: written anew
    name = "model.layers.1.mlp.up_proj.weight"

    def read(tensor):
        save_file({**tensors, name: tensor}, path, {"format": "pt"})
        weights = HFWeights(folder)
        return [weights.read(parameter) for parameter in weights.table]

    assert read(tensors[name])
    for dtype, shown in (
        (torch.int32, "I32"),
        (torch.uint8, "U8"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ):
        with pytest.raises(CheckpointError, match=f"{path}: tensor {name} holds {shown} numbers"):
            read(tensors[name].to(dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for value in (float("nan"), float("inf"), -float("inf")):
            wrong = tensors[name].to(dtype).clone()
            wrong[47, 3] = value
            message = rf"{path}: {name} has 1 of 1,536 values .* {value} at \[47, 3\]"
            with pytest.raises(CheckpointError, match=message):
                read(wrong)


def test_configs_that_transformers_refuses_are_refused_in_one_line(tmp_path):
    changes = {"layer_types": ["another", "another"]}
    (tmp_path / "config.json").write_text(json.dumps(transformers_config("qwen2.5", changes)))
    with pytest.raises(ConfigError, match=r"transformers refuses it: .*layer_types") as error:
        model_flags(str(tmp_path))
    assert "\n" not in str(error.value)
