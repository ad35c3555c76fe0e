"""Rank functions of the tests of uneven tensor parallelism."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.instruments import CommLedger

VOCABULARY, BATCH, HEAD = 64, 2, 4


def rows(
    sizes: tuple[int, ...], shape: tuple[int, ...], async_op: bool, device: str = "cpu"
) -> dict[str, Any]:
    """Gather and reduce-scatter integers; what came out, and the bytes that torch's own sent."""
    from mindspeed.tensor_parallel.unaligned.rows import gather_rows, scatter_rows

    group, rank = dist.group.WORLD, dist.get_rank()
    whole = torch.arange(sum(sizes) * torch.Size(shape).numel(), dtype=torch.float32)
    whole = whole.view(sum(sizes), *shape).to(device)
    mine = whole.split(list(sizes))[rank]
    strided = torch.stack([mine, mine], dim=-1)[..., 0]
    results = {}
    with CommLedger() as ledger:
        for name, x in (("gather", mine), ("gather strided", strided)):
            out, work = gather_rows(x, sizes, group, async_op)
            _finish(work, async_op)
            results[name] = torch.equal(out, whole)
        gathered = ledger.wire_bytes("all_gather")
        for name, x in (("scatter", whole), ("scatter strided", whole.flip(0).flip(0))):
            out, work = scatter_rows(x * (rank + 1), sizes, group, async_op)
            _finish(work, async_op)
            total = sum(range(1, dist.get_world_size() + 1))
            results[name] = torch.equal(out, mine * total)
        results["bytes"] = (gathered, ledger.wire_bytes("reduce_scatter"))
    return results


def _finish(work: Any, async_op: bool) -> None:
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
        work.wait()


def wrong_rows() -> list[str]:
    """Errors for other numbers of rows."""
    from mindspeed.tensor_parallel.unaligned.rows import gather_rows, scatter_rows

    errors = []
    for function in (gather_rows, scatter_rows):
        try:
            function(torch.zeros(4, 1), (3, 2), dist.group.WORLD)
        except ValueError as error:
            errors.append(str(error))
    return errors


def model_results(
    model: dict[str, Any], spec: str, sequence_parallel: bool, length: int, bytes_of: bool = False
) -> dict[str, Any]:
    """Initial weights, losses and gradients of this rank; norms' gradients summed over ranks."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as tp
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    from mindspeed import session
    from mindspeed.tensor_parallel.unaligned.sizes import sizes_of

    size = dist.get_world_size()
    sequence_parallel = sequence_parallel and size > 1
    sizes = {
        "num_attention_heads": model["num_attention_heads"],
        "group_query_attention": "num_query_groups" in model,
        "num_query_groups": model.get("num_query_groups"),
        "ffn_hidden_size": model["ffn_hidden_size"],
        "tensor_model_parallel_size": size,
        "sequence_parallel": sequence_parallel,
        "seq_length": length,
    }
    values = dict(model)
    if size > 1:
        session.install().configure({"unaligned_linear": True, **sizes})
        values.update(sizes_of(sizes).counts(size))
    parallel_state.initialize_model_parallel(size)
    torch.manual_seed(123)
    tp.model_parallel_cuda_manual_seed(123)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=24,
        kv_channels=HEAD,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel,
        **values,
    )
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=spec == "te")
    built = GPTModel(
        config,
        layers,
        VOCABULARY,
        length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (BATCH, length + 1), generator=generator)
    positions = torch.arange(length)[None].expand(BATCH, -1)
    context = CommLedger() if bytes_of else contextlib.nullcontext()
    with context as ledger:
        loss = built(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous())
        loss.mean().backward()
    weights = {name: p.detach() for name, p in built.named_parameters()}
    gradients = {}
    for name, parameter in built.named_parameters():
        grad = parameter.grad
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        gradients[name] = grad
    result = {"loss": loss.detach(), "weights": weights, "gradients": gradients}
    if ledger is not None:
        result["bytes"] = [ledger.wire_bytes(op) for op in ("all_gather", "reduce_scatter")]
    return result


def joined(name: str, shards: list[torch.Tensor], gated: bool) -> torch.Tensor:
    """The whole of a weight ``[out, in]`` or bias ``[out]`` from the shards of all ranks."""
    kind = name.split(".")[-2]
    if "layer_norm" in name:
        return shards[0]
    if kind in ("linear_proj", "linear_fc2") and name.endswith("weight"):
        return torch.cat(shards, 1)
    if kind == "linear_fc1" and gated and name.endswith((".weight", ".bias")):
        halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([torch.cat(half) for half in halves])
    if kind in ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer"):
        return torch.cat(shards)
    return shards[0]
