"""Sharded state of parameters that Megatron-FSDP shards (ZeRO 2 and 3).

Megatron-FSDP flattens and concatenates the parameters of a group and gives each rank an equal
shard of whole rows:

    rank 0  |  qkv, all rows    |  proj, rows 0..11   |
    rank 1  |  proj, rows 12..  |  fc1, all rows  |pad|

A checkpoint holds unsharded tensors under the usual names, and each rank writes its rows of them.
These are the names of Megatron's distributed optimizer with ``fully_reshardable`` states, so
another number of ranks, another ZeRO stage, other tensor or pipeline parallel sizes, and every tool
that reads ``torch_dist`` checkpoints can load it. Saving and loading do not communicate weights.

Megatron-LM writes another format here (``fsdp_dtensor``), which only Megatron-FSDP reads.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from mindspeed.built_model import unwrap
from mindspeed.errors import CheckpointError

SHARDING = "fully_reshardable"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ShardedPart:
    """A tensor of the checkpoint, or this tensor-parallel rank's shard of it.

    Attributes:
        parameter: Name in the stage of the parameter that contains it.
        start: First element in the flattened parameter.
        tensor: Its position in the unsharded tensor.
    """

    parameter: str
    start: int
    tensor: ShardedTensor


@dataclass(frozen=True)
class ShardedContents:
    """The tensors of one stage in a checkpoint.

    Attributes:
        parts: Tensors in parameters.
        others: Buffers and extra state by their names in the stage; not sharded.
    """

    parts: tuple[ShardedPart, ...]
    others: Mapping[str, Any]


@dataclass(frozen=True)
class FSDPShard:
    """This rank's shard of a parameter: elements ``start`` to ``stop`` of the flattened one.

    Attributes:
        start: First element.
        stop: The one after the last.
        weights: These elements, ``[stop - start]``, in the dtype of the model.
        main: The same for the optimizer, a DTensor; fp32 in 16-bit training.
    """

    start: int
    stop: int
    weights: torch.Tensor
    main: torch.nn.Parameter


def contents(stage: torch.nn.Module, state: Mapping[str, Any]) -> ShardedContents:
    """List the tensors of a stage in a checkpoint, before FSDP shards its parameters.

    Args:
        stage: One pipeline stage, not wrapped yet.
        state: Its sharded state, of the whole model or of an adapter only.

    Raises:
        CheckpointError: A tensor of the checkpoint is no rows of a parameter.
    """
    parameters = sorted(stage.named_parameters(), key=lambda named: _place(named[1]))
    buffers = {_place(buffer) for buffer in stage.buffers()}
    state = dict(state)
    apply_factories(state)
    parts, others = [], {}
    for name, entry in state.items():
        for tensor in nested_values({name: entry}):
            if not isinstance(tensor, ShardedTensor):  # extra state
                others[name] = tensor
                continue
            if _place(tensor.data) in buffers:
                others[name] = tensor
            else:
                parts.append(_part(tensor, parameters))
    return ShardedContents(tuple(parts), others)


def is_sharded(chunk: Any) -> bool:
    """Whether FSDP has sharded the parameters of a stage."""
    return isinstance(getattr(chunk, "contents", None), ShardedContents)


def tensors(chunks: Sequence[Any]) -> list[ShardedTensor]:
    """Sharded tensors without data of the stages that FSDP has sharded."""
    return [part.tensor for chunk in chunks for part in chunk.contents.parts]


def model_state(chunk: Any) -> dict[str, Any]:
    """The sharded state of one stage: this rank's rows of its parameters, and its buffers."""
    shards = _fsdp_shards(chunk)
    state = {
        label: _rows(part, shard, shard.weights)
        for label, part, shard in _held(chunk.contents.parts, shards)
    }
    buffers = dict(unwrap([chunk])[0].named_buffers())
    for name, entry in chunk.contents.others.items():
        if name in buffers:
            entry.data, entry.dtype = buffers[name], buffers[name].dtype
        state[name] = entry
    return state


