"""GPT models whose FLOPs are counted, built inside rank processes."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

LAYERS, HIDDEN, HEADS, GROUPS, FFN, SEQUENCE, VOCABULARY, BATCH = 4, 256, 8, 4, 768, 256, 1024, 2

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def start(tensor_parallel: int = 1, **sizes: int) -> None:
    """Model parallel groups and random state."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as tp

    parallel_state.initialize_model_parallel(tensor_parallel, **sizes)
    tp.model_parallel_cuda_manual_seed(1)


class UnfusedAttention(torch.nn.Module):
    """Scores, softmax and weighted sum one after the other; the backward repeats nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> torch.Tensor:
        """``[s, b, n, d]`` to ``[s, b, n * d]``."""
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = torch.einsum("sbnd,tbnd->bnst", q, k).masked_fill(mask, -1e4)
        return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), v).flatten(2)


def megatron_formula(checkout: str, variants: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What Megatron-LM's own formula, repaired, says for a batch of three."""
    sys.path.append(checkout)
    from megatron.training.training import num_floating_point_operations

    from mindspeed.adaptor.repairs.scripts import flops

    formula = flops.count_latent_experts(num_floating_point_operations)
    formula = flops.count_windows(formula)
    return {name: formula(types.SimpleNamespace(**values), 3) for name, values in variants.items()}


def model(spec: str, **overrides: Any) -> torch.nn.Module:
    """GQA, SwiGLU, RMSNorm, no biases, output layer of its own."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    options: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "ffn_hidden_size": FFN,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        **overrides,
    }
    kind = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    config = kind(**options)
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=spec == "te")
    if spec == "unfused":
        for layer in layers.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = UnfusedAttention
    return GPTModel(
        config,
        layers,
        VOCABULARY,
        SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).train()


def run(network: torch.nn.Module) -> None:
    """Forward and backward of one micro-batch."""
    tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % VOCABULARY
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    network(tokens, positions, mask, labels=tokens).mean().backward()


def counts(tensor_parallel: int, cases: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(total, recompute) of one micro-batch on this rank, for each named (spec, overrides)."""
    start(tensor_parallel)
    return {name: count(spec, tensor_parallel, more) for name, (spec, more) in cases.items()}


def count(spec: str, tensor_parallel: int, overrides: dict[str, Any]) -> tuple[int, int]:
    """(total, recompute) of one micro-batch."""
    from mindspeed.instruments import FlopCounter

    network = model(spec, tensor_model_parallel_size=tensor_parallel, **overrides)
    if network.config.gradient_accumulation_fusion:
        for parameter in network.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
    with FlopCounter() as counter:
        run(network)
    return counter.count.total, counter.count.recompute
