"""Models for the comparison of layer specs, built inside rank processes.

``weights_of(model)`` names parameters independently of the spec (the fused norm of a Transformer
Engine layer is a module of its own in the local spec), and ``[experts]`` of grouped and sequential
layers alike, so that one seeded set of weights serves every model.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch

VOCABULARY, SEQUENCE, BATCH = 64, 16, 2

CONFIGS: dict[str, dict[str, Any]] = {
    "layernorm-gelu-bias": {},
    "rmsnorm-swiglu-gqa": {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "num_query_groups": 2,
    },
    "zero-centered-gamma": {"layernorm_zero_centered_gamma": True},
    "qk-layernorm": {"qk_layernorm": True, "normalization": "RMSNorm", "add_bias_linear": False},
    "moe-sequential": {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False},
    "moe-grouped": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_grouped_gemm": True,
        "add_bias_linear": False,
    },
    "mla": {
        "multi_latent_attention": True,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "rope_type": "rope",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
    },
}

_RENAMES = (
    (r"(self_attention\.linear_qkv|self_attention\.linear_q_proj)\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"self_attention\.linear_q_up_proj\.layer_norm_", "self_attention.q_layernorm."),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_", "self_attention.kv_layernorm."),
    (r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)", r"experts.\2.\3\1"),
)


def config(name: str, **overrides: Any) -> Any:
    """Return the named configuration: two layers, hidden size 32, four heads, fp32, no dropout."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    options = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        **CONFIGS[name],
        **overrides,
    }
    kind = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    return kind(**options)


def build(cfg: Any, spec: str) -> torch.nn.Module:
    """Build a GPT model with the ``"te"`` or ``"local"`` spec and give it the seeded weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    layers = get_gpt_decoder_block_spec(cfg, use_transformer_engine=spec == "te")
    model = GPTModel(
        cfg, layers, VOCABULARY, SEQUENCE, position_embedding_type="rope", parallel_output=True
    )
    for name, parameter in weights_of(model).items():
        parameter.data.copy_(_slice(parameter, name))
    return model


def weights_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters under names that do not depend on the spec."""
    result = {}
    for name, parameter in model.named_parameters():
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        result[name] = parameter
    return result


def _slice(parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
    """Draw the whole weight from its name and cut this rank's tensor-parallel part."""
    from megatron.core import parallel_state

    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    shape = list(parameter.shape)
    split = getattr(parameter, "tensor_model_parallel", False) and size > 1
    if split:
        shape[parameter.partition_dim] *= size
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator) * 0.2
    if re.search(r"norm\w*\.weight", name):
        whole = whole + 1
    if not split:
        return whole
    parts = 2 if "linear_fc1" in name and shape[0] > 128 else 1
    pieces = [p.chunk(size, parameter.partition_dim)[rank] for p in whole.chunk(parts, 0)]
    return torch.cat(pieces, 0)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, positions and labels."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE)[None].expand(BATCH, -1)
    return tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous()


def mask() -> torch.Tensor:
    """Return Megatron's causal mask: True is masked."""
    return torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]


def start(tensor_parallel: int = 1) -> None:
    """Initialise Megatron's groups and random streams."""
    from megatron.core import parallel_state, tensor_parallel as tp

    parallel_state.initialize_model_parallel(tensor_parallel)
    tp.model_parallel_cuda_manual_seed(123)


def run(model: torch.nn.Module, attention_mask: torch.Tensor | None = None) -> dict[str, Any]:
    """Return loss per token and the gradient of every parameter, as numpy arrays."""
    tokens, positions, labels = batch()
    loss = model(tokens, positions, attention_mask, labels=labels)
    loss.sum().backward()
    grads = {n: None if p.grad is None else p.grad for n, p in weights_of(model).items()}
    return {"loss": loss.detach(), **{n: g for n, g in grads.items() if g is not None}}


def te_and_local(name: str) -> list[tuple[str, float, float]]:
    """Return ``(tensor, largest difference, largest value)`` between the two specs."""
    start()
    cfg = config(name)
    te = run(build(cfg, "te"))
    local = run(build(config(name, **_local_options(name)), "local"), mask())
    assert te.keys() == local.keys(), set(te) ^ set(local)
    return [
        (key, (te[key] - local[key]).abs().max().item(), local[key].abs().max().item())
        for key in te
    ]


def _local_options(name: str) -> dict[str, Any]:
    return {"moe_grouped_gemm": False} if name == "moe-grouped" else {}
