"""Megatron's layers with sizes that the tensor-parallel size does not divide.

Megatron divides heads, query groups and the width of the MLP by the number of ranks wherever it
builds a layer. :func:`with_sizes_of_rank` therefore gives each rank a config with the sizes that,
divided, are its own; its linear layers (:func:`with_uneven_linears`) draw their initial weights as
shards of the whole weight, and know their true place in checkpoints. Rows of sequence parallelism
are uneven in the embedding, in the rotary embedding and between pipeline stages, too
(:func:`shard_rows_unevenly`, :func:`lengths_of_rank`); those of linear layers are the caller's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule

from mindspeed.tensor_parallel.megatron import class_of, submodules_of, with_submodules
from mindspeed.tensor_parallel.unaligned.rows import padded_index
from mindspeed.tensor_parallel.unaligned.sizes import ModelSizes, Share, part, parts

Blocks = Sequence[tuple[int, int]]
"""(start, length) of each part of a dimension of a whole weight."""


def tensor_parallel_group(arguments: Mapping[str, Any]) -> Any:
    """The group that shards a model with these constructor arguments."""
    groups = arguments.get("pg_collection")
    return parallel_state.get_tensor_model_parallel_group() if groups is None else groups.tp


def with_sizes_of_rank(arguments: Mapping[str, Any], sizes: ModelSizes) -> dict[str, Any]:
    """Constructor arguments of ``GPTModel`` with a config of this rank's sizes.

    Raises:
        ValueError: the config is of another model.
    """
    group, config = tensor_parallel_group(arguments), copy.copy(arguments["config"])
    expected = {
        "num_attention_heads": sizes.num_attention_heads,
        "num_query_groups": sizes.num_query_groups,
        "ffn_hidden_size": sizes.ffn_hidden_size,
    }
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"--unaligned-linear: the model's config has {name} = {getattr(config, name)}, "
                f"the arguments {value}"
            )
    for name, value in sizes.of_rank(group.size(), group.rank()).items():
        setattr(config, name, value)
    return {**arguments, "config": config}


def with_uneven_linears(
    block: Any, sizes: ModelSizes, group: Any, base: Callable[[type], type]
) -> Any:
    """The specs of a model chunk with linear layers that know their part of the whole weight."""
    ranks, rank = group.size(), group.rank()
    attention = Share(sizes.num_query_groups, ranks, rank)
    mlp = Share(sizes.ffn_hidden_size, ranks, rank)
    shares: dict[str, dict[str, tuple[int, Share]]] = {}
    if sizes.uneven_attention(ranks):
        shares["self_attention"] = {"linear_qkv": (0, attention), "linear_proj": (1, attention)}
    if sizes.uneven_mlp(ranks):
        shares["mlp"] = {"linear_fc1": (0, mlp), "linear_fc2": (1, mlp)}

    def changed(layer: Any) -> Any:
        modules = {}
        for name, linears in shares.items():
            module: Any = getattr(layer.submodules, name, None)
            submodules = submodules_of(module)
            if submodules is None:  # a layer that computes nothing
                continue
            new = {
                linear: uneven_linear(base(class_of(getattr(submodules, linear))), *where)
                for linear, where in linears.items()
            }
            modules[name] = with_submodules(module, **new)
        return replace(layer, submodules=replace(layer.submodules, **modules)) if modules else layer

    return replace(block, layer_specs=[changed(layer) for layer in block.layer_specs])


@functools.cache
def uneven_linear(base: type, axis: int, share: Share) -> type:
    """A linear layer of class ``base`` whose weight is sharded unevenly along ``axis``.

    It is built with the sizes of a config of :func:`with_sizes_of_rank`.
    """

    class Uneven(base):  # type: ignore[misc, valid-type]
        def __init__(self, input_size: int, output_size: int, *args: Any, **kwargs: Any) -> None:
            stride = kwargs.get("stride", 1)
            divisible = input_size if axis else output_size
            blocks, total = share.blocks(divisible, stride), share.total(divisible)
            if kwargs["config"].use_cpu_initialization:
                kwargs["init_method"] = _draw_whole(
                    kwargs["init_method"], axis, total, blocks, share.rank
                )
            super().__init__(input_size, output_size, *args, **kwargs)
            self._place = _Place(axis, total, tuple(blocks))

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            for name in ("weight",) if axis else ("weight", "bias"):
                if prefix + name in state:
                    state[prefix + name] = self._place.of(state[prefix + name])
            return state  # type: ignore[no-any-return]

    Uneven.__name__, Uneven.__qualname__ = base.__name__, base.__qualname__
    return Uneven


def _draw_whole(
    init_method: Callable[[torch.Tensor], Any], axis: int, total: int, blocks: Blocks, rank: int
) -> Callable[[torch.Tensor], None]:
    """Draw the whole weight, as one rank would, where Megatron draws a divisible one to shard.

    ``--use-cpu-initialization`` draws the master weight on every rank and takes, of each block of
    it, the part of the rank. Only that part is filled in.
    """

    def draw(master: torch.Tensor) -> None:
        shape = list(master.shape)
        block_size, shape[axis] = shape[axis] // len(blocks), total
        whole = master.new_empty(shape)
        init_method(whole)
        for number, (start, length) in enumerate(blocks):
            mine = master.narrow(axis, number * block_size + rank * length, length)
            mine.copy_(whole.narrow(axis, start, length))

    return draw


@dataclass(frozen=True)
class _Place:
    """Location of a shard in its parameter: blocks of dimension ``axis``, of size ``total``."""

    axis: int
    total: int
    blocks: tuple[tuple[int, int], ...]

    def of(self, even: ShardedTensor) -> ShardedTensorFactory:
        """The entry of a checkpoint, from the one that Megatron makes of even shards.

        Shards of an irregular grid must have all dimensions of the stored tensor, also the one in
        which Megatron stacks layers; hence a factory.
        """
        stacked, like = even.prepend_axis_num, even.without_data()
        axis, lengths = stacked + self.axis, [length for _, length in self.blocks]

        @torch.no_grad()
        def build(
            key: str, data: torch.Tensor, replica_id: ReplicaId, flattened_range: slice | None
        ) -> list[ShardedTensor]:
            pieces = data[(None,) * stacked].split(lengths, axis)
            return [
                self._block(like, axis, key, piece, replica_id, start)
                for piece, (start, _) in zip(pieces, self.blocks, strict=True)
            ]

        @torch.no_grad()
        def merge(pieces: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(pieces, axis)[(0,) * stacked]

        return ShardedTensorFactory(even.key, even.data, build, merge, even.replica_id)

    def _block(
        self,
        like: ShardedTensor,
        axis: int,
        key: str,
        data: torch.Tensor,
        replica_id: ReplicaId,
        start: int,
    ) -> ShardedTensor:
        shape, first = list(like.global_shape), list(like.global_offset)
        shape[axis], first[axis] = self.total, start
        return replace(
            like,
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=tuple(shape),
            global_offset=tuple(first),
            axis_fragmentations=None,  # no regular grid
            prepend_axis_num=0,
            replica_id=replica_id,
        )


def use_true_places(model: torch.nn.Module) -> None:
    """Let the MLPs of a model chunk store their layers as these say.

    Megatron's own splits gate and up projection where even shards would end.
    """

    def stored_by_layers(mlp: MLP) -> Callable[..., Any]:
        return functools.partial(MegatronModule.sharded_state_dict, mlp)

    for module in model.modules():
        if isinstance(module, MLP):
            module.sharded_state_dict = stored_by_layers(module)


def shard_rows_unevenly(model: Any, seq_length: int, group: Any) -> None:
    """Give this rank its part of ``seq_length`` rows where a model chunk begins.

    Megatron's embedding runs on tokens that are repeated so that its even shards contain the
    uneven ones; rows of padding are dropped and get no gradient.
    """
    sizes = parts(seq_length, group.size())
    if hasattr(model, "embedding"):
        _pad_tokens(model.embedding, sizes, sizes[group.rank()])
    if hasattr(model, "rotary_pos_emb"):
        _use_length(model.rotary_pos_emb, seq_length)


def _pad_tokens(embedding: Any, sizes: Sequence[int], rows: int) -> None:
    plain, index = embedding.forward, torch.tensor(padded_index(sizes))

    def forward(input_ids: Any, position_ids: Any, tokentype_ids: Any = None) -> torch.Tensor:
        """Tokens ``[b, s]`` to this rank's ``[rows, b, h]``."""
        chosen = index.to(input_ids.device, non_blocking=True)
        padded = [
            None if ids is None else ids.index_select(1, chosen)
            for ids in (input_ids, position_ids, tokentype_ids)
        ]
        return plain(*padded)[:rows]  # type: ignore[no-any-return]

    embedding.forward = forward


def _use_length(rope: Any, seq_length: int) -> None:
    """Megatron multiplies this rank's rows by the number of ranks."""
    plain = rope.get_rotary_seq_len

    def get_rotary_seq_len(
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **rest: Any,
    ) -> int:
        given = (inference_context, transformer, transformer_input, transformer_config)
        if packed_seq_params is not None or inference_context is not None:
            return plain(*given, packed_seq_params, **rest)  # type: ignore[no-any-return]
        return seq_length

    rope.get_rotary_seq_len = get_rotary_seq_len


def lengths_of_rank(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule in which stages exchange this rank's rows.

    A schedule divides the length by the number of ranks for the shape that it receives.
    """

    def with_rows_of_rank(**given: Any) -> Any:
        group = parallel_state.get_tensor_model_parallel_group()
        ranks, rank = group.size(), group.rank()
        for name in ("seq_length", "decoder_seq_length"):
            if given.get(name):
                given[name] = part(given[name], ranks, rank) * ranks
        return schedule(**given)

    return with_rows_of_rank
