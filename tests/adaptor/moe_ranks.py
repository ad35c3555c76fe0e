"""A MoE GPT on two ranks; a feature replaces the forward of its layer instances."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

Grads = dict[str, torch.Tensor]


def doubled_by_a_feature(spec: str) -> dict[str, Any]:
    """Losses and gradients: plain, doubled by two stacked replacements, doubled in the weights.

    The feature multiplies the output of every mixture of experts by 4, then by 1/2: the same as
    doubling the second linear layer of all experts.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from mindspeed import session
    from mindspeed.adaptor.moe import moe_layers, replace_forward

    active = session.current()
    active.configure({})
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    seen: list[str] = []

    def replace(model: Any, config: Any, vp_stage: int | None) -> None:
        names = {module: name for name, module in model.named_modules()}
        for layer in moe_layers(model):
            seen.append(names[layer])
            for factor in (4.0, 0.5):
                replace_forward(layer, lambda f, c=factor: _scaled(f, c), active.seams.journal)

    active.seams.chunk.add(replace, owner="test")
    model, dropped = _model(spec), _model(spec)
    found = {"seen": seen[: len(seen) // 2], "replaced": _run(model)}
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    found["alive"] = gone() is not None
    active.detach_features()
    found["plain"] = _run(model)
    found["left"] = [n for n, m in model.named_modules() if "forward" in vars(m)]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "experts" in name and "linear_fc2" in name:
                weight *= 2
    found["weights"] = _run(model)
    return found


def _scaled(forward: Any, factor: float) -> Any:
    def scaled(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = forward(*args, **kwargs)
        return output * factor, bias

    return scaled


def _run(model: Any) -> tuple[torch.Tensor, Grads]:
    """Loss of each token, gradients (a loss of the predicted tokens after the next is in them)."""
    tokens = torch.arange(8).remainder(5)[None]
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(tokens, torch.arange(8)[None], None, labels=tokens.roll(-1, 1))
    loss.sum().backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def _model(spec: str) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, mtp_num_layers=1,
        add_bias_linear=False, num_moe_experts=4, moe_router_topk=2,
        moe_token_dispatcher_type="alltoall", expert_model_parallel_size=2, hidden_dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip
    substitute = spec == "te"
    make = (
        specs.get_gpt_layer_with_transformer_engine_spec
        if substitute
        else specs.get_gpt_layer_local_spec
    )
    layers = make(num_experts=4, moe_grouped_gemm=substitute)
    prediction = specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=substitute)
    return GPTModel(config, layers, vocab_size=16, max_sequence_length=8, mtp_block_spec=prediction)
