"""Load Hugging Face weights into a sharded model (``--load hf:DIR``).

Megatron's sharded state dict gives the position of each local tensor in an unsharded parameter, the
mapping table the Hugging Face rows of that parameter. So a rank reads only the rows and columns of
its shards: 1 / (tensor x pipeline x expert) of the bytes, plus norms and other replicated vectors.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed.errors import CheckpointError, ConfigError
from mindspeed.models.families import Family, differing_flags, family_of_config
from mindspeed.models.hf_files import CONFIG, check_mtp, read_config
from mindspeed.models.hf_reader import HFReader
from mindspeed.models.naming import addresses
from mindspeed.models.shape import Shape, shape_of
from mindspeed.models.table import SCORE, Parameter, parameters
from mindspeed.te.quantized_weight import stand_ins

PREFIX = "hf:"
# Buffers of a module that are state of the training, not weights.
_STATE = (".mlp.router.local_tokens_per_expert",)


def is_hf(load: str | None) -> bool:
    """Whether ``--load`` names a Hugging Face directory (``hf:DIR``)."""
    return load is not None and load.startswith(PREFIX)


def folder_of(load: str) -> str:
    """``DIR`` of ``hf:DIR``."""
    return load.removeprefix(PREFIX)


@dataclass(frozen=True)
class LocalShard:
    """A local tensor: a shard of one parameter of the whole model.

    Attributes:
        parameter: The unsharded parameter.
        start: First row, and first column of a matrix.
        data: The tensor of the model, ``[rows]`` or ``[rows, columns]``, that is written.
    """

    parameter: Parameter
    start: tuple[int, ...]
    data: torch.Tensor


def local_shards(modules: list[Any], family: Family, shape: Shape) -> Iterator[LocalShard]:
    """The local tensors of this rank's stages, with their positions in the whole model.

    Weights that are stored in fewer bits have memory for one of them at a time, which is quantised
    when the next one is asked for.

    Args:
        modules: This rank's stages, without wrappers.
        family: Whose mapping table.
        shape: The model.

    Raises:
        ConfigError: A tensor is none of the family's.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    where = {
        (place.key, place.position): parameter
        for parameter in parameters(family.rules, shape)
        for place in addresses(parameter, shape.num_layers, shape["experts"])
    }
    # Only the last pipeline stage has it, as a copy of the tied embedding.
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for module in modules:
        with stand_ins(module) as quantized:
            held = module.state_dict().values()
            own = {t.untyped_storage().data_ptr() for t in held if isinstance(t, torch.Tensor)}
            state = module.sharded_state_dict(metadata={"dp_cp_group": replicas})
            apply_factories(state)
        for tensor in nested_values(state):
            if not isinstance(tensor, ShardedTensor) or tensor.key.endswith(_STATE):
                continue
            offset = tuple(tensor.global_offset)
            # Uneven shards have the dimension of stacked layers in their data, too.
            stacked = tensor.prepend_axis_num or int((tensor.key, offset[:1]) in where)
            data = tensor.data[(0,) * (stacked - tensor.prepend_axis_num)]
            parameter = where.get((tensor.key, offset[:stacked]))
            if parameter is None:
                raise ConfigError(
                    f"family {family.name} has no tensor for Megatron's {tensor.key}; the flags "
                    "describe another model than config.json"
                )
            if tensor.data.untyped_storage().data_ptr() not in own:
                raise ConfigError(
                    f"{tensor.key}: --moe-grouped-gemm with --transformer-impl local keeps its "
                    "weights in another order; use --transformer-impl transformer_engine"
                )
            yield LocalShard(parameter, offset[stacked:], quantized.writable(data))
        quantized.finish()


@torch.no_grad()
def load_hf(args: argparse.Namespace, modules: list[Any], folder: str) -> list[str]:
    """Fill this rank's stages from a directory.

    Args:
        args: Final values.
        modules: This rank's stages, without wrappers.
        folder: Directory with ``config.json`` and weights.

    Returns:
        Names of tensors in the files that the model does not use.

    Raises:
        CheckpointError: A tensor is missing, or the files hold another model.
    """
    config = read_config(folder)
    where = str(Path(folder) / CONFIG)
    family = family_of_config(config, where)
    check_flags(args, family.read(config, where), folder)
    shape = shape_of(args)
    check_mtp(family.mtp_layers(config), shape["mtp"], folder)
    reader = HFReader(folder, family)
    unused = reader.unused_tensors(parameters(family.rules, shape), family.mtp_layers(config))
    for shard in local_shards(modules, family, shape):
        if shard.parameter.name == SCORE.name and not reader.has(shard.parameter):
            continue  # a model of the next token: the head begins as it was drawn
        size = shard.data.shape
        columns = slice(shard.start[1], shard.start[1] + size[1]) if len(size) > 1 else slice(None)
        rows = reader.read(shard.parameter, shard.start[0], size[0], columns, shard.data.dtype)
        shard.data.copy_(rows)
    return unused


def check_flags(args: argparse.Namespace, flags: dict[str, Any], folder: str) -> None:
    """Compare the flags with those that ``config.json`` means.

    Raises:
        CheckpointError: Lists every flag that differs.
    """
    different = differing_flags(args, flags)
    if different:
        lines = [
            f"  --{name.replace('_', '-')}: {theirs} in {folder}, now {ours}"
            for name, (ours, theirs) in different.items()
        ]
        raise CheckpointError(
            f"{folder} holds another model:\n" + "\n".join(lines) + "\n"
            f"change these flags, or take them all from there with --model {folder}"
        )
