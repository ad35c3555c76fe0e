"""What the ranks of the repair tests do."""

from __future__ import annotations

import sys
import types

import torch
import torch.distributed as dist

from mindspeed.adaptor.repairs import packed_batch, process_groups
from mindspeed.journal import Journal


def groups_left_after_destroy(repaired: bool) -> tuple[int, int]:
    """Process groups that exist with parallel state, and after it is destroyed."""
    from megatron.core import parallel_state

    from mindspeed import device

    device.install(Journal())
    destroy = parallel_state.destroy_model_parallel
    if repaired:
        destroy = process_groups.destroy_groups(destroy)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with_state = len(dist.distributed_c10d._world.pg_map)
    destroy()
    return with_state, len(dist.distributed_c10d._world.pg_map)


def broadcast_of_packed_documents() -> dict[str, torch.Tensor]:
    """TP rank 0 reads a packed sample, all ranks get it."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    training = types.ModuleType("megatron.training")
    training.get_args = lambda: types.SimpleNamespace(sft=True, hybrid_context_parallel=False)
    sys.modules["megatron.training"] = training

    def get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=False):
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        if dist.get_rank() == 0:
            data = next(data_iterator)
            assert "cu_seqlens" not in data
            tokens = data["tokens"]
        dist.broadcast(tokens, 0)
        return {"tokens": tokens, "cu_seqlens": None, "max_seqlen": None}

    sample = {
        "tokens": torch.arange(8)[None],
        "cu_seqlens": torch.tensor([[0, 3, 8]], dtype=torch.int32),
        "max_seqlen": torch.tensor([5], dtype=torch.int32),
    }
    get_batch = packed_batch.broadcast_packing(get_batch_on_this_tp_rank)
    return get_batch(iter([sample]) if dist.get_rank() == 0 else None)


def megatron_broadcast_of_packed_documents(repaired: bool) -> dict[str, torch.Tensor]:
    """The same through Megatron-LM's own function."""
    from mindspeed import device, te

    device.install(Journal())
    te.install(Journal())
    from megatron.core import parallel_state
    from megatron.training import global_vars, utils

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    global_vars._GLOBAL_ARGS = types.SimpleNamespace(
        sft=True,
        hybrid_context_parallel=False,
        pipeline_model_parallel_size=1,
        micro_batch_size=1,
        seq_length=8,
        create_attention_mask_in_dataloader=False,
    )
    get_batch = utils.get_batch_on_this_tp_rank
    if repaired:
        get_batch = packed_batch.broadcast_packing(get_batch)
    sample = {
        "tokens": torch.arange(8)[None],
        "labels": torch.arange(8)[None] + 1,
        "loss_mask": torch.ones(1, 8),
        "position_ids": torch.arange(8)[None],
        "cu_seqlens": torch.tensor([[0, 3, 8]], dtype=torch.int32),
        "max_seqlen": torch.tensor([5], dtype=torch.int32),
    }
    batch = get_batch(iter([sample]) if dist.get_rank() == 0 else None)
    return {name: value for name, value in batch.items() if value is not None}


def yarn_frequencies(repaired: bool) -> torch.Tensor:
    """Frequencies of a YaRN embedding on the CPU."""
    from mindspeed import device, te

    device.install(Journal())
    te.install(Journal())
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding

    from mindspeed.adaptor.repairs import yarn

    embedding = yarn_rotary_pos_embedding.YarnRotaryEmbedding
    if repaired:
        embedding.__init__ = yarn.initialize_on_host(embedding.__init__)
    return embedding(16, rotary_base=10000, scaling_factor=4.0).inv_freq_extra


class ContextParallelGroup:
    """Stands in for a process group of which only size and rank are asked."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


def latent_rope(layout: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(fused, unfused) query, key, value and the gradients of their inputs."""
    from megatron.core.models.common.embeddings import RotaryEmbedding, apply_rotary_pos_emb
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.transformer_config import TransformerConfig

    heads, plain, positional, values = 3, 8, 8, 5
    size, rank = (2, int(layout[-1])) if "cp" in layout else (1, 0)
    packed = torch.tensor([0, 8, 12, 24], dtype=torch.int32) if "thd" in layout else None
    lead = (12, 2) if packed is None else (24 // size,)
    angles = RotaryEmbedding(positional, 1.0, use_cpu_initialization=True)(12).double()
    sizes = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": heads}
    config = TransformerConfig(**sizes, multi_latent_attention=True)
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*lead, *shape, dtype=torch.float64, generator=generator)

    drawn = draw(heads, plain + positional), draw(heads, plain + values), draw(1, positional)
    cotangents = draw(heads, plain + positional), draw(heads, plain + positional)
    cotangents = *cotangents, draw(heads, values)

    def unfused(q, kv, shared):
        def rotate(x):
            group = ContextParallelGroup(size, rank)
            return apply_rotary_pos_emb(x, angles, config, packed, 1.0, group)

        k, v = kv.split([plain, values], -1)
        q_plain, q_positional = q.split([plain, positional], -1)
        query = torch.cat([q_plain, rotate(q_positional)], -1)
        return query, torch.cat([k, rotate(shared).expand(*lead, heads, positional)], -1), v

    def fused(q, kv, shared):
        cos, sin, places = angles.cos(), angles.sin(), (packed, rank, size)
        sizes = positional, plain, values
        for_q = multi_latent_attention.fused_apply_mla_rope_for_q
        for_kv = multi_latent_attention.fused_apply_mla_rope_for_kv
        query = for_q(q, cos, sin, plain, positional, *places)
        return query, *for_kv(kv, shared, cos, sin, *sizes, *places)

    results = []
    for function in (fused, unfused):
        inputs = [x.clone().requires_grad_() for x in drawn]
        outputs = function(*inputs)
        torch.autograd.backward(outputs, cotangents)
        results.append([*(y.detach() for y in outputs), *(x.grad for x in inputs)])
    return list(zip(*results, strict=True))
