"""The family ``acme``: Llama's layers with another name for two sizes and for the last norm."""

from dataclasses import replace

from mindspeed.json_fields import BOOL, Real, Whole
from mindspeed.models.config_fields import used
from mindspeed.models.config_json import Always, Fields, Heads, Rope, Tied
from mindspeed.models.family import Family
from mindspeed.models.tensors import LLAMA
from mindspeed.models.weight_shards import whole

SIZES = {  # Megatron's argument -> key of config.json
    "num_layers": "depth",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "mlp_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "layernorm_epsilon": "norm_eps",
}
ALWAYS = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LAST_NORM = "decoder.final_layernorm.weight"

FAMILY = Family(
    name="acme",
    model_types=("acme",),
    architecture="AcmeForCausalLM",
    codecs=(Fields(SIZES), Always(ALWAYS), Heads(), Tied(), Rope()),
    rules=tuple(  # Megatron's parameters -> Hugging Face's tensors
        replace(rule, rows=whole("model.last_norm.weight", "hidden"))
        if rule.name == LAST_NORM
        else rule
        for rule in LLAMA
    ),
    fields={  # what config.json may hold, and the allowed values
        **{key: used(Whole(1, 2**24)) for key in SIZES.values() if key != "norm_eps"},
        "norm_eps": used(Real(0, 1)),
        "num_key_value_heads": used(Whole(1, 2**16)),
        "rope_theta": used(Real(2, 1e12)),
        "tie_word_embeddings": used(BOOL),
    },
    in_transformers=False,
    defaults={"norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
)
