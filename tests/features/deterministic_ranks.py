"""A few training steps with tensor, sequence and data parallelism, reduced to a hash."""

from __future__ import annotations

import hashlib

import torch


def train(seed: int) -> str:
    """Hash of all gradients of each of three steps and of the weights after them."""
    import mindspeed
    import mindspeed.megatron_adaptor

    mindspeed.configure(npu_deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(2)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(config, spec, 64, 16, position_embedding_type="rope")
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [ddp])
    digest = hashlib.sha256()
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    for _ in range(3):
        tokens = torch.randint(64, (2, 16), generator=generator)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        positions = torch.arange(16).expand(2, -1)
        mask = torch.ones(1, 1, 16, 16).triu(1).bool()
        ddp(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean().backward()
        finalize_model_grads([ddp])
        for parameter in model.parameters():
            digest.update(parameter.main_grad.numpy().tobytes())
        optimizer.step()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    mindspeed.undo()
    assert not torch.are_deterministic_algorithms_enabled()
    return digest.hexdigest()
