"""The grid in a GPT model of Megatron: its groups, the layers' specs, the built model chunk.

embedding                        [s/p, b, h]      Megatron's, ids in the order of the grid
layers                           [s/X, b, h/Y]    between stages the same memory as [s/p, b, h]
final norm, output layer, loss   [s/p, b, h]      Megatron's, labels in the order of the grid
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor

from mindspeed.device.host_tensors import with_values
from mindspeed.errors import ConfigError
from mindspeed.tensor_parallel.megatron import class_of, submodules_of, with_submodules
from mindspeed.tensor_parallel.two_dimensional import grid as ranks_of_grid
from mindspeed.tensor_parallel.two_dimensional.grid import Grid, from_grid, to_grid, token_order
from mindspeed.tensor_parallel.two_dimensional.megatron_modules import (
    GridLayers,
    GridLinear,
    GridNorm,
    GridNormLinear,
)


def create_grid(x: int, y: int) -> Grid:
    """The groups of this rank for a grid of ``x`` by ``y`` ranks. Collective over all ranks.

    Raises:
        ConfigError: The tensor-parallel group has another size.
    """
    tp_ranks = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    if x * y != len(tp_ranks):
        raise ConfigError(
            f"--tp-2d: --tp-x {x} * --tp-y {y} = {x * y} must be the tensor-parallel size "
            f"{len(tp_ranks)}"
        )
    both = dist.get_process_group_ranks(parallel_state.get_tensor_and_context_parallel_group())
    both, size = sorted(both), len(tp_ranks)
    tp_groups = [both[first : first + size] for first in range(0, len(both), size)]
    return Grid(
        parallel_state.get_tensor_model_parallel_group(),
        _own_group(ranks_of_grid.x_groups(tp_ranks, x), "TENSOR_2D_X"),
        _own_group(ranks_of_grid.y_groups(tp_ranks, x), "TENSOR_2D_Y"),
        _own_group(ranks_of_grid.sequence_groups(tp_groups, x), "TENSOR_2D_SEQUENCE"),
    )


def destroy_grid(grid: Grid) -> None:
    """Destroy the groups that :func:`create_grid` made."""
    for group in (grid.x, grid.y, grid.sequence):
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def _own_group(groups: list[list[int]], description: str) -> dist.ProcessGroup:
    (ranks,) = (ranks for ranks in groups if dist.get_rank() in ranks)
    return dist.new_group(ranks, use_local_synchronization=True, group_desc=description)


class GridTransformerLayer(TransformerLayer):
    """Megatron's layer on the grid: heads over x, tokens over y and context-parallel ranks."""

    first_of_chunk = last_of_chunk = False

    def __init__(
        self, config: Any, *, layers: GridLayers, pg_collection: Any, **options: Any
    ) -> None:
        grid = layers.grid
        groups, here = copy.copy(pg_collection), copy.copy(config)
        groups.tp, groups.cp = grid.x, grid.sequence
        here.tensor_model_parallel_size = grid.x.size()
        here.context_parallel_size = grid.sequence.size()
        super().__init__(config=here, pg_collection=groups, **options)
        self.grid = grid
        # Of these, only checkpoints read it: what is not sharded is a copy on all p ranks.
        self.tp_group = self.self_attention.tp_group = grid.tp

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; ``[s/p, b, h]`` in the first and out of the last layer of a chunk."""
        if self.layer_number == 1:
            hidden_states = to_grid(hidden_states, self.grid.y)
        elif self.first_of_chunk:
            columns = hidden_states.shape[-1] // self.grid.y.size()
            hidden_states = hidden_states.view(-1, hidden_states.shape[1], columns)
        out, context = super().forward(hidden_states, *args, **kwargs)
        if self.layer_number == self.config.num_layers:
            out = from_grid(out, self.grid.y)
        elif self.last_of_chunk:
            out = out.view(-1, out.shape[1], out.shape[2] * self.grid.y.size())
            # The schedule frees outputs that were sent, and refuses views.
            out = make_viewless_tensor(out, requires_grad=out.requires_grad, keep_graph=True)
        return out, context

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Entries of a distributed checkpoint, the ones that any other layout writes."""
        entries: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        prefix = args[0] if args else kwargs.get("prefix", "")
        key, fc1 = f"{prefix}mlp.linear_fc1.weight", self.mlp.linear_fc1
        if isinstance(entries[key], ShardedTensorFactory):
            # Megatron splits gate and values by rows, and forgets the columns.
            entries[key] = _with_columns(entries[key], fc1)
        return entries


def _with_columns(factory: ShardedTensorFactory, fc1: GridLinear) -> ShardedTensorFactory:
    def build(*args: Any) -> Any:
        return [fc1.sharded_by_columns(entry) for entry in factory.build_fn(*args)]

    return replace(factory, build_fn=build)


_NORMS = {"TENorm", "FusedLayerNorm", "WrappedTorchNorm"}
_FIRST = {"TEColumnParallelLinear", "ColumnParallelLinear"}
_NORM_FIRST = {"TELayerNormColumnParallelLinear"}
_SECOND = {"TERowParallelLinear", "RowParallelLinear"}


