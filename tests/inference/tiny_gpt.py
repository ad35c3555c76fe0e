"""A tiny GPT whose weights depend on their global names only: the same model in every layout."""

from __future__ import annotations

import zlib
from typing import Any

import torch

VOCAB, PADDED_VOCAB, MAX_LENGTH = 90, 128, 48


def build(tp: int, pp: int, implementation: str = "transformer_engine") -> Any:
    """This rank's stage of the model, in evaluation mode."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    ps.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
    )
    specs = {
        "transformer_engine": get_gpt_layer_with_transformer_engine_spec,
        "local": lambda: get_gpt_layer_local_spec(normalization="RMSNorm"),
    }
    model = GPTModel(
        config,
        specs[implementation](),
        vocab_size=PADDED_VOCAB,
        max_sequence_length=MAX_LENGTH,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )
    _fill(model)
    return model.eval()


@torch.no_grad()
def _fill(model: Any) -> None:
    """Give every weight the slice of a tensor drawn from the seed of its global name."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = model.sharded_state_dict()
    apply_factories(state)
    for tensor in nested_values(state):
        if isinstance(tensor, ShardedTensor):
            generator = torch.Generator().manual_seed(zlib.crc32(tensor.key.encode()))
            whole = 0.3 * torch.randn(tensor.global_shape, generator=generator)
            if "norm" in tensor.key:
                whole += 1.0
            axes = tensor.prepend_axis_num
            sizes = (1,) * axes + tuple(tensor.local_shape)
            bounds = zip(tensor.global_offset, sizes, strict=True)
            part = whole[tuple(slice(start, start + size) for start, size in bounds)]
            tensor.data.copy_(part.reshape(tensor.local_shape))


@torch.no_grad()
def logits_of_full_pass(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits ``[b, s, v]`` of an unsplit model without a key/value cache."""
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return model(tokens, torch.arange(length).expand_as(tokens), mask)[..., :VOCAB]
