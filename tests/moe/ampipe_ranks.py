"""One transformer layer on every rank: Megatron's own forward, and in chunks on its weights."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from tests.moe import layer_ranks
from tests.moe.layer_ranks import HIDDEN, Result

LENGTH, BATCH = 32, 2


def transformer_layer(spec: str, **overrides: Any) -> Any:
    """A layer with a mixture of experts and seeded weights; groups must exist."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    options = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_query_groups": 2,
        "num_moe_experts": layer_ranks.EXPERTS, "moe_ffn_hidden_size": layer_ranks.FFN,
        "moe_router_topk": 2, "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "normalization": "RMSNorm",
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True, "bias_activation_fusion": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "bias_dropout_fusion": False, **overrides,
    }  # fmt: skip
    config = TransformerConfig(**options)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=spec == "te")
    layer = build_module(block.layer_specs[0], config=config, layer_number=1)
    fill(layer)
    return layer.to(config.params_dtype)


def fill(layer: Any) -> None:
    """Weights by name and, of experts, by global index."""
    for name, parameter in layer.named_parameters():
        seed = zlib.crc32(name.encode())
        if "local_experts" in name or (".weight" in name and "experts.linear" in name):
            seed += layer.mlp.local_expert_indices[0]
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data.copy_(1 + noise if "norm" in name and parameter.dim() == 1 else noise)


def run(layer: Any, steps: int = 1, padded: bool = False, full_recompute: bool = False) -> Result:
    """Forward and backward of this rank's rows; gradients of several steps are summed."""
    import torch.distributed as dist
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe.moe_utils import (
        clear_aux_losses_tracker,
        get_moe_layer_wise_logging_tracker,
    )

    config = layer.config
    clear_aux_losses_tracker()
    for parameter in layer.parameters():
        parameter.grad = None
    tp = config.tensor_model_parallel_size
    group = dist.get_rank() // tp  # tensor-parallel ranks share a sequence
    generator = torch.Generator().manual_seed(7 + group)
    rotary = torch.randn(LENGTH, 1, 1, HIDDEN // 4, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    padding = torch.zeros(BATCH, LENGTH // tp, dtype=torch.bool)
    padding[:, -3:] = padded
    first, rows = LENGTH // tp * (dist.get_rank() % tp), LENGTH // tp
    gradients: dict[str, Any] = {}
    for _ in range(steps):
        x, weight = torch.randn(2, LENGTH, BATCH, HIDDEN, generator=generator).unbind()
        x = x[first : first + rows].clone().to(config.params_dtype).requires_grad_()

        def forward(x: torch.Tensor) -> torch.Tensor:
            return layer(
                hidden_states=x,
                attention_mask=mask,
                rotary_pos_emb=rotary,
                padding_mask=padding if padded else None,
            )[0]

        output = tensor_parallel.checkpoint(forward, False, x) if full_recompute else forward(x)
        (output.float() * weight[first : first + rows]).sum().backward()
    gradients["input"] = x.grad
    gradients |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    tracker = get_moe_layer_wise_logging_tracker()
    losses = {name: entry["values"].clone() for name, entry in tracker.items()}
    counts = layer.mlp.router.local_tokens_per_expert
    if counts is not None:
        losses["counts"] = counts.clone()
        counts.zero_()
    return Result(output.detach(), gradients, extra=losses)


def compare(
    spec: str,
    layout: dict[str, int],
    overrides: dict[str, Any],
    degrees: list[int],
    options: dict[str, Any],
    attached: dict[str, Any] | None = None,
    gate: dict[str, Any] | None = None,
) -> list[Result]:
    """Megatron's own forward first, then one result for each degree.

    Args:
        spec: "te" or "local".
        layout: Arguments of :func:`layer_ranks.start`.
        overrides: Of the transformer config.
        degrees: Of the layer.
        options: Of :func:`run`.
        attached: Other arguments of ``attach``.
        gate: DeepSpeed's gate in the place of the router, of these options.
    """
    from mindspeed.journal import Journal
    from mindspeed.moe.ampipe.megatron import attach
    from mindspeed.moe.events import EventLog

    layer_ranks.start(**layout)
    layer = transformer_layer(
        spec,
        expert_model_parallel_size=layout.get("expert", 1),
        tensor_model_parallel_size=layout.get("tensor", 1),
        expert_tensor_parallel_size=layout.get("expert_tensor", 1),
        sequence_parallel=layout.get("tensor", 1) > 1,
        **overrides,
    )
    if gate is not None:
        from mindspeed.moe.deepspeed.megatron import GateOptions, use_gate

        use_gate(layer.mlp, GateOptions(**gate), Journal())
    results = [run(layer, **options)]
    for degree in degrees:
        journal = Journal()
        attach(layer, degree, journal, **attached or {})
        layer.forward.log = EventLog()
        results.append(run(layer, **options))
        results[-1].log = layer.forward.log
        journal.undo()
    return results
