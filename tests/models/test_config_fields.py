"""Every field of transformers' configuration classes is read, fixed or unused, as declared."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest
import torch

from tests.support.lazy import Lazy, needs, needs_transformers

needs("megatron.core", "transformers")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed.errors import ConfigError
from mindspeed.models import transformers_versions
from mindspeed.models.config_fields import FIELDS, ROPE
from mindspeed.models.families import FAMILIES, family_of_config
from mindspeed.models.presets import model_flags, presets
from tests.support.tiny import CASES, SIZES, batch

transformers = Lazy("transformers")
pytestmark = needs_transformers("5")


CLASSES = {name: family for name, family in FAMILIES.items() if family.in_transformers}
TINY = {
    "llama": "llama2-gqa",
    "qwen2": "qwen2.5",
    "qwen3": "qwen3",
    "mistral": "mistral-window",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3-moe",
    "deepseek_v3": "deepseek-v3",
    "deepseek_v2": "deepseek-v2",
    "glm4_moe": "glm4-moe",
    "seed_oss": "seed-oss",
    "qwen2_moe": "qwen2-moe",
    "phi3": "phi3",
    "ernie4_5": "ernie4.5",
    "smollm3": "smollm3",
    "granite": "granite",
    "glm4": "glm4",
    "gemma3_text": "gemma3",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "hunyuan_v1_dense": "hunyuan",
    "minimax_m2": "minimax-m2",
    "gpt_oss": "gpt-oss",
    "qwen3_next": "qwen3-next",
    "qwen3_5_text": "qwen3.5",
    "qwen3_5_moe_text": "qwen3.5-moe",
    "internlm3": "internlm3",
    "gemma2": "gemma2",
    "llama4_text": "llama4",
    "ernie4_5_moe": "ernie4.5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "granitemoe": "granite-moe",
    "bloom": "bloom",
}


def tiny_config(name):
    case = CASES[TINY[name]]
    made = getattr(transformers, case.config_name or f"{case.kind}Config")(
        **{**SIZES, **case.config}
    )
    config = json.loads(made.to_json_string())
    kinds = config.get("layer_types") or ()
    return config if "linear_attention" in kinds else {**config, "layer_types": None}


def fields_of(config_class):
    if dataclasses.is_dataclass(config_class):
        return {field.name for field in dataclasses.fields(config_class)}
    return inspect.signature(config_class).parameters.keys() - {"kwargs"}  # transformers 4


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_of_the_class_is_accounted_for(name):
    family = CLASSES[name]
    known = fields_of(family.config_class) | set(family.config_class.attribute_map)
    assert not known - family.fields.keys()


def test_every_rope_parameter_is_accounted_for():
    if not transformers_versions.at_least("5"):
        pytest.skip("rope_parameters are of transformers 5")
    from transformers.modeling_rope_utils import RopeParameters

    assert not set(RopeParameters.__annotations__) - ROPE.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_the_defaults_of_the_class_are_what_is_fixed(name):
    family = CLASSES[name]
    made = family.config_class()
    for key in fields_of(family.config_class) & family.fields.keys():
        field = family.fields[key]
        if field.role == "fixed":
            assert field.allowed.problem(getattr(made, key)) is None, key
    assert isinstance(read({"model_type": name}), dict | str)


@pytest.mark.parametrize("name", presets())
def test_a_preset_names_every_key_that_is_read(name):
    preset = presets()[name]
    assert preset.flags == FAMILIES[preset.family].read(preset.config)


# Another value of each field; those of the other fields follow their type.
OTHER = {
    "hidden_act": "gelu",
    "num_key_value_heads": 1,
    "hidden_size": 64,
    "n_embed": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 77},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 77,
    "architectures": ["X"],
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "problem_type": "regression",
    "dtype": "bfloat16",
    "torch_dtype": "float16",
    "transformers_version": "4.0",
    "per_layer_config": {"0": {"hidden_size": 4}},
    "original_max_position_embeddings": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "mlp_only_layers": [0],
    "num_experts_per_tok": 1,
    "topk_group": 1,
    "n_group": 2,
    "first_k_dense_replace": 2,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "moe_layer_freq": 2,
    "max_window_layers": 0,
    "partial_rotary_factor": 0.25,
    "router_jitter_noise": 0.1,
    "norm_topk_prob": False,
    "rms_norm_eps": 0.25,
    "layer_norm_epsilon": 0.25,
    "initializer_range": 0.5,
    "attention_dropout": 0.5,
    "hidden_dropout": 0.5,
    "decoder_sparse_step": 2,
    "sliding_window": 3,
    "num_nextn_predict_layers": 3,
    "num_mtp_layers": 3,
}
# They do not change the flags of a model, but what generation and exports do with it.
NOT_IN_FLAGS = {"bos_token_id", "eos_token_id", "pad_token_id"}
# Used together with another field only, which has its own line here.
ONLY_WITH = {
    "max_window_layers": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 0},
    "use_sliding_window": {"sliding_window": 4, "max_window_layers": 0},
    # Read where there is a window, so that no half of it goes unnoticed.
    "layer_types": {"sliding_window": 4, "use_sliding_window": True},
    "rope_parameters": {"rope_scaling": None},  # written by transformers 4
    "partial_rotary_factor": {"rope_parameters": {"rope_type": "default", "rope_theta": 7}},
    "original_max_position_embeddings": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 7,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        }
    },
    "rope_theta": {"rope_parameters": None, "rope_scaling": None},
    "rope_scaling": {"rope_parameters": None},
}
# Where a class gives the same keys another meaning.
ONLY_WITH_IN = {
    ("qwen2_moe", "sliding_window"): {"use_sliding_window": True, "max_window_layers": 2},
    ("qwen2_moe", "use_sliding_window"): {"sliding_window": 4, "max_window_layers": 2},
    ("qwen2_moe", "max_window_layers"): {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
    },
    ("gemma3_text", "rope_local_base_freq"): {"rope_parameters": None, "rope_theta": 7},
    ("gemma3_text", "sliding_window_pattern"): {"layer_types": None},
    ("qwen3_next", "full_attention_interval"): {"layer_types": None},
    ("qwen3_5_text", "full_attention_interval"): {"layer_types": None},
    ("qwen3_5_moe_text", "full_attention_interval"): {"layer_types": None},
    ("minimax_m2", "rotary_dim"): {"rope_parameters": None, "rope_theta": 7},
    ("smollm3", "no_rope_layer_interval"): {"no_rope_layers": None, "no_rope_layer_interval": 2},
    ("llama4_text", "interleave_moe_layer_step"): {"moe_layers": None},
    ("llama4_text", "no_rope_layer_interval"): {"no_rope_layers": None},
    ("smollm3", "layer_types"): {
        "use_sliding_window": True,
        "sliding_window": 4,
        "no_rope_layers": [1, 1],
    },
}
# An older spelling loses against the same file's newer one, as in the class.
SHADOWED = {
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "moe_num_experts": ("num_experts",),
    "num_experts_per_tok": ("moe_k", "moe_topk"),
}


OTHER_IN = {
    ("deepseek_v2", "scoring_func"): "sigmoid",
    ("gemma3_text", "rope_parameters"): {
        "full_attention": {"rope_type": "default", "rope_theta": 77},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7},
    },
    ("minimax_m2", "rotary_dim"): 8,
    ("qwen3_next", "partial_rotary_factor"): 0.5,
    ("qwen3_5_text", "partial_rotary_factor"): 0.5,
    ("qwen3_5_moe_text", "partial_rotary_factor"): 0.5,
    ("qwen3_next", "layer_types"): ["linear_attention", "full_attention"],
    ("qwen3_5_text", "layer_types"): ["linear_attention", "full_attention"],
    ("qwen3_5_moe_text", "layer_types"): ["linear_attention", "full_attention"],
    ("qwen3_next", "full_attention_interval"): 2,
    ("qwen3_5_text", "full_attention_interval"): 2,
    ("qwen3_5_moe_text", "full_attention_interval"): 2,
    ("gemma3_text", "sliding_window_pattern"): 2,
    ("llama4_text", "moe_layers"): [0],
    ("llama4_text", "no_rope_layers"): [0, 1],
    ("llama4_text", "no_rope_layer_interval"): 2,
    ("ernie4_5_moe", "moe_layer_end_index"): 0,
    ("ernie4_5_moe", "moe_layer_interval"): 3,
}


def other_value(name, key, value):
    if (name, key) in OTHER_IN:
        return OTHER_IN[name, key]
    if key in OTHER:
        return not value if OTHER[key] is value else OTHER[key]
    if isinstance(value, bool):
        return not value
    return 2 * value if value else 5


def read(config):
    family = family_of_config(config)
    try:
        return family.read(config)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("name", CLASSES)
def test_a_field_that_is_used_changes_the_flags_or_is_refused(name):
    plain = tiny_config(name)
    for key, field in FIELDS[name].items():
        if field.role == "no effect" or key in NOT_IN_FLAGS:
            continue
        base = {**plain, **ONLY_WITH_IN.get((name, key), ONLY_WITH.get(key, {}))}
        value = other_value(name, key, base.get(key))
        if key in SHADOWED:
            others = SHADOWED[key]
            base[key] = base.get(key) or next(base[k] for k in others if base.get(k))
            base = {k: v for k, v in base.items() if k not in others}
            value = 2 * base[key]
        found = read({**base, key: value})
        assert found != read(base), f"{key} = {value!r} has no effect"
        if field.role == "fixed":
            assert isinstance(found, str) and f"{key} is " in found


@pytest.mark.parametrize("name", CLASSES)
def test_a_field_without_effect_has_none_in_transformers(name):
    """Logits of the same weights, all of these fields changed at once."""
    plain = {k: v for k, v in tiny_config(name).items() if v is not None}
    changed = dict(plain)
    for key, field in FIELDS[name].items():
        if field.role == "no effect" and key not in (
            "dtype",
            "torch_dtype",
            "output_hidden_states",
        ):
            changed[key] = other_value(name, key, plain.get(key))
        if key in ("initializer_range", *NOT_IN_FLAGS):
            changed[key] = 0.5 if key == "initializer_range" else 3
    changed["return_dict"] = True
    family = CLASSES[name]
    assert family.read(changed) == family.read(plain) | {"init_method_std": 0.5}
    logits = []
    weights = None
    for config in (plain, changed):
        config = family.config_class(**config)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
        weights = weights or {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(weights)
        with torch.no_grad():
            logits.append(model(batch()[0]).logits)
    torch.testing.assert_close(*logits)  # BLOOM's slow_but_exact adds in another order


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.sampled_from([10**12, 10**400, -1, 1e300, float("nan"), float("inf"), "", "x", "silu"])
    | st.floats(-2, 2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*ROPE, "x"]), inner, max_size=4)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    st.sampled_from(sorted(FIELDS)),
    st.data(),
)
def test_any_json_in_any_field_is_flags_or_one_line(name, data):
    config = tiny_config(name) if name in TINY else dict(presets()[f"{name}-7b"].config)
    config["model_type"] = name
    keys = st.sampled_from([*FIELDS[name], "model_type"])
    config |= data.draw(st.dictionaries(keys, ANY_JSON, min_size=1, max_size=3))
    try:
        flags = family_of_config(config).read(config)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
    else:
        json.dumps(flags, allow_nan=False)


@pytest.mark.parametrize("text", ['["a"]', "5", "{", '{"a": ' * 100_000, "\xff", "1" * 5000, ""])
def test_a_config_that_is_no_object_is_one_line(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"^{path}") as error:
        model_flags(str(tmp_path))
    assert "\n" not in str(error.value)
