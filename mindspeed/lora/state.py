"""Contents of an adapter checkpoint: its parameters, under names of the whole model.

    decoder.layers.7.self_attention.linear_qkv.lora_A.q     [r, in]
    decoder.layers.7.self_attention.linear_qkv.lora_B.q     [rows of q, r]
    ...lora_initial_A.q, lora_initial_B.q     what they began as, where the weight has lost that
    ...lora_magnitude.q                       [rows of q], lengths (DoRA)

Tensors are stored unsharded (as Megatron's sharded tensors), so any parallel sizes can load them.
Next to them is ``adapter.json``: the options, and a few numbers of each adapted weight, which
identify the base model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.built_model import unwrap
from mindspeed.errors import CheckpointError
from mindspeed.files import check_path
from mindspeed.lora.attach import adapted_layers
from mindspeed.lora.config import LoraConfig, in_whole_model, is_adapter_weight, is_end, is_expert
from mindspeed.models.naming import plain_name
from mindspeed.parsing import decode_json

_SAMPLES = 8
# The base may be in fp32 in one run and in bf16, with 8 bits, in another.
_TOLERANCE = 2**-7


def sharded_state(chunk: Any, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """The adapter of one pipeline stage, as Megatron's checkpoints take them.

    Args:
        chunk: The stage, without wrappers.
        metadata: As for Megatron's ``sharded_state_dict``.

    Returns:
        Local name -> sharded tensor.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    dense = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    experts = (
        parallel_state.get_expert_tensor_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    )
    state: dict[str, Any] = {}
    parameters = dict(chunk.named_parameters())
    for name, parameter in parameters.items():
        key = plain_name(in_whole_model(chunk, name))
        if not is_adapter_weight(name) and (not parameter.requires_grad or _is_end(key)):
            continue
        tp, replicas = experts if is_expert(key) else dense
        sharded = getattr(parameter, "tensor_model_parallel", False)
        state[name] = ShardedTensor.from_rank_offsets(
            key,
            parameter,
            *([(parameter.partition_dim, tp.rank(), tp.size())] if sharded else []),
            replica_id=(0, 0 if sharded else tp.rank(), replicas.rank()),
            # Other tensor parallel sizes pad the vocabulary otherwise.
            allow_shape_mismatch=sharded and is_end(key),
        )
    whole = {id(p) for n, p in parameters.items() if p.requires_grad and n not in state}
    if whole:
        for name, value in chunk.sharded_state_dict(metadata=metadata).items():
            if id(getattr(value, "data", None)) in whole:
                state[name] = value
    return state


def _is_end(key: str) -> bool:
    """Whether Megatron stores a parameter itself: of the vocabulary, or the head of a reward."""
    return not key.startswith(("decoder.", "mtp."))


def description(chunks: Iterable[Any], config: LoraConfig) -> str:
    """Contents of ``adapter.json``, on all ranks. Collective over the pipeline."""
    from megatron.core import parallel_state

    samples = _samples(chunks)
    group = parallel_state.get_pipeline_model_parallel_group()
    found: list[Any] = [samples] * group.size()
    if group.size() > 1:
        dist.all_gather_object(found, samples, group=group)
    base = {name: numbers for part in found for name, numbers in part.items()}
    return json.dumps({**decode_json(config.to_json()), "base": base}, indent=1)


def remember_base(chunk: Any) -> None:
    """Record the samples that identify the base model, before its weights are changed or sharded.

    What was recorded before stays.
    """
    for name, layer in adapted_layers(chunk):
        if hasattr(layer, "beginnings"):
            continue
        layer.beginnings = [  # type: ignore[attr-defined]
            entry.weight[:1, :_SAMPLES].detach().clone() for entry in layer.adapted_weights(name)
        ]


def check_base(chunks: Iterable[Any], path: Path) -> None:
    """Compare the model with the base that an adapter was trained on.

    Raises:
        CheckpointError: They differ; names the first tensor that does.
    """
    base = base_of(path)
    for chunk in unwrap(chunks):
        for name, weight in _beginnings(chunk):
            check_samples(f"{name}.weight", weight, base, path.parent)


def base_of(path: Path) -> dict[str, list[float]]:
    """The numbers of the base model in an adapter's description."""
    base: dict[str, list[float]] = decode_json(check_path(path, "input").read_text("utf-8"))["base"]
    return base


def check_samples(
    name: str, weight: torch.Tensor, base: Mapping[str, list[float]], adapter: Path
) -> None:
    """Compare the first numbers of a weight with those that an adapter was trained on.

    Args:
        name: Name of the weight.
        weight: ``[rows, columns]``, any dtype; the first row is read.
        base: First numbers of each weight, from the adapter.
        adapter: Directory of the adapter, for the message.

    Raises:
        CheckpointError: They differ.
    """
    numbers, expected = _first_numbers(weight), base.get(name)
    if expected is None:
        return
    pairs = zip(numbers, expected, strict=True)
    if not all(math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-6) for a, b in pairs):
        raise CheckpointError(
            f"{adapter}: this adapter was trained on another base model: {name} begins with "
            f"{expected[0]:.6g} there and with {numbers[0]:.6g} here; give that base to --load"
        )


def _beginnings(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Adapted weights, or what was kept of them, on the rank that has their first numbers."""
    for name, layer in adapted_layers(chunk):
        if layer._lora.shard.rank == 0:
            kept = getattr(layer, "beginnings", None)
            for number, entry in enumerate(layer.adapted_weights(name)):
                yield entry.name, entry.weight if kept is None else kept[number]


def _first_numbers(weight: torch.Tensor) -> list[float]:
    weight = getattr(weight, "first", weight)  # of a weight in fewer bits, before it was quantised
    numbers: list[float] = weight[0, :_SAMPLES].detach().double().cpu().tolist()
    return numbers


def _samples(chunks: Iterable[Any]) -> dict[str, list[float]]:
    """The first numbers of each adapted weight, on the rank that has them (tensor rank 0)."""
    return {
        f"{name}.weight": _first_numbers(weight)
        for chunk in unwrap(chunks)
        for name, weight in _beginnings(chunk)
    }