def on_grid(block: Any, config: Any, layers: GridLayers) -> Any:
    """The specs of a model chunk's layers with the modules of this package.

    Raises:
        ConfigError: A layer has a module of which there is none for the grid, or a size that the
            grid does not divide.
    """
    _check(config, layers.grid)
    return replace(block, layer_specs=[_layer(spec, layers) for spec in block.layer_specs])


def _check(config: Any, grid: Grid) -> None:
    """Repeat the check of the flags, for frameworks that have none."""
    x, y = grid.x.size(), grid.y.size()
    over_x = ("num_attention_heads", "num_query_groups", "ffn_hidden_size")
    for name, divisor in (*((name, x) for name in over_x), ("hidden_size", y)):
        if getattr(config, name) % divisor:
            raise ConfigError(
                f"--tp-2d: {name} {getattr(config, name)} must be divisible by {divisor} on a grid "
                f"of {x} x {y} ranks"
            )
    if not config.sequence_parallel:
        raise ConfigError("--tp-2d needs --sequence-parallel: set sequence_parallel of the config")
    for name in ("multi_latent_attention", "num_moe_experts", "mtp_num_layers", "fp8", "fp4"):
        if getattr(config, name):
            raise ConfigError(f"--tp-2d does not work with {name}: remove one of them")


def _layer(spec: ModuleSpec, layers: GridLayers) -> ModuleSpec:
    parts = spec.submodules
    if class_of(spec) is not TransformerLayer or class_of(parts.mlp) is not MLP:
        raise _unavailable(f"{class_of(spec).__name__} with {class_of(parts.mlp).__name__}")
    for name in ("cross_attention", "pre_cross_attn_layernorm"):
        if getattr(parts, name) is not IdentityOp:
            raise _unavailable(name)
    parts = replace(
        parts,
        input_layernorm=_module(parts.input_layernorm, layers),
        pre_mlp_layernorm=_module(parts.pre_mlp_layernorm, layers),
        self_attention=_with(parts.self_attention, ("linear_qkv", "linear_proj"), layers),
        mlp=_with(parts.mlp, ("linear_fc1", "linear_fc2"), layers),
    )
    params = {**spec.params, "layers": layers}
    return replace(spec, module=GridTransformerLayer, params=params, submodules=parts)


def _with(spec: Any, names: Sequence[str], layers: GridLayers) -> Any:
    modules = submodules_of(spec)
    return with_submodules(
        spec, **{name: _module(getattr(modules, name), layers) for name in names}
    )


def _module(spec: Any, layers: GridLayers) -> Any:
    module = class_of(spec)
    name = module.__name__
    if module is IdentityOp:
        return spec
    if name in _NORMS:
        return ModuleSpec(module=GridNorm, params={"layers": layers})
    kinds = [(_FIRST, GridLinear), (_NORM_FIRST, GridNormLinear), (_SECOND, GridLinear)]
    for names, kind in kinds:
        if name in names:
            params = {"layers": layers, "second": names is _SECOND}
            return ModuleSpec(module=kind, params=params)
    raise _unavailable(name)


def _unavailable(what: str) -> ConfigError:
    return ConfigError(
        f"--tp-2d: there is no {what} for a grid of ranks: use a dense GPT model with "
        "--transformer-impl transformer_engine or local, or remove --tp-2d"
    )


def finish_chunk(model: Any, grid: Grid) -> None:
    """Complete a built model chunk: token order, rotary positions, ends of the chunk."""
    if len(model.decoder.layers):
        model.decoder.layers[0].first_of_chunk = True
        model.decoder.layers[-1].last_of_chunk = True
    if hasattr(model, "rotary_pos_emb"):
        model.rotary_pos_emb.cp_group = grid.sequence
    names = list(inspect.signature(model.forward).parameters)

    def put_in_order(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        _refuse_arguments(given)
        for name in ("input_ids", "position_ids", "labels", "loss_mask"):
            if (tokens := given.get(name)) is not None:
                given[name] = tokens[:, _orders(tokens, grid)[0]]
        return (), given

    def put_back(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        """Losses ``[b, s]``, or logits ``[b, s, v]``."""
        return out[:, _orders(out, grid)[1]]

    model.register_forward_pre_hook(put_in_order, with_kwargs=True)
    if model.post_process:
        model.register_forward_hook(put_back)


def _orders(x: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the tokens of ``x [b, s, ...]``, and the one that undoes it."""
    return _orders_of(x.shape[1], grid.x.size(), grid.y.size(), x.device)


@functools.lru_cache(maxsize=8)
@with_values
def _orders_of(
    tokens: int, x: int, y: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    order = token_order(tokens, x, y).to(device)
    return order, order.argsort()


def _refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raise for what the token order does not cover.

    Raises:
        ConfigError: Hidden states as input, packed documents, or generation.
    """
    names = {
        "decoder_input": "hidden states as input (decoder_input)",
        "packed_seq_params": "packed documents (packed_seq_params)",
        "inference_context": "generation",
        "inference_params": "generation",
    }
    for name, what in names.items():
        if given.get(name) is not None:
            raise ConfigError(f"--tp-2d does not work with {what}: remove --tp-2d")
