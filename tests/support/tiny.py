"""Tiny models of every family on the side of the oracle: Hugging Face's own classes.

Families whose code lives next to their weights are rebuilt from LLaMA's class: Aquila and InternLM
are LLaMA tensor for tensor; Baichuan packs q, k, v, its 13B has ALiBi for rotary positions, its
second generation an output layer with rows of length one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load, load_file, save_file

from tests.support.lazy import Lazy

hf = Lazy("transformers")


VOCAB, LENGTH, BATCH = 99, 16, 2
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "rms_norm_eps": 1e-5,
}
Tensors = dict[str, torch.Tensor]


def same(tensors: Tensors) -> Tensors:
    return tensors


def packed(tensors: Tensors) -> Tensors:
    """LLaMA's names to Baichuan's: q, k and v in one tensor."""
    result = dict(tensors)
    for name in tensors:
        if name.endswith("self_attn.q_proj.weight"):
            prefix = name.removesuffix("q_proj.weight")
            parts = [result.pop(f"{prefix}{part}_proj.weight") for part in "qkv"]
            result[prefix + "W_pack.weight"] = torch.cat(parts)
    return result


def internlm2(tensors: Tensors) -> Tensors:
    """LLaMA's names to InternLM2's: q, k and v of each group of heads in one tensor."""
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("self_attn.q_proj.weight"):
            prefix = name.removesuffix("self_attn.q_proj.weight")
            key, value = (tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "kv")
            heads = SIZES["num_attention_heads"]
            head = tensor.shape[0] // heads
            groups = [
                part.view(key.shape[0] // head, -1, head, 32) for part in (tensor, key, value)
            ]
            result[prefix + "attention.wqkv.weight"] = torch.cat(groups, 1).flatten(0, 2)
        elif "k_proj" in name or "v_proj" in name:
            continue
        else:
            old = next((old for old in names if old in name), None)
            result[name.replace(old, names[old]) if old else name] = tensor
    return result


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        kind: Name of its classes in transformers.
        config: Arguments of the configuration class, beyond :data:`SIZES`.
        on_disk: Tensors of the class -> tensors as the family's files have them.
        config_json: Changes to ``config.json``; None removes a key.
        change: Changes the built model.
        inputs: Additional arguments of ``forward``, from the model.
        flags: Flags that the comparison needs beyond those of the family.
        z_loss: Weight of the square of the largest logit in the loss.
        config_name: Name of its configuration class, where it is another one.
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    on_disk: Callable[[Tensors], Tensors] = same
    config_json: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] = lambda model: None
    inputs: Callable[[Any], dict[str, Any]] = lambda model: {}
    flags: tuple[str, ...] = ()
    z_loss: float = 0.0
    config_name: str = ""

    def model(self) -> Any:
        """The oracle, with weights so large that every mistake shows."""
        sizes = {**SIZES, **self.config}
        config = getattr(hf, self.config_name or f"{self.kind}Config")(**sizes)
        model = getattr(hf, f"{self.kind}ForCausalLM")(config)
        generator = torch.Generator().manual_seed(1)
        state = model.state_dict()
        for name, tensor in state.items():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name or "ln_f" in name:
                tensor.copy_(0.3 * noise + (0 if name.endswith("bias") else 1))
            elif tensor.is_floating_point() and "rotary" not in name:
                tensor.copy_(0.15 * noise)
        self.change(model)
        return model.train()

    def save(self, model: Any, folder: Path) -> None:
        """Write the model as the family's files are."""
        model.save_pretrained(folder)
        path = folder / "model.safetensors"
        tensors = load(path.read_bytes())  # not mapped: the file is written anew
        save_file(self.on_disk(tensors), path, {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config |= self.config_json
        removed = {key for key, value in self.config_json.items() if value is None}
        config = {key: value for key, value in config.items() if key not in removed}
        (folder / "config.json").write_text(json.dumps(config))

    def truth(self, model: Any, scratch: Path) -> dict[str, Any]:
        """Logits, loss and all gradients, these by the names of the files."""
        tokens, labels = batch()
        logits = model(tokens, **self.inputs(model)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = loss + self.z_loss * logits.max(-1).values.square().mean()
        loss.backward()
        with torch.no_grad():  # written like weights, so that the files' names are theirs too
            for parameter in model.parameters():
                gradient = parameter.grad
                parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
        model.save_pretrained(scratch)
        gradients = self.on_disk(load_file(scratch / "model.safetensors"))
        return {"logits": logits.detach(), "loss": loss.detach(), "gradients": gradients}


def folders(tmp_path_factory: Any) -> Callable[[str], Path]:
    """``folders(...)(name)``: a tiny model of that case as its files are, made once."""

    @functools.cache
    def get(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(name)
        CASES[name].save(CASES[name].model(), folder)
        return folder

    return get


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class NormHead(torch.nn.Module):
    """An output layer whose rows have length one."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, F.normalize(self.weight))


class NoRotation(torch.nn.Module):
    """A rotary embedding that rotates by nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *unused: Any) -> Any:
        ones = torch.ones(*position_ids.shape, self.size)
        return ones, torch.zeros_like(ones)


def use_norm_head(model: Any) -> None:
    model.lm_head = NormHead(model.lm_head.weight)


def use_alibi(model: Any) -> None:
    config = model.config
    model.model.rotary_emb = NoRotation(config.hidden_size // config.num_attention_heads)


def use_both(model: Any) -> None:
    use_norm_head(model)
    use_alibi(model)


def alibi_mask(model: Any) -> dict[str, Any]:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    heads = model.config.num_attention_heads
    bias = build_alibi_tensor(torch.ones(BATCH, LENGTH), heads, torch.float32)
    hidden = torch.full((LENGTH, LENGTH), -1e30).triu(1)
    return {"attention_mask": hidden + bias.view(BATCH, heads, 1, LENGTH)}


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_ROUTED = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
_UNGROUPED = {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
_LATENT = _ROUTED | {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
_QWEN_MOE = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_GEMMA = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 10,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
}
_DELTA_NET = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["full_attention", "linear_attention"],
}
_BAICHUAN = {"model_type": "baichuan", "model_max_length": 64}
_NO_LENGTH = {"max_position_embeddings": None}
_NO_BALANCE = ("--moe-aux-loss-coeff", "0")
_GROUPED = {"num_key_value_heads": 2}
_TWELVE_HEADS = {"num_attention_heads": 12, "hidden_size": 48}

CASES: dict[str, Case] = {
    "llama": Case("Llama"),
    "llama2-gqa": Case("Llama", _GROUPED),
    "llama3.1-scaling": Case(
        "Llama",
        _GROUPED
        | {
            "max_position_embeddings": 131072,
            "rope_theta": _LLAMA3["rope_theta"],
            "rope_scaling": _LLAMA3,
        },
    ),
    "llama3.2-tied": Case("Llama", _GROUPED | {"tie_word_embeddings": True}),
    "aquila": Case("Llama", config_json={"model_type": "aquila"}),
    "internlm": Case(
        "Llama", {"attention_bias": True}, config_json={"model_type": "internlm", "bias": True}
    ),
    "baichuan-7b": Case("Llama", on_disk=packed, config_json=_BAICHUAN),
    "baichuan-13b": Case(
        "Llama",
        _TWELVE_HEADS,
        on_disk=packed,
        config_json=_BAICHUAN | _NO_LENGTH,
        change=use_alibi,
        inputs=alibi_mask,
    ),
    "baichuan2-7b": Case(
        "Llama",
        on_disk=packed,
        config_json=_BAICHUAN | {"z_loss_weight": 0},
        change=use_norm_head,
    ),
    "baichuan2-13b": Case(
        "Llama",
        _TWELVE_HEADS,
        on_disk=packed,
        config_json=_BAICHUAN | _NO_LENGTH | {"z_loss_weight": 0.02},
        change=use_both,
        inputs=alibi_mask,
        z_loss=0.02,
    ),
    "bloom": Case("Bloom", {"n_head": 4, "n_layer": 2}),
    "qwen2.5": Case("Qwen2", _GROUPED | {"tie_word_embeddings": True}),
    "qwen3": Case("Qwen3", _GROUPED | {"head_dim": 16}),
    "mistral-window": Case("Mistral", _GROUPED | {"sliding_window": 5}),
    "mixtral": Case(
        "Mixtral", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, flags=_NO_BALANCE
    ),
    "qwen3-moe": Case("Qwen3Moe", _QWEN_MOE | {"norm_topk_prob": True}, flags=_NO_BALANCE),
    "qwen3-moe-raw-probabilities": Case("Qwen3Moe", _QWEN_MOE, flags=_NO_BALANCE),
    "deepseek-v3": Case("DeepseekV3", _LATENT | {"rope_scaling": _YARN}),
    "kimi-k2": Case(
        "DeepseekV3",
        _LATENT | _UNGROUPED,
        config_json={"model_type": "kimi_k2"},
    ),
    "deepseek-v2": Case(
        "DeepseekV2",
        _LATENT
        | {
            "topk_method": "group_limited_greedy",
            "rope_scaling": _YARN,
        },
    ),
    "deepseek-v2-lite": Case(
        "DeepseekV2",
        _LATENT | _UNGROUPED | {"q_lora_rank": None, "topk_method": "greedy"},
    ),
    "glm4-moe": Case(
        "Glm4Moe",
        _ROUTED
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
        }
        | _UNGROUPED,
    ),
    "seed-oss": Case(
        "SeedOss",
        _GROUPED | {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "qwen2-moe": Case(
        "Qwen2Moe",
        {k: v for k, v in _QWEN_MOE.items() if k != "head_dim"}
        | {"shared_expert_intermediate_size": 40},
        flags=_NO_BALANCE,
    ),
    "phi3": Case("Phi3", _GROUPED | {"pad_token_id": 0}),
    "phi4-mini": Case(
        "Phi3",
        {
            "hidden_size": 64,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "long_factor": [1.0 + 0.5 * i for i in range(6)],
            },
        },
    ),
    "ernie4.5": Case("Ernie4_5", _GROUPED | {"head_dim": 16, "tie_word_embeddings": True}),
    "smollm3": Case(
        "SmolLM3",
        _GROUPED | {"no_rope_layers": [1, 0], "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "internlm2": Case(
        "Llama",
        _GROUPED,
        on_disk=internlm2,
        config_json={"model_type": "internlm2", "bias": False},
    ),
    "qwen3-yarn": Case(
        "Qwen3",
        _GROUPED
        | {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "granite": Case(
        "Granite",
        _GROUPED | _GRANITE,
    ),
    "glm4": Case("Glm4", _GROUPED | {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "gemma3": Case("Gemma3", _GEMMA, config_name="Gemma3TextConfig"),
    "olmo2": Case("Olmo2", _GROUPED | {"attention_bias": True}),
    "olmo3": Case(
        "Olmo3",
        _GROUPED
        | {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
        },
    ),
    "hunyuan": Case(
        "HunYuanDenseV1",
        _GROUPED
        | {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
    "minimax-m2": Case(
        "MiniMaxM2",
        _GROUPED
        | {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt-oss": Case(
        "GptOss",
        _GROUPED
        | {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
        flags=_NO_BALANCE,
    ),
    "qwen3-next": Case(
        "Qwen3Next",
        _QWEN_MOE | _DELTA_NET | {"shared_expert_intermediate_size": 40},
        flags=_NO_BALANCE,
    ),
    "qwen3.5": Case(
        "Qwen3_5", _GROUPED | _DELTA_NET | {"head_dim": 16}, config_name="Qwen3_5TextConfig"
    ),
    "qwen3.5-moe": Case(
        "Qwen3_5Moe",
        _QWEN_MOE | _DELTA_NET | {"shared_expert_intermediate_size": 40},
        flags=_NO_BALANCE,
        config_name="Qwen3_5MoeTextConfig",
    ),
    "gemma2": Case(
        "Gemma2", _GEMMA | {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}
    ),
    "llama4": Case(
        "Llama4",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 6,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 16},
        },
        config_name="Llama4TextConfig",
    ),
    "ernie4.5-moe": Case(
        "Ernie4_5_Moe",
        {
            "num_key_value_heads": 2,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
        },
    ),
    "hunyuan-moe": Case(
        "HunYuanMoEV1",
        _GROUPED
        | {
            "head_dim": 16,
            "num_experts": 4,
            "moe_topk": 2,
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
    "granite-moe": Case(
        "GraniteMoe",
        _GROUPED | _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
        flags=_NO_BALANCE,
    ),
    "internlm3": Case("Llama", _GROUPED | {"head_dim": 16}, config_name="InternLM3Config"),
    "deepseek-v3-direct-queries": Case("DeepseekV3", _LATENT | {"q_lora_rank": None}),
}
