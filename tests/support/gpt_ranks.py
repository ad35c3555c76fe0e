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
    (
        r"(self_attention\.linear_qkv|self_attention\.linear_q_proj)\.layer_norm_",
        "input_layernorm.",
    ),
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
        "mtp_loss_scaling_factor": 0.1,  # None before 0.16
        **CONFIGS[name],
        **overrides,
    }
    kind = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    return kind(**options)


def build(cfg: Any, spec: str) -> torch.nn.Module:
    """Build a GPT model from a spec (te, local or reference) and give it the seeded weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    layers = specs.get_gpt_decoder_block_spec(cfg, use_transformer_engine=spec == "te")
    if spec == "reference":
        _use_reference_modules(layers)
    prediction = None
    if cfg.mtp_num_layers:
        prediction = specs.get_gpt_mtp_block_spec(cfg, layers, use_transformer_engine=spec == "te")
    model = GPTModel(
        cfg, layers, VOCABULARY, SEQUENCE, position_embedding_type="rope", parallel_output=True,
        mtp_block_spec=prediction,
    )  # fmt: skip
    for name, parameter in weights_of(model).items():
        parameter.data.copy_(_slice(parameter, name))
    return model


class ReferenceNorm(torch.nn.Module):
    """LayerNorm or RMSNorm by the formula."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.config.layernorm_zero_centered_gamma else self.weight
        if self.config.normalization == "RMSNorm":
            return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight + self.bias


class ReferenceAttention(torch.nn.Module):
    """Causal attention with an explicit softmax."""

    def __init__(
        self, config: Any, softmax_scale: float | None = None, k_channels: int = 0, **unused: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any, **options: Any
    ) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)) * self.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return out.permute(2, 0, 1, 3).flatten(2)


def _use_reference_modules(block: Any) -> None:
    """Put plain modules where the local spec has norms and core attention."""
    from megatron.core.transformer.identity_op import IdentityOp

    def replace(submodules: Any, *names: str) -> None:
        for name in names:
            if getattr(submodules, name, IdentityOp) is not IdentityOp:
                setattr(submodules, name, ReferenceNorm)

    block.layer_norm = ReferenceNorm
    for layer in block.layer_specs:
        replace(layer.submodules, "input_layernorm", "pre_mlp_layernorm")
        attention = layer.submodules.self_attention.submodules
        replace(attention, "q_layernorm", "k_layernorm", "kv_layernorm")
        attention.core_attention = ReferenceAttention


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
    dim = _split_dim(name, parameter)
    if split:
        shape[dim] *= size
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator) * 0.2
    if re.search(r"norm\w*\.weight", name):
        whole = whole + 1
    if not split:
        return whole
    halves = whole.chunk(_halves(name, shape), 0)
    return torch.cat([half.chunk(size, dim)[rank] for half in halves], 0)


def _split_dim(name: str, parameter: torch.nn.Parameter) -> int:
    """Return the split dimension; an expert layer does not tell its own that it is a row layer."""
    return 1 if "experts.linear_fc2" in name else getattr(parameter, "partition_dim", 0)


def _halves(name: str, shape: list[int]) -> int:
    """Return 2 for a gated first layer, whose two halves are split one by one."""
    return 2 if "linear_fc1" in name and shape[0] == 8 * 32 else 1


def join_parts(name: str, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Join what :func:`_slice` cut."""
    rows = parts[0].shape[0] * (len(parts) if dim == 0 else 1)
    count = _halves(name, [rows])
    halves = zip(*(part.chunk(count, 0) for part in parts), strict=True)
    return torch.cat([torch.cat(half, dim) for half in halves], 0)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, positions and labels."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE)[None].expand(BATCH, -1)
    return tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous()


def start(tensor_parallel: int = 1, expert: int = 1) -> None:
    """Initialise Megatron's groups and random streams."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as tp

    parallel_state.initialize_model_parallel(tensor_parallel, expert_model_parallel_size=expert)
    tp.model_parallel_cuda_manual_seed(123)


def run(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the loss of each token and the gradient of every parameter."""
    tokens, positions, labels = batch()
    loss = model(tokens, positions, None, labels=labels)
    loss.sum().backward()
    grads = {name: p.grad for name, p in weights_of(model).items() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def te_and_reference(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the results of the Transformer Engine spec and of the reference."""
    start()
    plain = {"moe_grouped_gemm": False} if "moe" in name else {}
    return run(build(config(name), "te")), run(build(config(name, **plain), "reference"))


def te_and_local(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the results of the two specs of Megatron."""
    start()
    return run(build(config(name), "te")), run(build(config(name), "local"))


def te_on_ranks(name: str, **overrides: Any) -> dict[str, torch.Tensor]:
    """Return loss and gradients of the whole model, gathered over tensor-parallel ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    size = dist.get_world_size()
    start(size)
    cfg = config(name, tensor_model_parallel_size=size, **overrides)
    model = build(cfg, "te")
    result = run(model)
    group = parallel_state.get_tensor_model_parallel_group()
    for key, parameter in weights_of(model).items():
        if key not in result or size == 1:
            continue
        grad = result[key].contiguous()
        if getattr(parameter, "tensor_model_parallel", False):
            parts = [torch.empty_like(grad) for _ in range(size)]
            dist.all_gather(parts, grad, group=group)
            result[key] = join_parts(key, parts, _split_dim(key, parameter))
        elif getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=group)
            result[key] = grad
    return result


def state_dict_keys(name: str) -> list[str]:
    """Return the keys of the sharded state dict: those of a checkpoint."""
    start()
    sharded = build(config(name), "te").sharded_state_dict()
    return sorted({value.key for value in sharded.values()})


def te_on_ranks_sp(name: str) -> dict[str, torch.Tensor]:
    """Like :func:`te_on_ranks`, with sequence parallelism."""
    return te_on_ranks(name, sequence_parallel=True)