def optimizer_state(chunks: Sequence[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """The sharded state of the optimizer, in the form of Megatron's distributed optimizer.

    Args:
        chunks: This rank's stages.
        optimizer: Megatron's optimizer of them.
        is_loading: Create states, to be filled, that no step has made yet.
    """
    inner = optimizer.optimizer
    if is_loading:
        optimizer.init_state_fn(inner, optimizer.config)
    step = max((group.get("step", 0) for group in inner.param_groups), default=0)
    state: dict[str, Any] = {
        "optimizer": {
            "param_groups": [
                {name: value for name, value in group.items() if name != "params"} | {"step": step}
                for group in inner.param_groups
            ]
        },
        "param_state": {str(index): _moments(chunk, inner) for index, chunk in enumerate(chunks)},
        "param_state_sharding_type": SHARDING,
    }
    if optimizer.grad_scaler:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return state


@torch.no_grad()
def load_model_state(chunk: Any, state: Mapping[str, Any]) -> None:
    """Take what was loaded for :func:`model_state`."""
    others = {name: state[name] for name in chunk.contents.others if name in state}
    unwrap([chunk])[0].load_state_dict(others, strict=False)
    for label, part, shard in _held(chunk.contents.parts, _fsdp_shards(chunk)):
        _rows(part, shard, shard.weights).data.copy_(state[label])


@torch.no_grad()
def load_optimizer_state(chunks: Sequence[Any], optimizer: Any, state: Mapping[str, Any]) -> None:
    """Take what was loaded for :func:`optimizer_state`.

    Raises:
        CheckpointError: The checkpoint's optimizer has other param groups.
    """
    inner = optimizer.optimizer
    saved = {_kind(group): group for group in state["optimizer"]["param_groups"]}
    for group in inner.param_groups:
        if _kind(group) not in saved:
            raise CheckpointError(
                f"the optimizer of the checkpoint has no parameters with {dict(_kind(group))}; "
                "load without it (--no-load-optim)"
            )
        group.update(saved[_kind(group)])
    for index, chunk in enumerate(chunks):
        loaded = state["param_state"].get(str(index), {})
        for label, tensor in _moments(chunk, inner).items():
            tensor.data.copy_(loaded[label])
    if optimizer.grad_scaler and "grad_scaler" in state:
        optimizer.grad_scaler.load_state_dict(state["grad_scaler"])


def distribute(chunks: Sequence[Any], *, to_optimizer: bool) -> None:
    """Give all ranks the weights that were loaded, as after a step. Collective.

    Args:
        chunks: This rank's stages.
        to_optimizer: Its main weights were not loaded and are made from these.
    """
    for chunk in chunks:
        if to_optimizer:
            _copy_to_main_weights(chunk.param_and_grad_buffer)
        chunk.start_param_sync()


@torch.no_grad()
def _copy_to_main_weights(buffer: Any) -> None:
    """What Megatron did itself until 0.16."""
    for group in buffer.parameter_groups:
        main, model = group.main_weight_buffer, group.model_weight_buffer
        if main is not None:
            sharded = main.is_data_distributed
            main.data.copy_(model.get_shard_from_local_buffer() if sharded else model.data)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Storage and first element there, also on the meta device, which has no addresses."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _part(tensor: Any, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> ShardedPart:
    """Find the rows that a tensor is, among parameters in the order of their places."""
    data = tensor.data
    index = bisect_right(parameters, _place(data), key=lambda named: _place(named[1])) - 1
    name, parameter = parameters[max(0, index)]
    start = data.storage_offset() - parameter.storage_offset()
    same = _place(data)[0] == _place(parameter)[0]
    inside = same and start >= 0 and start + data.numel() <= parameter.numel()
    if not inside or data.shape[1:] != parameter.shape[1:] or not data.is_contiguous():
        raise CheckpointError(
            f"{tensor.key} is not stored as rows of a parameter, and rows are what --zero-stage 2 "
            "and 3 cut it into; use --zero-stage 1"
        )
    return ShardedPart(name, start, tensor.without_data())


def _fsdp_shards(chunk: Any) -> dict[str, FSDPShard]:
    """This rank's shard of each parameter, by its name in the stage."""
    buffer = chunk.param_and_grad_buffer
    shards = {}
    for name, main in buffer.optimizer_named_parameters:
        here = main.megatron_fsdp_slice
        weights = buffer.parameter_groups[buffer.param_to_param_group[main.orig_param]]
        weights = weights.model_weight_buffer
        item = weights.get_item(weights.param_idx[main.orig_param], only_shard=True)
        shards[name] = FSDPShard(here.start, here.stop, item, main)
    return shards


def _held(
    parts: Sequence[ShardedPart], shards: Mapping[str, FSDPShard]
) -> Iterator[tuple[str, ShardedPart, FSDPShard]]:
    """The parts of which this rank has rows, with labels that are the same in every run."""
    for index, part in enumerate(parts):
        shard = shards[part.parameter]
        if _overlap(part, shard)[0] < _overlap(part, shard)[1]:
            yield f"part {index}", part, shard


def _overlap(part: ShardedPart, shard: FSDPShard) -> tuple[int, int]:
    stop = part.start + math.prod(part.tensor.local_shape)
    return max(part.start, shard.start), min(stop, shard.stop)


def _rows(
    part: ShardedPart, shard: FSDPShard, data: torch.Tensor, prefix: str = ""
) -> ShardedTensor:
    """The rows of a part that are here, of the weights or of something of the same shape.

    Args:
        shard: What this rank has of its parameter.
        data: The elements of the shard, flattened.
        prefix: Goes before the tensor's name.
    """
    first, stop = _overlap(part, shard)
    whole, stacked = part.tensor, part.tensor.prepend_axis_num
    row = math.prod(whole.local_shape[1:])
    shape = (*(1,) * stacked, (stop - first) // row, *whole.local_shape[1:])
    offset = list(whole.global_offset)
    offset[stacked] += (first - part.start) // row
    return ShardedTensor(
        key=prefix + whole.key,
        data=data[first - shard.start : stop - shard.start].view(shape),
        dtype=data.dtype,
        local_shape=shape,
        global_shape=whole.global_shape,
        global_offset=tuple(offset),
        axis_fragmentations=None,  # ranks have unequal numbers of rows
        replica_id=(*whole.replica_id[:-1], 0),  # of data-parallel ranks, only this one has them
        allow_shape_mismatch=whole.allow_shape_mismatch,
    )


def _moments(chunk: Any, optimizer: Any) -> dict[str, ShardedTensor]:
    """Main weights and moments of what this rank has of a stage's trained parameters."""
    state = {}
    for label, part, shard in _held(chunk.contents.parts, _fsdp_shards(chunk)):
        own = optimizer.state.get(shard.main)
        if not own:  # frozen, or no step yet
            continue
        tensors = {"param": shard.main, **{name: own[name] for name in MOMENTS}}
        for name, tensor in tensors.items():
            local = tensor.detach().to_local().view(-1)  # type: ignore[attr-defined]
            state[f"{name} of {label}"] = _rows(part, shard, local, f"optimizer.state.{name}.")
    return state


def _kind(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Keys by which Megatron tells param groups apart."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    return tuple((key, group.get(key)) for key in param_group_identifier_keys)
