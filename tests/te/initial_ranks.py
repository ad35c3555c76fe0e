"""The initial weights of a model, joined over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.support import gpt_ranks


def initial_weights(name: str, spec: str) -> dict[str, torch.Tensor]:
    """Build a model from one seed and join its weights as Megatron has sharded them."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    torch.manual_seed(123)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    cfg = gpt_ranks.config(name, tensor_model_parallel_size=size, use_cpu_initialization=True)
    layers = get_gpt_decoder_block_spec(cfg, use_transformer_engine=spec == "te")
    model = GPTModel(
        cfg, layers, gpt_ranks.VOCABULARY, gpt_ranks.SEQUENCE,
        position_embedding_type="learned_absolute", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return {name: _joined(weight) for name, weight in model.named_parameters()}


def _joined(weight: torch.Tensor) -> torch.Tensor:
    """Megatron shards ``stride`` blocks of the master weight, each over all ranks."""
    if not getattr(weight, "tensor_model_parallel", False) or dist.get_world_size() == 1:
        return weight.detach()
    parts = [torch.empty_like(weight.detach()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight.detach().contiguous())
    dim, stride = weight.partition_dim, weight.partition_stride
    blocks = zip(*(part.chunk(stride, dim) for part in parts), strict=True)
    return torch.cat([torch.cat(block, dim) for block in blocks], dim)
