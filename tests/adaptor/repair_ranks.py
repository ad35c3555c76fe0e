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
